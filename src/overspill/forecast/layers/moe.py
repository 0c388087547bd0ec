"""A mixture of experts: router, the routed experts' MLPs on the tokens sent there, the shared expert.

Tokens are taken as spread evenly over experts; forecast/interval.py widens for the skew that a router has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overspill.forecast.layers import parts
from overspill.forecast.layers.parts import FP32, INT64, Layer
from overspill.forecast.tape import Parameter, Tensor, ops
from overspill.model.facts import LinearShape, MoeFacts

if TYPE_CHECKING:
    from overspill.forecast.layers.run import Run

__all__ = ["mixture"]

#: The experts' loop is run in at most so many equal pieces: more make no difference to the peak beyond a per cent.
_PIECES = 8


def mixture(layer: Layer, x: Tensor, moe: MoeFacts, roles: dict[str, dict[str, LinearShape]], run: Run) -> Tensor:
    """sum over top-k of weight × expert(x), plus the shared expert."""
    tape, style, tokens = layer.tape, layer.style, layer.tokens
    hidden = x.numel // tokens
    router = layer.parameter("router", moe.experts * hidden)
    scores = ops.linear(tape, x, router, tokens * moe.experts)
    scores = ops.softmax(tape, ops.cast(tape, scores, FP32))
    chosen = ops.elementwise(tape, scores, itemsize=style.compute)  # top-k, normalised
    index = tape.new(tokens * moe.top_k, INT64)
    routed = tokens * moe.top_k
    local_experts = max(1, moe.experts // run.expert)
    pieces = 1 if style.grouped_experts else min(local_experts, _PIECES)
    width = moe.expert.intermediate // run.expert_tensor
    total = tape.new(tokens * hidden, x.itemsize)
    del scores
    up_name = roles["experts"].get("gate_up") or roles["experts"].get("up")
    for piece in range(pieces):
        rows = routed * (piece + 1) // pieces - routed * piece // pieces
        share = local_experts * (piece + 1) // pieces - local_experts * piece // pieces
        taken = _gather(layer, x, rows * hidden)
        part = _expert(layer, taken, rows, share, hidden, width, moe, gated=up_name is not None)
        del taken
        if style.grouped_experts:
            part = _unpermute(layer, part, chosen, tokens * hidden)
            total = part
        else:
            weighted = _weigh(layer, part, chosen)
            total = _index_add(layer, total, weighted)
            del weighted
        del part
    del index
    if moe.shared is not None:
        names = {role: linear.name for role, linear in roles["shared"].items()}
        if "gate" in names or "gate_up" in names:
            shared = parts.gated_mlp(layer, x, names, moe.shared.intermediate)
        else:
            shared = parts.plain_mlp(layer, x, names, moe.shared.intermediate, moe.shared.activation)
        total = ops.add(tape, total, shared)
    return total


def _gather(layer: Layer, x: Tensor, numel: int) -> Tensor:
    """Rows of x by index: a copy; nothing saved beside the index."""
    tape = layer.tape
    x_numel, size = x.numel, x.itemsize

    def backward(tape_, grad: Tensor):  # type: ignore[no-untyped-def]
        return (tape_.new(x_numel, size, 6),)

    return tape.record((x,), (), backward, tape.new(numel, x.itemsize))


def _expert(
    layer: Layer, x: Tensor, rows: int, experts: int, hidden: int, width: int, moe: MoeFacts, *, gated: bool
) -> Tensor:
    tape, style = layer.tape, layer.style
    trained = layer.trained("experts")

    def weight(numel: int) -> Parameter:
        return Parameter(numel, style.weight, trained=trained, keeps_grad=layer.keeps_grads)

    def project(h: Tensor, out_width: int, in_width: int) -> Tensor:
        if style.quantised and style.expert_linears:
            held = tape.scratch(in_width * out_width * style.compute)
            out = ops.linear(tape, h, Parameter(in_width * out_width, 2, trained=False), rows * out_width)
            del held
            return out
        return ops.linear(tape, h, weight(experts * in_width * out_width), rows * out_width)

    if moe.expert.kind == "plain":
        inner = ops.silu(tape, project(x, width, hidden))
        return project(inner, hidden, width)
    if style.mlp == "kernel":
        packed = project(x, 2 * width, hidden)
        del x
        inner = ops.fused(tape, (packed,), rows * width, packed.itemsize, saves=(packed,))
        del packed
        return project(inner, hidden, width)
    gate = project(x, width, hidden)
    if style.mlp == "recompute":
        up = project(x, width, hidden)
        del x
        inner = ops.fused(tape, (gate, up), rows * width, gate.itemsize, saves=(gate, up), in_place_grads=2)
        del gate, up
    else:
        active = ops.silu(tape, gate)
        del gate
        up = project(x, width, hidden)
        del x
        inner = ops.mul(tape, active, up)
        del active, up
    return project(inner, hidden, width)


def _weigh(layer: Layer, part: Tensor, chosen: Tensor) -> Tensor:
    """part × its routing weight: both saved, since both need a gradient."""
    tape = layer.tape
    numel, size, needs = part.numel, part.itemsize, part.requires_grad
    weight_grad = chosen.requires_grad

    def backward(tape_, grad: Tensor):  # type: ignore[no-untyped-def]
        first = tape_.new(numel, size, 6) if needs else None
        second = tape_.new(numel, size, 6) if weight_grad else None
        return (first, tape_.new(chosen_numel, size, 6) if second is not None else None)

    chosen_numel = chosen.numel
    return tape.record((part, chosen), (part,) if weight_grad else (), backward, tape.new(numel, size))


def _index_add(layer: Layer, total: Tensor, part: Tensor) -> Tensor:
    """In place on the sum; the part's gradient is a copy of its rows."""
    tape = layer.tape
    numel, size = part.numel, part.itemsize

    def backward(tape_, grad: Tensor):  # type: ignore[no-untyped-def]
        return (Tensor(grad.storage, grad.numel, grad.itemsize), tape_.new(numel, size, 6))

    return tape.record((total, part), (), backward, Tensor(total.storage, total.numel, total.itemsize))


def _unpermute(layer: Layer, part: Tensor, chosen: Tensor, numel: int) -> Tensor:
    """Grouped experts' rows back in token order, weighted and summed: saves the rows for the weights' gradient."""
    tape = layer.tape
    rows, size, needs, weight_grad = part.numel, part.itemsize, part.requires_grad, chosen.requires_grad
    chosen_numel = chosen.numel

    def backward(tape_, grad: Tensor):  # type: ignore[no-untyped-def]
        return (
            tape_.new(rows, size, 6) if needs else None,
            tape_.new(chosen_numel, size, 6) if weight_grad else None,
        )

    return tape.record((part, chosen), (part,) if weight_grad else (), backward, tape.new(numel, size))
