"""A real model that is small enough for any test: a Llama of 0.3 M parameters in Hugging Face form.

Config, tokenizer and a play are committed in tests/assets/tiny; the weights are made here, seeded, in a fraction
of a second. Everything that a large model has is there: grouped-query attention, rotary buffers, a chat template,
tied or untied embeddings. Its loss on the play falls within some tens of steps.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

__all__ = ["TINY_ASSETS", "TINY_PLAY", "make_tiny_model"]

TINY_ASSETS = Path(__file__).resolve().parent.parent / "tests" / "assets" / "tiny"
TINY_PLAY = TINY_ASSETS / "macbeth.txt"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_tiny_model(directory: str | Path, *, seed: int = 0, dtype: str = "bfloat16", **overrides: Any) -> Path:
    """Write config.json, model.safetensors and the tokenizer into ``directory``; gives the directory.

    Args:
        directory: made if it is missing.
        seed: of the random weights.
        dtype: of the saved weights, ``"bfloat16"`` or ``"float32"``.
        overrides: keys of the config, for example ``tie_word_embeddings=True``, ``hidden_size=128``,
            ``attention_dropout=0.1``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    values = json.loads((TINY_ASSETS / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**{**values, **overrides, "dtype": dtype})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(str(target))
    for name in _TOKENIZER_FILES:
        shutil.copyfile(TINY_ASSETS / name, target / name)
    return target
