"""A mixture of experts: router, the routed experts' MLPs on the tokens sent there, the shared expert.

Tokens are taken as spread evenly over experts; forecast/interval.py widens for the skew that a router has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overspill.forecast.layers import parts
from overspill.forecast.layers.parts import FP32, INT64, Layer
from overspill.forecast.tape import Category, Parameter, Tape, Tensor, ops
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
    scores = ops.linear(tape, ops.cast(tape, x, FP32) if moe.router_fp32 else x, router, tokens * moe.experts)
    scores = ops.softmax(tape, ops.cast(tape, scores, FP32))
    chosen = _chosen(layer, scores, tokens * moe.top_k, FP32 if moe.weights_fp32 else style.compute)
    index = tape.new(tokens * moe.top_k, INT64)
    routed = tokens * moe.top_k
    local_experts = max(1, moe.experts // run.expert)
    pieces = 1 if style.grouped_experts else min(local_experts, _PIECES)
    width = moe.expert.intermediate // run.expert_tensor
    del scores
    if style.grouped_experts and style.code == "transformers":
        total = _grouped(layer, x, chosen, moe, routed, local_experts, width)
        del index
        return _with_shared(layer, x, total, moe, roles)
    total = tape.new(tokens * hidden, x.itemsize)
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
            weighted = _weigh(layer, part, chosen, rows)
            total = _index_add(layer, total, weighted)
            del weighted
        del part
    del index
    return _with_shared(layer, x, total, moe, roles)


def _with_shared(
    layer: Layer, x: Tensor, total: Tensor, moe: MoeFacts, roles: dict[str, dict[str, LinearShape]]
) -> Tensor:
    if moe.shared is not None:
        names = {role: linear.name for role, linear in roles["shared"].items()}
        if "gate" in names or "gate_up" in names:
            shared = parts.gated_mlp(layer, x, names, moe.shared.intermediate)
        else:
            shared = parts.plain_mlp(layer, x, names, moe.shared.intermediate, moe.shared.activation)
        if "share" in names:  # sigmoid(gate(x)) × shared
            gate = ops.elementwise(layer.tape, parts.linear(layer, x, names["share"], 1), saves_output=True)
            shared = ops.mul(layer.tape, shared, gate)
            del gate
        total = ops.add(layer.tape, total, shared)
    return total


def _chosen(layer: Layer, scores: Tensor, numel: int, itemsize: int) -> Tensor:
    """topk and a division by the sum: the values, kept for both; backward scatters into zeros of the scores' size."""
    tape, spread = layer.tape, scores.numel
    values = tape.new(numel, FP32)

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.new(spread, FP32, Category.TEMPORARIES),)

    index = tape.new(numel, INT64)
    values = tape.record((scores,), (index, values), backward, values)
    return ops.cast(tape, values, itemsize)


def _grouped(layer: Layer, x: Tensor, chosen: Tensor, moe: MoeFacts, routed: int, experts: int, width: int) -> Tensor:
    """grouped_mm_experts_forward of transformers 5: the rows of all experts sorted, two grouped products, rows times
    their weights (in the weights' dtype when that is wider), back in order, and the top-k summed."""
    tape, style, tokens = layer.tape, layer.style, layer.tokens
    hidden, size = x.numel // tokens, x.itemsize
    trained = layer.trained("experts")

    def project(h: Tensor, in_width: int, out_width: int) -> Tensor:
        weight = Parameter(experts * in_width * out_width, style.weight, trained=trained, keeps_grad=layer.keeps_grads)
        return ops.linear(tape, h, weight, routed * out_width)

    order = tape.new(3 * routed, INT64)  # the permutation, its inverse, the sorted experts
    selected = _gather(layer, x, routed * hidden)
    if moe.expert.kind == "plain":
        inner = ops.silu(tape, project(selected, hidden, width))
    else:
        packed = project(selected, hidden, 2 * width)
        gate, up = ops.split(tape, packed, (routed * width, routed * width))
        inner = ops.mul(tape, ops.silu(tape, gate), up)
        del packed, gate, up
    out = project(inner, width, hidden)
    del inner
    weighted = _weigh(layer, out, chosen, routed)
    del out
    box = [_gather(layer, weighted, weighted.numel)]
    del weighted
    numel = box[0].numel

    def spread(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (Tensor(grad.storage, numel, grad.itemsize),)  # expand: a view

    total = tape.record((box[0],), (), spread, tape.new(tokens * hidden, box[0].itemsize))
    total = ops.cast(tape, total, size)
    del order, selected
    return total


def _gather(layer: Layer, x: Tensor, numel: int) -> Tensor:
    """Rows of x by index: a copy; nothing saved beside the index."""
    tape = layer.tape
    x_numel, size = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.new(x_numel, size, Category.TEMPORARIES),)

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


def _weigh(layer: Layer, part: Tensor, chosen: Tensor, rows: int) -> Tensor:
    """part × its routing weights, in the wider dtype: both saved, since both need a gradient."""
    tape, wide = layer.tape, max(part.itemsize, chosen.itemsize)
    numel, size, needs = part.numel, part.itemsize, part.requires_grad
    weight_grad, weight_size = chosen.requires_grad, chosen.itemsize
    weights = tape.new(rows, weight_size)

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        first = tape.new(numel, wide, Category.TEMPORARIES) if needs else None
        second = tape.new(numel, wide, Category.TEMPORARIES) if weight_grad else None
        if first is not None and wide != size:
            first = tape.new(numel, size, Category.TEMPORARIES)
        if second is not None:
            second = tape.new(rows, weight_size, Category.TEMPORARIES)
        return (first, second)

    saved = ((weights,) if needs else ()) + ((part,) if weight_grad else ())
    return tape.record((part, chosen), saved, backward, tape.new(numel, wide))


def _index_add(layer: Layer, total: Tensor, part: Tensor) -> Tensor:
    """In place on the sum; the part's gradient is a copy of its rows."""
    tape = layer.tape
    numel, size = part.numel, part.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor, Tensor]:
        return (
            Tensor(grad.storage, grad.numel, grad.itemsize),
            tape.new(numel, size, Category.TEMPORARIES),
        )

    return tape.record((total, part), (), backward, Tensor(total.storage, total.numel, total.itemsize))


def _unpermute(layer: Layer, part: Tensor, chosen: Tensor, numel: int) -> Tensor:
    """Grouped experts' rows back in token order, weighted and summed: saves the rows for the weights' gradient."""
    tape = layer.tape
    rows, size, needs, weight_grad = part.numel, part.itemsize, part.requires_grad, chosen.requires_grad
    chosen_numel = chosen.numel

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return (
            tape.new(rows, size, Category.TEMPORARIES) if needs else None,
            tape.new(chosen_numel, size, Category.TEMPORARIES) if weight_grad else None,
        )

    return tape.record((part, chosen), (part,) if weight_grad else (), backward, tape.new(numel, size))
