"""What one layer of a kind keeps, and its highest instants, from running it on the tape.

`LayerFigures` is what device/phases.py puts together: a forward with and without recording, and a backward. A layer
is run alone with an input that needs a gradient; what is alive before it is somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from overspill.forecast.layers import litgpt, megatron, torch_native, transformers
from overspill.forecast.layers.parts import Layer
from overspill.forecast.layers.roles import roles_of
from overspill.forecast.layers.run import Run
from overspill.forecast.tape import Category, Tape, Tensor
from overspill.model.facts import LayerKind

__all__ = ["LayerFigures", "layer_figures", "run_layer"]


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """Bytes of one layer, its input counted where it is alive.

    boundary: the input alone, which is what a checkpointed layer keeps. kept: what a recorded forward leaves behind for
    backward, its output left out (that is the next layer's input). forward, recorded: the highest instants of a forward
    without and with recording. backward: of a backward that starts from what was kept; recomputed: of one in which the
    input and the recomputed output are held besides, as reentrant checkpointing does. gradients: parameters' gradients
    that stay afterwards; at_peak: those of them that are there at the highest instant. selected: what selective
    checkpointing keeps: the input, attention's result, and every second matmul's (torchtitan's policy). outliving: of
    what was kept, what backward does not free, as autograd functions that hang tensors on their context.
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
    selected_nbytes: int
    outliving_nbytes: int = 0


_CODES: dict[str, Callable[[Layer, LayerKind, Tensor, Run], Tensor]] = {
    "transformers": transformers.forward,
    "litgpt": litgpt.forward,
    "torchtune": torch_native.forward,
    "torchtitan": torch_native.forward,
    "megatron": megatron.forward,
}


def layer_of(tape: Tape, kind: LayerKind, run: Run) -> Layer:
    """What the parts of a layer need, on this tape."""
    return Layer(
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


def run_layer(tape: Tape, kind: LayerKind, x: Tensor, run: Run) -> Tensor:
    """One layer's forward on ``tape``."""
    return _CODES[run.style.code](layer_of(tape, kind, run), kind, x, run)


def layer_figures(kind: LayerKind, run: Run) -> LayerFigures:
    """Run one layer of ``kind`` alone."""
    tape = Tape()
    layer = layer_of(tape, kind, run)
    forward_of = _CODES[run.style.code]
    memory = tape.memory
    rows = run.tokens // layer.shard

    def new_input() -> Tensor:
        return tape.leaf(rows * kind.hidden, run.style.residual, requires_grad=run.input_needs_grad)

    tape.grad_enabled = False
    x = new_input()
    boundary = memory.total_nbytes
    memory.mark()
    out = forward_of(layer, kind, x, run)
    output = memory.total_nbytes - boundary
    forward = memory.peak_nbytes
    tape.grad_enabled = True
    del out
    memory.mark()
    out = forward_of(layer, kind, x, run)
    recorded = memory.peak_nbytes
    held, node, numel = out, out.node, out.numel
    recomputed, _, _ = _backward(tape, held, run)
    del held, out, x
    tape.leaf_grads.clear()
    tape.outliving.clear()
    tape.gradients.clear()
    assert memory.total_nbytes == 0 or node is not None

    out = forward_of(layer, kind, new_input(), run)
    node = out.node
    stub = Tensor(None, numel, run.style.residual, node=node)
    del out
    extra = tape.scratch(run.extra_saved_nbytes) if run.extra_saved_nbytes else None
    kept = memory.total_nbytes
    backward, gradients, at_peak = _backward(tape, stub, run)
    del extra
    tape.leaf_grads.clear()
    outliving = memory.total_nbytes
    tape.outliving.clear()
    outliving -= memory.total_nbytes
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
        selected_nbytes=boundary + _selected(kind, run),
        outliving_nbytes=outliving,
    )


_MATMULS = ("q", "k", "v", "o", "gate", "up", "down")


def _selected(kind: LayerKind, run: Run) -> int:
    """torchtitan's selective_ac_option "op" counts matmuls from one and keeps the odd ones' results. A compiled layer
    keeps what its backward reads (torch/_functorch/partitioners.py): not the last product, which is only added to the
    residual stream."""
    roles = roles_of(kind)
    found = {**roles["attention"], **roles["mlp"]}
    order = [found[role] for role in _MATMULS if role in found]
    if run.style.compiled and order:
        del order[-1]
    kept = sum(linear.out_features for number, linear in enumerate(order, start=1) if number % 2)
    nbytes = run.tokens * kept * run.style.compute
    if kind.attention is not None:
        nbytes += run.tokens * (kind.attention.output_width * run.style.compute + 4 * kind.attention.heads)
    return nbytes // run.tensor


def _backward(tape: Tape, out: Tensor, run: Run) -> tuple[int, int, int]:
    """(highest instant, gradients left, gradients at the highest instant), from a gradient of ``out``."""
    memory = tape.memory
    memory.mark()
    if out.node is not None:
        grad = tape.new(out.numel, run.style.residual, Category.TEMPORARIES)
        tape.backward(out, grad)
        del grad
    return memory.peak_nbytes, memory.live[Category.GRADIENTS], memory.at_peak[Category.GRADIENTS]
