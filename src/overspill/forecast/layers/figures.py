"""What one layer of a kind keeps, and its highest instants, from running it on the tape.

`LayerFigures` is what forecast/phases.py puts together: a forward with and without recording, and a backward. A layer is
run alone with an input that needs a gradient; what is alive before it is somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from overspill.forecast.layers import parts
from overspill.forecast.layers.moe import mixture
from overspill.forecast.layers.parts import Layer
from overspill.forecast.layers.roles import roles_of
from overspill.forecast.layers.style import Style
from overspill.forecast.tape import Category, Tape, Tensor, ops
from overspill.model.facts import LayerKind

__all__ = ["LayerFigures", "Run", "layer_figures"]


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """Bytes of one layer, its input counted where it is alive.

    boundary: the input alone, which is what a checkpointed layer keeps. kept: what a recorded forward leaves behind for
    backward, its output left out (that is the next layer's input). forward, recorded: the highest instants of a forward
    without and with recording. backward: of a backward that starts from what was kept; recomputed: of one in which the
    input and the recomputed output are held besides, as reentrant checkpointing does. gradients: parameters' gradients
    that stay afterwards; at_peak: those of them that are there at the highest instant.
    """

    boundary_nbytes: int
    output_nbytes: int
    kept_nbytes: int
    forward_nbytes: int
    recorded_nbytes: int
    backward_nbytes: int
    recomputed_nbytes: int
    gradients_nbytes: int
    gradients_at_peak_nbytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """One rank's share of a micro-batch. trained, targeted: by a linear's or parameter's name inside the layer.

    tensor: tensor-parallel ranks; sequence_parallel: the residual stream is split over them too.
    """

    style: Style
    tokens: int
    seq_len: int
    trained: Callable[[str], bool]
    targeted: Callable[[str], bool]
    tensor: int = 1
    sequence_parallel: bool = False
    expert: int = 1
    expert_tensor: int = 1
    keeps_grads: bool = True
    extra_saved_nbytes: int = 0
    input_needs_grad: bool = True


def layer_figures(kind: LayerKind, run: Run) -> LayerFigures:
    """Run one layer of ``kind``."""
    tape = Tape()
    layer = Layer(
        tape=tape,
        style=run.style,
        tokens=run.tokens,
        seq_len=run.seq_len,
        trained=run.trained,
        targeted=run.targeted,
        linears={linear.name: linear for linear in kind.linears},
        split=run.tensor,
        shard=run.tensor if run.sequence_parallel else 1,
        keeps_grads=run.keeps_grads,
    )
    memory = tape.memory
    rows = run.tokens // layer.shard

    def new_input() -> Tensor:
        return tape.leaf(rows * kind.hidden, run.style.residual, requires_grad=run.input_needs_grad)

    tape.grad_enabled = False
    x = new_input()
    boundary = memory.total_nbytes
    memory.mark()
    out = _forward(layer, kind, x, run)
    output = memory.total_nbytes - boundary
    forward = memory.peak_nbytes
    tape.grad_enabled = True
    del out
    memory.mark()
    out = _forward(layer, kind, x, run)
    recorded = memory.peak_nbytes
    held, node, numel = out, out.node, out.numel
    recomputed, _, _ = _backward(tape, held, run)
    del held, out, x
    tape.leaf_grads.clear()
    assert memory.total_nbytes == 0 or node is not None

    tape = layer.tape
    out = _forward(layer, kind, new_input(), run)
    node = out.node
    stub = Tensor(None, numel, run.style.residual, node=node)
    del out
    extra = tape.scratch(run.extra_saved_nbytes) if run.extra_saved_nbytes else None
    kept = memory.total_nbytes
    backward, gradients, at_peak = _backward(tape, stub, run)
    del extra
    return LayerFigures(
        boundary_nbytes=boundary,
        output_nbytes=output,
        kept_nbytes=kept,
        forward_nbytes=forward,
        recorded_nbytes=recorded,
        backward_nbytes=backward,
        recomputed_nbytes=recomputed,
        gradients_nbytes=gradients,
        gradients_at_peak_nbytes=at_peak,
    )


def _backward(tape: Tape, out: Tensor, run: Run) -> tuple[int, int, int]:
    """(highest instant, gradients left, gradients at the highest instant), from a gradient of ``out``."""
    memory = tape.memory
    memory.mark()
    if out.node is not None:
        grad = tape.new(out.numel, run.style.residual, Category.TEMPORARIES)
        tape.backward(out, grad)
        del grad
    return memory.peak_nbytes, memory.live[Category.GRADIENTS], memory.at_peak[Category.GRADIENTS]


def _forward(layer: Layer, kind: LayerKind, x: Tensor, run: Run) -> Tensor:
    tape = layer.tape
    roles = roles_of(kind)
    names = {part: {role: linear.name for role, linear in found.items()} for part, found in roles.items()}
    sandwich = kind.norms > 2  # Gemma 2, 3: a norm before and after each part

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
