"""Vision-language models: a tower, a projector, and a decoder of the Llama line; and CLIP's two encoders.

Source: `modeling_<family>.py` of transformers 5.24. The nested configs say their own model_type, or have the one that
the family's config class gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Literal

from overspill.model.build import Assembly, Built
from overspill.model.config import Config
from overspill.model.families.llama_line import Style, text_facts, text_model
from overspill.model.families.styles import STYLES
from overspill.model.families.towers import TOWERS, Tower, clip_layers, qwen_tower

__all__ = ["BUILDERS", "NESTED"]

#: Decoders that stand in vision-language models only.
_TEXTS: Final[dict[str, Style]] = STYLES | {
    "qwen2_vl_text": STYLES["qwen2"],
    "qwen2_5_vl_text": STYLES["qwen2"],
    "qwen3_vl_text": STYLES["qwen3"],
    "qwen3_vl_moe_text": STYLES["qwen3_moe"],
}
#: model_types of nested configs whose defaults are read.
NESTED: Final = (
    *TOWERS, *(name for name in _TEXTS if name not in STYLES), "clip_text_model", "siglip_text_model",
    "qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_5_vision",
    "qwen3_5_moe_vision",
)  # fmt: skip


def _text_of(config: Config, model_type: str, *, flat: bool = False) -> tuple[Config, Style]:
    """The text model's config and style; flat: older files hold its keys at their top."""
    text = config.flattened(model_type) if flat and not config.says("text_config") else config.child(
        "text_config", model_type
    )  # fmt: skip
    style = _TEXTS.get(text.model_type)
    if style is None:
        raise ValueError(f"text_config is of family {text.model_type!r}; known: {', '.join(sorted(_TEXTS))}")
    return text, style


def _finish(
    config: Config,
    assembly: Assembly,
    text: Config,
    style: Style,
    tower: Tower,
    *,
    embedding: str,
    head: str,
    tied: bool,
    tokens_per_image: int | None = None,
) -> Built:
    assembly.outer().linear(head, text.number("hidden_size"), text.number("vocab_size"))
    vision = tower.facts
    if tokens_per_image is not None:
        vision = replace(vision, tokens_per_image=tokens_per_image)
    return assembly.finish(
        family=config.model_type, kind="vision-language", head=head, vision=vision,
        tied={f"{head}.weight": f"{embedding}.weight"} if tied else {}, **text_facts(text, style),
    )  # fmt: skip


def _with_tower(
    vision_type: str, text_type: str, project: Callable[[Config, Assembly, Tower, int], int | None]
) -> Callable[[Config], Built]:
    """LLaVA's plan: ``model.vision_tower``, ``model.multi_modal_projector``, ``model.language_model``, ``lm_head``."""

    def build(config: Config) -> Built:
        vision = config.child("vision_config", vision_type)
        text, style = _text_of(config, text_type)
        tower_of = TOWERS.get(vision.model_type)
        if tower_of is None:
            raise ValueError(f"vision_config is of family {vision.model_type!r}; known: {', '.join(sorted(TOWERS))}")
        assembly = Assembly()
        tower = tower_of(assembly, vision, "model.vision_tower.")
        tokens = project(config, assembly, tower, text.number("hidden_size"))
        text_model(assembly, text, style, "model.language_model.")
        # Files from before transformers 5 say it in text_config or mean its class's default, and so are their weights.
        # The outer class's default in transformers 5 is another for some, and gives way when it loads such weights.
        own = config.says("tie_word_embeddings")
        tied = config.flag("tie_word_embeddings") if own else text.flag("tie_word_embeddings")
        if config.model_type == "llava":
            tied = tied or text.flag("tie_word_embeddings")
        return _finish(
            config, assembly, text, style, tower, embedding="model.language_model.embed_tokens", head="lm_head",
            tied=tied, tokens_per_image=tokens,
        )  # fmt: skip

    return build


_PROJECTOR: Final = "model.multi_modal_projector."


def _llava(config: Config, assembly: Assembly, tower: Tower, hidden: int) -> int | None:
    layers = config.get("vision_feature_layer", -2)
    wide = tower.width * (len(layers) if isinstance(layers, (list, tuple)) else 1)
    bias = config.flag("multimodal_projector_bias", True)
    assembly.outer(_PROJECTOR).linear("linear_1", wide, hidden, bias).linear("linear_2", hidden, hidden, bias)
    whole = tower.facts.tokens_per_image
    return whole + 1 if whole and config.text("vision_feature_select_strategy", "default") == "full" else whole


def _mistral3(config: Config, assembly: Assembly, tower: Tower, hidden: int) -> int | None:
    layers = config.get("vision_feature_layer", -1)
    count = len(layers) if isinstance(layers, (list, tuple)) else 1
    merge, bias = config.integer("spatial_merge_size", 2), config.flag("multimodal_projector_bias")
    outer = assembly.outer(_PROJECTOR).norm("norm", tower.width)
    outer.linear("patch_merger.merging_layer", tower.width * merge * merge, tower.width)
    outer.linear("linear_1", tower.width * count, hidden, bias).linear("linear_2", hidden, hidden, bias)
    return None


def _gemma3(config: Config, assembly: Assembly, tower: Tower, hidden: int) -> int | None:
    outer = assembly.outer(_PROJECTOR).parameter("mm_input_projection_weight", tower.width, hidden)
    outer.norm("mm_soft_emb_norm", tower.width)
    return config.integer("mm_tokens_per_image", 256)


def _paligemma(config: Config, assembly: Assembly, tower: Tower, hidden: int) -> int | None:
    projected = config.child("vision_config", "siglip_vision_model").integer("projection_dim", 0)
    assembly.outer(_PROJECTOR).linear("linear", tower.width, projected or config.integer("projection_dim"), True)
    return tower.facts.tokens_per_image


def _internvl(config: Config, assembly: Assembly, tower: Tower, hidden: int) -> int | None:
    merged = tower.width * int(1 / config.ratio("downsample_ratio", 0.5)) ** 2
    outer = assembly.outer(_PROJECTOR).norm("layer_norm", merged, bias=True)
    outer.linear("linear_1", merged, hidden, True).linear("linear_2", hidden, hidden, True)
    return config.integer("image_seq_length", 256)


def _qwen(generation: Literal["2", "2.5", "3"], *, flat: bool = False) -> Callable[[Config], Built]:
    def build(config: Config) -> Built:
        family = config.model_type
        vision = config.child("vision_config", f"{family}_vision").typed(f"{family}_vision")
        text, style = _text_of(config, f"{family}_text", flat=flat)
        assembly = Assembly()
        tower = qwen_tower(assembly, vision, "model.visual.", generation)
        text_model(assembly, text, style, "model.language_model.")
        return _finish(
            config, assembly, text, style, tower, embedding="model.language_model.embed_tokens", head="lm_head",
            tied=config.flag("tie_word_embeddings"),
        )  # fmt: skip

    return build


def _llama4(config: Config) -> Built:
    vision, (text, style) = config.child("vision_config", "llama4_vision_model"), _text_of(config, "llama4_text")
    assembly = Assembly()
    tower = TOWERS["llama4_vision_model"](assembly, vision, "vision_model.")
    assembly.outer("multi_modal_projector.").linear("linear_1", tower.width, text.number("hidden_size"))
    text_model(assembly, text, style, "language_model.model.")
    return _finish(
        config, assembly, text, style, tower, embedding="language_model.model.embed_tokens",
        head="language_model.lm_head", tied=config.flag("tie_word_embeddings"),
    )  # fmt: skip


def _two_towers(config: Config) -> Built:
    """CLIP and SigLIP: one encoder for text, one for images, compared by their last vectors."""
    clip = config.model_type == "clip"
    text = config.child("text_config", f"{config.model_type}_text_model")
    vision = config.child("vision_config", f"{config.model_type}_vision_model")
    hidden, positions = text.number("hidden_size"), text.integer("max_position_embeddings")
    assembly = Assembly()
    assembly.outer().parameter("logit_scale", *(() if clip else (1,)))
    if not clip:
        assembly.outer().parameter("logit_bias", 1)
    outer = assembly.outer("text_model.embeddings.").weight("token_embedding", text.number("vocab_size"), hidden)
    outer.weight("position_embedding", positions, hidden)
    clip_layers(assembly, text, "text_model.", "encoder", norms_last=clip)
    outer = assembly.outer("text_model.").norm("final_layer_norm", hidden, bias=True)
    if not clip:
        outer.linear("head", hidden, text.integer("projection_size", hidden), True)
    tower = TOWERS[f"{config.model_type}_vision_model"](assembly, vision, "vision_model.")
    if clip:
        projected = config.number("projection_dim")
        assembly.outer().linear("visual_projection", tower.width, projected)
        assembly.outer().linear("text_projection", hidden, projected)
    facts: dict[str, Any] = {"positions": "learned", "max_positions": positions, "vision": tower.facts}
    return assembly.finish(
        family=config.model_type, kind="vision-language", hidden=hidden, vocab=text.number("vocab_size"), **facts
    )  # fmt: skip


BUILDERS: Final[dict[str, Callable[[Config], Built]]] = {
    "llava": _with_tower("clip_vision_model", "llama", _llava),
    "mistral3": _with_tower("pixtral", "mistral", _mistral3),
    "gemma3": _with_tower("siglip_vision_model", "gemma3_text", _gemma3),
    "paligemma": _with_tower("siglip_vision_model", "gemma", _paligemma),
    "internvl": _with_tower("internvl_vision", "qwen2", _internvl),
    "qwen2_vl": _qwen("2", flat=True),
    "qwen2_5_vl": _qwen("2.5", flat=True),
    "qwen3_vl": _qwen("3"),
    "qwen3_vl_moe": _qwen("3"),
    "qwen3_5": _qwen("3"),
    "qwen3_5_moe": _qwen("3"),
    "llama4": _llama4,
    "clip": _two_towers,
    "siglip": _two_towers,
}
