"""What follows attention in a decoder layer: a dense MLP or a mixture of experts.

In transformers 5 the experts of a layer are two 3-D parameters (gate and up, and down), not modules of their own.
Names here are inside the module; the options that tell families apart are in ``Experts``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from overspill.model.build import Parts
from overspill.model.config import Config
from overspill.model.facts import MlpFacts, MoeFacts

__all__ = ["Experts", "activation_of", "gated", "mixture", "plain", "shared_fused"]


@dataclass(frozen=True, slots=True)
class Experts:
    """How a family's mixture is built.

    count, top_k, width: config keys. router: its name; router_first: it stands before the experts. shared: name of the
    MLP that every token passes; shared_width: key of its width, or ``n_shared_experts`` times the experts' own.
    """

    count: str = "num_experts"
    top_k: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    router: str = "gate"
    router_linear: bool = False
    router_first: bool = True
    router_bias: bool = False
    router_fp32: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    shared: str | None = None
    shared_fused: bool = False
    shared_width: str = "n_shared_experts"
    shared_gate: bool = False
    shared_bias: str = ""
    transposed: bool = False
    bias: bool = False


def activation_of(config: Config) -> str:
    for key in ("hidden_activation", "hidden_act", "activation_function", "activation"):
        value = config.get(key)
        if value is not None:
            return str(value)
    return "silu"


def gated(config: Config, width: int, *, fused: bool = False, bias: bool = False) -> tuple[Parts, MlpFacts]:
    """gate, up and down; fused: one projection gives gate and up."""
    hidden = config.number("hidden_size")
    parts = Parts()
    if fused:
        parts.linear("gate_up_proj", hidden, 2 * width, bias)
    else:
        parts.linear("gate_proj", hidden, width, bias).linear("up_proj", hidden, width, bias)
    parts.linear("down_proj", width, hidden, bias)
    return parts, MlpFacts("fused_gated" if fused else "gated", width, activation_of(config), bias)


def plain(
    config: Config, width: int, names: tuple[str, str], *, bias: bool, dropout: float = 0.0
) -> tuple[Parts, MlpFacts]:
    """up, activation, down."""
    hidden = config.number("hidden_size")
    parts = Parts().linear(names[0], hidden, width, bias).linear(names[1], width, hidden, bias)
    return parts, MlpFacts("plain", width, activation_of(config), bias, dropout)


def mixture(config: Config, style: Experts) -> tuple[Parts, MoeFacts]:
    """Router, experts, and the shared expert."""
    hidden, count, width = config.number("hidden_size"), config.number(style.count), config.number(style.width)
    router = Parts()
    if style.router_linear:
        router.linear(style.router, hidden, count, style.router_bias)
    else:
        router.weight(style.router, count, hidden, bias=style.router_bias)
    parts = Parts()
    if style.router_first:
        parts.extend(router)
    parts.experts("experts.gate_up_proj", count, hidden, 2 * width, bias=style.bias, transposed=style.transposed)
    parts.experts("experts.down_proj", count, width, hidden, bias=style.bias, transposed=style.transposed)
    if not style.router_first:
        parts.extend(router)
    shared = _shared(config, style, parts, width)
    if style.shared_gate:
        parts.linear("shared_expert_gate", hidden, 1)
    return parts, MoeFacts(
        experts=count,
        top_k=config.integer(style.top_k, 0) or 2,
        expert=MlpFacts("fused_gated", width, activation_of(config), style.bias),
        shared=shared,
        shared_gate=style.shared_gate,
        router_fp32=style.router_fp32,
        weights_fp32=style.scores == "sigmoid" or config.model_type in ("mixtral", "minimax", "deepseek_v2"),
        scores=style.scores,
        router_bias=style.router_bias,
    )


def shared_fused(config: Config, width: int) -> tuple[Parts, MlpFacts]:
    """Granite's shared expert, which stands beside the mixture and not in it."""
    hidden = config.number("hidden_size")
    parts = Parts().linear("input_linear", hidden, 2 * width).linear("output_linear", width, hidden)
    return parts, MlpFacts("fused_gated", width, activation_of(config))


def _shared(config: Config, style: Experts, parts: Parts, width: int) -> MlpFacts | None:
    if style.shared is None or style.shared_fused:
        return None
    by_count = style.shared_width == "n_shared_experts"
    wide = width * config.integer("n_shared_experts", 1) if by_count else config.number(style.shared_width)
    inner, facts = gated(config, wide, bias=bool(style.shared_bias) and config.flag(style.shared_bias))
    named = Parts(f"{style.shared}.").extend(inner)
    parts.extend(named)
    return facts
