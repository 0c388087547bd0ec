"""Try a model: text in, text out. What `overspill generate` calls; no server and no batching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from overspill.errors import OverspillError
from overspill.interop.hf import (
    allocate_parameters,
    build_empty,
    load_config,
    load_tokenizer,
    load_weights,
    max_positions,
    model_directory,
)
from overspill.interop.sampling import refuse_odd_sampling

__all__ = ["generate_text"]


def generate_text(
    directory: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    chat: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
    on_text: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> str:
    """Continue ``prompt`` with the model of a directory or hub id; gives the new text alone.

    Args:
        chat: put the prompt through the tokenizer's chat template as a user's message.
        temperature: 0 takes the likeliest token each time; above, tokens are drawn, by ``seed``.
        on_text: called with each piece of text when it is known.
        on_note: called with a sentence where the text ends at the model's last position.

    Raises:
        OverspillError: OVS101 for a temperature or seed out of range; OVS203 when chat is asked for and the
            tokenizer has no template; OVS205 when the prompt fills the model's positions; those of loading.
    """
    import torch

    refuse_odd_sampling(temperature, seed)
    source = model_directory(directory)
    config = load_config(source)
    tokenizer = load_tokenizer(source)
    tokens = _prompt_tokens(tokenizer, prompt, chat, source)
    limit = max_positions(config)
    if limit is not None and len(tokens) >= limit:
        raise OverspillError(
            "OVS205",
            "The prompt leaves no position for new tokens.",
            field="prompt",
            value=len(tokens),
            limit=limit,
            next_step="Give a shorter prompt.",
        )
    room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(tokens))
    model = _model(source, config)
    ends = _ends(model, tokenizer)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature}
    inputs = torch.tensor([tokens])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=room,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            eos_token_id=ends,
            streamer=_streamer(tokenizer, on_text) if on_text is not None else None,
            **sampling,
        )
    new = output[0, len(tokens) :]
    if on_note is not None and len(new) == room < max_new_tokens and new[-1].item() not in (ends or []):
        on_note(
            f"The answer ends at the model's last position, {limit}: it has room for {room} tokens after this prompt."
        )
    text: str = tokenizer.decode(new, skip_special_tokens=True)
    return text


def _model(source: Path, config: Any) -> Any:
    import torch
    from transformers import GenerationConfig

    model = build_empty(config, config.dtype or torch.float32)
    allocate_parameters(model)
    load_weights(model, source)
    model.config.use_cache = True
    if (source / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(source), local_files_only=True)
    return model.eval()


def _prompt_tokens(tokenizer: Any, prompt: str, chat: bool, source: Path) -> list[int]:
    if not chat:
        tokens = list(tokenizer(prompt, verbose=False).input_ids)
        if tokens:
            return tokens
        raise OverspillError("OVS204", "The prompt is empty.", field="prompt", next_step="Give at least one character.")
    if tokenizer.chat_template is None:
        raise OverspillError(
            "OVS203",
            "The tokenizer has no chat template.",
            field=str(source),
            next_step="Leave out --chat, or use a model with chat_template.jinja.",
        )
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(rendered, add_special_tokens=False, verbose=False).input_ids)


def _ends(model: Any, tokenizer: Any) -> list[int] | None:
    """Every token that ends an answer: what the generation config names, and the tokenizer's own."""
    named = model.generation_config.eos_token_id
    ends = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    return sorted(end for end in ends if end is not None) or None


def _streamer(tokenizer: Any, on_text: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class _Streamer(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            on_text(text)

    return _Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
