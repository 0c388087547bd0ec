"""The Llama line: embeddings, layers of attention and MLP (or experts) with RMS norms, a norm, a head.

One ``Style`` says how a family differs from Llama. Names and order are those of `modeling_<family>.py` in transformers
5.24. ``text_model`` writes the decoder at any path, so that the vision-language models reuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from overspill.model.build import Assembly, Built, Parts
from overspill.model.config import Config
from overspill.model.facts import LayerKind, MlpFacts, MoeFacts, NormKind, Stack
from overspill.model.families.attend import Attend, Mixer, delta, grouped, indexed, latent
from overspill.model.families.feed import Experts, gated, mixture, plain, shared_fused

__all__ = ["Signature", "Style", "decoder", "text_facts", "text_model"]

#: What tells layers apart: kind of attention, rotated or not, mixture of experts or not.
Signature = tuple[str, bool, bool]

_TWO = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class Style:
    """How a member of the line differs from Llama.

    norms: names over the hidden width, in order. norm_affine: they have weights. mlp: names of a plain MLP, or how a
    gated one is built. mlp_bias: a config key, or the answer. layers: signatures of all layers.
    """

    attend: Attend = field(default_factory=Attend)
    latent: bool = False
    delta: Literal["", "fused", "split"] = ""
    norm: NormKind = "rms"
    norms: tuple[str, ...] = _TWO
    norm_bias: bool = False
    norm_affine: bool = True
    norms_before_mlp: bool = False
    mlp: Literal["gated", "fused", "plain"] = "gated"
    mlp_names: tuple[str, str] = ("up_proj", "down_proj")
    mlp_bias: str | bool = False
    mlp_at: str = "mlp"
    dense_width: str = "intermediate_size"
    experts: Experts | None = None
    layers: Callable[[Config], list[Signature]] | None = None
    final_norm: str = "norm"
    head_bias: str | bool = False
    embedding_scaled: str | bool = False
    logits_scaled: str = ""
    residual_scaled: bool = False
    parallel: str | bool = False
    residual_dropout: str = ""
    embedding_dropout: str = ""


def uniform(config: Config, moe: bool = False) -> list[Signature]:
    """Every layer alike; with a window where the config states one."""
    kind = "sliding" if config.integer("sliding_window", 0) else "full"
    return [(kind, True, moe)] * config.number("num_hidden_layers")


def _answer(config: Config, key: str | bool) -> bool:
    return config.flag(key) if isinstance(key, str) and key else bool(key)


def _mixer(config: Config, style: Style, kind: str, rope: bool) -> tuple[str, Mixer]:
    if kind == "linear":
        return "linear_attn", delta(config, fused=style.delta == "fused")
    if kind.startswith("sparse"):
        return "self_attn", indexed(config, style.attend, style.norm, shared=kind == "sparse, shared")
    attend: Any = latent if style.latent else grouped
    return "self_attn", attend(config, style.attend, style.norm, kind, rope)


def _feed(config: Config, style: Style, moe: bool) -> tuple[Parts, MlpFacts | None, MoeFacts | None]:
    if moe:
        assert style.experts is not None
        parts, experts = mixture(config, style.experts)
        return parts, None, experts
    width, bias = config.number(style.dense_width), _answer(config, style.mlp_bias)
    if style.mlp == "plain":
        parts, mlp = plain(config, width, style.mlp_names, bias=bias)
    else:
        parts, mlp = gated(config, width, fused=style.mlp == "fused", bias=bias)
    return parts, mlp, None


def layer_of(config: Config, style: Style, signature: Signature) -> LayerKind:
    """One layer of that signature."""
    kind, rope, moe = signature
    hidden = config.number("hidden_size")
    name, (mixer, attention) = _mixer(config, style, kind, rope)
    feed, mlp, experts = _feed(config, style, moe)
    parallel = _answer(config, style.parallel)
    names = style.norms[:1] if parallel else style.norms
    norms = Parts()
    for norm in names if style.norm_affine else ():
        norms.norm(norm, hidden, style.norm_bias)
    parts = Parts(f"{name}.").extend(mixer)
    feeding = Parts(f"{style.mlp_at}.").extend(feed)
    if moe and experts is not None and style.experts is not None and style.experts.shared_fused:
        wide = config.integer(style.experts.shared_width, 0)
        if wide:
            beside, shared = shared_fused(config, wide)
            feeding = Parts().extend(feeding).extend(Parts(f"{style.experts.shared}.").extend(beside))
            experts = replace(experts, shared=shared)
    layer = Parts().extend(parts)
    for piece in (norms, feeding) if style.norms_before_mlp else (feeding, norms):
        layer.extend(piece)
    words = [kind, "attention" if kind != "linear" else "attention (delta rule)"]
    words += [] if rope or kind == "linear" else ["without rotation"]
    return LayerKind(
        name=" ".join([*words, "+", "experts" if moe else "MLP"]),
        positions=(),
        hidden=hidden,
        parameters=tuple(layer.named),
        linears=tuple(layer.linears),
        norm=style.norm,
        norms=len(names),
        attention=attention,
        mlp=mlp,
        moe=experts,
        parallel_residual=parallel,
        residual_dropout=config.ratio(style.residual_dropout) if style.residual_dropout else 0.0,
        residual_scaled=style.residual_scaled
        and (config.model_type == "minicpm3" or config.ratio("residual_multiplier", 1.0) != 1.0),
    )


def text_model(assembly: Assembly, config: Config, style: Style, at: str) -> Stack:
    """Embeddings, layers and last norm under ``at`` (``"model."``)."""
    hidden = config.number("hidden_size")
    signatures = style.layers(config) if style.layers else uniform(config, style.experts is not None)
    assembly.outer(at).weight("embed_tokens", config.number("vocab_size"), hidden)
    stack = assembly.stack(
        "decoder", f"{at}layers", hidden, signatures, lambda signature: layer_of(config, style, signature),
        final_norm=style.norm,
    )  # fmt: skip
    if style.norm_affine:
        assembly.outer(at).norm(style.final_norm, hidden, style.norm_bias)
    return stack


def text_facts(config: Config, style: Style) -> dict[str, Any]:
    """The fields of ModelFacts that a decoder of this line has, wherever it stands."""
    scaled = style.embedding_scaled
    return {
        "hidden": config.number("hidden_size"),
        "vocab": config.number("vocab_size"),
        "positions": "rotary",
        "max_positions": config.integer("max_position_embeddings", 0) or None,
        "embedding_dropout": config.ratio(style.embedding_dropout) if style.embedding_dropout else 0.0,
        "embedding_scaled": config.ratio(scaled, 1.0) != 1.0 if isinstance(scaled, str) and scaled else bool(scaled),
        "logits_softcap": config.get("final_logit_softcapping"),
        "logits_scaled": bool(style.logits_scaled) and config.ratio(style.logits_scaled, 1.0) != 1.0,
    }


def decoder(style: Style) -> Callable[[Config], Built]:
    """A causal language model of that style."""

    def build(config: Config) -> Built:
        assembly = Assembly()
        text_model(assembly, config, style, "model.")
        bias = _answer(config, style.head_bias)
        assembly.outer().linear("lm_head", config.number("hidden_size"), config.number("vocab_size"), bias)
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.flag("tie_word_embeddings") else {}
        facts = text_facts(config, style)
        return assembly.finish(family=config.model_type, kind="decoder", tied=tied, head="lm_head", **facts)

    return build
