"""Vision towers: what turns an image's patches into vectors, under the names of the vision-language model around them.

Each function adds its sections to an assembly at a path, and returns the width that leaves it and how an image becomes
tokens. Source: `modeling_<family>.py` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from overspill.model.build import Assembly, Parts
from overspill.model.config import Config
from overspill.model.facts import AttentionFacts, LayerKind, MlpFacts, NormKind, VisionFacts
from overspill.model.families.encoders import side_of
from overspill.model.families.feed import activation_of

__all__ = ["TOWERS", "Tower", "clip_layers", "qwen_tower"]


@dataclass(frozen=True, slots=True)
class Tower:
    """What comes out of a tower: the width, and how many patches an image has."""

    width: int
    facts: VisionFacts


def _layer(
    parts: Parts,
    hidden: int,
    attention: AttentionFacts,
    mlp: MlpFacts,
    norm: NormKind = "layer",
    *,
    scaled: bool = False,
) -> LayerKind:
    return LayerKind(
        name=f"{attention.kind} attention + MLP", positions=(), hidden=hidden, parameters=tuple(parts.named),
        linears=tuple(parts.linears), norm=norm, norms=2, attention=attention, mlp=mlp, residual_scaled=scaled,
    )  # fmt: skip


def _attention(config: Config, hidden: int, heads_key: str = "num_attention_heads", **more: Any) -> AttentionFacts:
    heads = config.number(heads_key)
    return AttentionFacts(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, v_head_dim=hidden // heads, causal=False,
        dropout=config.ratio("attention_dropout"), **more,
    )  # fmt: skip


def clip_layers(
    assembly: Assembly, config: Config, at: str, role: Literal["vision", "encoder"], *, norms_last: bool
) -> None:
    """The layers of CLIP and SigLIP, of an image's tower or of a text's; norms_last: in which order they stand."""
    hidden, width = config.number("hidden_size"), config.number("intermediate_size")

    def layer(_: object) -> LayerKind:
        attend, feed = Parts("self_attn."), Parts("mlp.")
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            attend.linear(name, hidden, hidden, True)
        feed.linear("fc1", hidden, width, True).linear("fc2", width, hidden, True)
        first, second = Parts().norm("layer_norm1", hidden, bias=True), Parts().norm("layer_norm2", hidden, bias=True)
        parts = Parts()
        for piece in (attend, first, feed, second) if norms_last else (first, attend, second, feed):
            parts.extend(piece)
        mlp = MlpFacts("plain", width, activation_of(config), True)
        return _layer(parts, hidden, _attention(config, hidden, bias=True), mlp)

    layers = ["full"] * config.number("num_hidden_layers")
    assembly.stack(role, f"{at}encoder.layers", hidden, layers, layer)


def _grid(config: Config) -> tuple[int, int, int, int]:
    """Patch, image side, patches in a whole image, channels."""
    patch, image = side_of(config.get("patch_size")), side_of(config.get("image_size"))
    return patch, image, (image // patch) ** 2, config.integer("num_channels", 3)


def _clip(assembly: Assembly, config: Config, at: str) -> Tower:
    hidden = config.number("hidden_size")
    patch, image, patches, channels = _grid(config)
    outer = assembly.outer(at).parameter("embeddings.class_embedding", hidden)
    outer.weight("embeddings.patch_embedding", hidden, channels, patch, patch)
    outer.weight("embeddings.position_embedding", patches + 1, hidden).norm("pre_layrnorm", hidden, bias=True)
    clip_layers(assembly, config, at, "vision", norms_last=True)
    assembly.outer(at).norm("post_layernorm", hidden, bias=True)
    return Tower(hidden, VisionFacts(patch, channels, image, tokens_per_image=patches))


def _siglip(assembly: Assembly, config: Config, at: str) -> Tower:
    hidden, width = config.number("hidden_size"), config.number("intermediate_size")
    patch, image, patches, channels = _grid(config)
    outer = assembly.outer(at).weight("embeddings.patch_embedding", hidden, channels, patch, patch, bias=True)
    outer.weight("embeddings.position_embedding", patches, hidden)
    clip_layers(assembly, config, at, "vision", norms_last=False)
    outer = assembly.outer(at).norm("post_layernorm", hidden, bias=True)
    if config.flag("vision_use_head", True):
        outer.parameter("head.probe", 1, 1, hidden).parameter("head.attention.in_proj_weight", 3 * hidden, hidden)
        outer.parameter("head.attention.in_proj_bias", 3 * hidden)
        outer.linear("head.attention.out_proj", hidden, hidden, True).norm("head.layernorm", hidden, bias=True)
        outer.linear("head.mlp.fc1", hidden, width, True).linear("head.mlp.fc2", width, hidden, True)
    return Tower(hidden, VisionFacts(patch, channels, image, tokens_per_image=patches))


def _pixtral(assembly: Assembly, config: Config, at: str) -> Tower:
    hidden, width = config.number("hidden_size"), config.number("intermediate_size")
    patch, image, _, channels = _grid(config)

    def layer(_: object) -> LayerKind:
        parts = Parts().norm("attention_norm", hidden)
        parts.linear("feed_forward.gate_proj", hidden, width).linear("feed_forward.up_proj", hidden, width)
        parts.linear("feed_forward.down_proj", width, hidden)
        for name in ("k_proj", "v_proj", "q_proj", "o_proj"):
            parts.linear(f"attention.{name}", hidden, hidden)
        parts.norm("ffn_norm", hidden)
        attention = _attention(config, hidden, rotary_dim=hidden // config.number("num_attention_heads"))
        return _layer(parts, hidden, attention, MlpFacts("gated", width, activation_of(config)), "rms")

    assembly.outer(at).weight("patch_conv", hidden, channels, patch, patch).norm("ln_pre", hidden)
    layers = ["full"] * config.number("num_hidden_layers")
    assembly.stack("vision", f"{at}transformer.layers", hidden, layers, layer)
    return Tower(hidden, VisionFacts(patch, channels, image))


def _internvl(assembly: Assembly, config: Config, at: str) -> Tower:
    hidden, width = config.number("hidden_size"), config.number("intermediate_size")
    patch, image, patches, channels = _grid(config)
    bias = config.flag("attention_bias")
    if config.flag("use_qk_norm") or config.text("norm_type", "layer_norm") != "layer_norm":
        raise ValueError(
            "of InternVL's vision tower, the shapes with layer norms and without norms on q and k are known"
        )

    def layer(_: object) -> LayerKind:
        parts = Parts().parameter("lambda_1", hidden).parameter("lambda_2", hidden)
        for name in ("q_proj", "k_proj", "v_proj"):
            parts.linear(f"attention.{name}", hidden, hidden, bias)
        parts.linear("attention.projection_layer", hidden, hidden, True)
        parts.linear("mlp.fc1", hidden, width, True).linear("mlp.fc2", width, hidden, True)
        parts.norm("layernorm_before", hidden, bias=True).norm("layernorm_after", hidden, bias=True)
        mlp = MlpFacts("plain", width, activation_of(config), True)
        return _layer(parts, hidden, _attention(config, hidden, bias=bias), mlp, scaled=True)

    outer = assembly.outer(f"{at}embeddings.").parameter("cls_token", 1, 1, hidden)
    if config.flag("use_mask_token"):
        outer.parameter("mask_token", 1, 1, hidden)
    if config.flag("use_absolute_position_embeddings", True):
        outer.parameter("position_embeddings", 1, patches + 1, hidden)
    outer.weight("patch_embeddings.projection", hidden, channels, patch, patch, bias=True)
    layers = ["full"] * config.number("num_hidden_layers")
    assembly.stack("vision", f"{at}encoder.layer", hidden, layers, layer)
    if not config.flag("use_mean_pooling", True):
        assembly.outer(at).norm("layernorm", hidden, bias=True)
    return Tower(hidden, VisionFacts(patch, channels, image, tokens_per_image=patches))


def _llama4(assembly: Assembly, config: Config, at: str) -> Tower:
    hidden, width = config.number("hidden_size"), config.number("intermediate_size")
    patch, image, patches, channels = _grid(config)
    projected, out = config.number("projector_input_dim"), config.number("projector_output_dim")
    shrunk = int(1 / config.ratio("pixel_shuffle_ratio", 0.5) ** 2)

    def layer(_: object) -> LayerKind:
        parts = Parts()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            parts.linear(f"self_attn.{name}", hidden, hidden, True)
        parts.linear("mlp.fc1", hidden, width, True).linear("mlp.fc2", width, hidden, True)
        parts.norm("input_layernorm", hidden, bias=True).norm("post_attention_layernorm", hidden, bias=True)
        attention = _attention(config, hidden, bias=True, rotary_dim=hidden // config.number("num_attention_heads"))
        return _layer(parts, hidden, attention, MlpFacts("plain", width, "gelu", True))

    outer = assembly.outer(at).parameter("class_embedding", hidden)
    outer.parameter("positional_embedding_vlm", patches + 1, hidden)
    outer.linear("patch_embedding.linear", channels * patch * patch, hidden)
    outer.norm("layernorm_pre", hidden, bias=True).norm("layernorm_post", hidden, bias=True)
    layers = ["full"] * config.number("num_hidden_layers")
    assembly.stack("vision", f"{at}model.layers", hidden, layers, layer)
    outer = assembly.outer(f"{at}vision_adapter.mlp.")
    outer.linear("fc1", width, projected).linear("fc2", out, out)
    return Tower(
        config.number("vision_output_dim"),
        VisionFacts(patch, channels, image, merged=round(shrunk**0.5), tokens_per_image=patches // shrunk),
    )


def qwen_tower(assembly: Assembly, config: Config, at: str, generation: Literal["2", "2.5", "3"]) -> Tower:
    """The tower of Qwen-VL: patches of two frames, rotary positions, a merger into the text model's width."""
    first = generation == "2"
    hidden = config.number("embed_dim" if first else "hidden_size")
    out = config.number("hidden_size" if first else "out_hidden_size")
    width = config.integer("mlp_ratio", 4) * hidden if first else config.number("intermediate_size")
    patch, frames = side_of(config.get("patch_size", 14)), side_of(config.get("temporal_patch_size", 2))
    merge, channels = config.integer("spatial_merge_size", 2), config.integer("in_channels", 3)
    gated, norm_bias = generation == "2.5", generation != "2.5"
    names = ("linear_fc1", "linear_fc2") if generation == "3" else ("fc1", "fc2")
    whole = set(config.get("fullatt_block_indexes", [])) if gated else set()

    def layer(kind: Literal["full", "sliding"]) -> LayerKind:
        parts = Parts().norm("norm1", hidden, norm_bias).norm("norm2", hidden, norm_bias)
        parts.linear("attn.qkv", hidden, 3 * hidden, True).linear("attn.proj", hidden, hidden, True)
        if gated:
            parts.linear("mlp.gate_proj", hidden, width, True).linear("mlp.up_proj", hidden, width, True)
            parts.linear("mlp.down_proj", width, hidden, True)
        else:
            parts.linear(f"mlp.{names[0]}", hidden, width, True).linear(f"mlp.{names[1]}", width, hidden, True)
        heads = config.number("num_heads")
        window = (config.integer("window_size", 112) // patch) ** 2 if kind == "sliding" else None
        attention = _attention(
            config, hidden, "num_heads", kind=kind, window=window, fused_qkv=True, bias=True, rotary_dim=hidden // heads
        )
        mlp = MlpFacts("gated" if gated else "plain", width, activation_of(config), True)
        return _layer(parts, hidden, attention, mlp, "rms" if gated else "layer")

    outer = assembly.outer(at).weight(
        "patch_embed.proj", hidden, channels, frames, patch, patch, bias=generation == "3"
    )  # fmt: skip
    if generation == "3":
        outer.weight("pos_embed", config.integer("num_position_embeddings"), hidden)
    kinds: Sequence[str] = [
        "sliding" if gated and index not in whole else "full" for index in range(config.number("depth"))
    ]
    assembly.stack("vision", f"{at}blocks", hidden, kinds, layer)
    merged = hidden * merge * merge
    if generation == "3":
        _merger(assembly.outer(f"{at}merger."), hidden, merged, out)
        for index in range(len(config.get("deepstack_visual_indexes", []))):
            _merger(assembly.outer(f"{at}deepstack_merger_list.{index}."), merged, merged, out)
    else:
        outer = assembly.outer(f"{at}merger.").norm("ln_q", hidden, norm_bias)
        outer.linear("mlp.0", merged, merged, True).linear("mlp.2", merged, out, True)
    return Tower(out, VisionFacts(patch, channels, merged=merge, temporal_patch=frames))


def _merger(outer: Parts, normed: int, merged: int, out: int) -> None:
    outer.norm("norm", normed, bias=True).linear("linear_fc1", merged, merged, True)
    outer.linear("linear_fc2", merged, out, True)


#: By the vision config's model_type.
TOWERS = {
    "clip_vision_model": _clip,
    "siglip_vision_model": _siglip,
    "pixtral": _pixtral,
    "internvl_vision": _internvl,
    "llama4_vision_model": _llama4,
}
