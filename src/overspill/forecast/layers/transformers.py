"""A layer as transformers writes it, and as most model code of the same shape: norm, attention, add, norm, MLP, add."""

from __future__ import annotations

from overspill.forecast.layers import parts
from overspill.forecast.layers.moe import mixture
from overspill.forecast.layers.parts import Layer
from overspill.forecast.layers.roles import roles_of
from overspill.forecast.layers.run import Run
from overspill.forecast.tape import Tensor, ops
from overspill.model.facts import LayerKind

__all__ = ["forward"]


def forward(layer: Layer, kind: LayerKind, x: Tensor, run: Run) -> Tensor:
    """One decoder or encoder layer."""
    out = _forward(layer, kind, x, run)
    layer.frame.clear()
    return out


def _forward(layer: Layer, kind: LayerKind, x: Tensor, run: Run) -> Tensor:
    tape = layer.tape
    roles = roles_of(kind)
    names = {part: {role: linear.name for role, linear in found.items()} for part, found in roles.items()}
    after = kind.norms == 2 and any(name.startswith("post_feedforward_layernorm") for name, _ in kind.parameters)
    sandwich = kind.norms > 2 or after  # Gemma 2, 3: a norm before and after each part; OLMo 2: only after

    def mlp(h: Tensor) -> Tensor:
        if kind.moe is not None:
            return mixture(layer, h, kind.moe, roles, run)
        assert kind.mlp is not None
        if kind.mlp.kind == "plain":
            return parts.plain_mlp(layer, h, names["mlp"], kind.mlp.intermediate, kind.mlp.activation)
        return parts.gated_mlp(layer, h, names["mlp"], kind.mlp.intermediate)

    def attend(h: Tensor) -> Tensor:
        assert kind.attention is not None
        return parts.attention(layer, h, kind.attention, names["attention"])

    def leave(h: Tensor) -> Tensor:
        if kind.residual_scaled:
            h = ops.scale(tape, h)
        return ops.dropout(tape, h, kind.residual_dropout)

    def norm(h: Tensor, name: str) -> Tensor:
        if after and not name.endswith("_after"):
            return h
        return parts.norm(layer, h, name, kind.norm, kind.hidden)

    residual = x
    h = parts.enter(layer, norm(x, "norm_1"))
    if kind.parallel_residual:
        first = leave(parts.leave(layer, attend(h)))
        h = h if kind.norms < 2 else parts.enter(layer, norm(x, "norm_2"))
        second = leave(parts.leave(layer, mlp(h)))
        return ops.add(tape, ops.add(tape, first, second), residual)
    if kind.attention is not None:
        h = parts.leave(layer, attend(h))
        if names["attention"].get("qkv") == "attn.c_attn":  # GPT-2's block has a name for it
            layer.frame.append(h)
        if sandwich:
            h = norm(h, "norm_1_after")
        h = ops.add(tape, residual, leave(h))
        del residual
        residual = h
        if kind.mlp is None and kind.moe is None:
            return h
        h = parts.enter(layer, norm(h, "norm_2"))
    h = parts.leave(layer, mlp(h))
    if sandwich:
        h = norm(h, "norm_2_after")
    return ops.add(tape, residual, leave(h))
