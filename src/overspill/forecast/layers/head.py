"""Final norm, head and loss on the tape: the highest instants of the forward's end and of the loss's backward.

Which copies of the logits are alive is a matter of the library's version (docs/theory/loss.md); `LossCode` names the
ways in which it has been written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from overspill.forecast.layers import parts
from overspill.forecast.layers.parts import FP32, Layer
from overspill.forecast.layers.run import Run
from overspill.forecast.tape import Category, Parameter, Tape, Tensor, ops
from overspill.model.facts import LinearShape, NormKind

__all__ = ["HeadFigures", "LossCode", "head_figures", "run_head"]

#: upcast_all: logits become fp32 in the model's forward, the bf16 ones are dropped, and are shifted by a copy
#: (transformers up to 4.45). upcast_in_loss: the caller keeps the bf16 logits, the loss makes fp32 ones and shifts
#: them by a copy (4.46 to 4.49). pad_labels: as that, but the labels are shifted and not the logits (from 4.50).
#: native: cross-entropy on logits of the compute dtype, upcast by itself where autocast is on (torch loops, litgpt).
#: upcast: ``cross_entropy(logits.float())`` in the loop, the model's logits still held (torchtitan, torchtune).
#: in_place: a kernel that writes the gradient over the logits it gets (Liger, Unsloth); prepared like ``shift``.
#: fused_linear: the head's product is made in chunks inside the loss (Liger), gradients at once in forward.
#: chunked: head, upcast and loss go by pieces of each sequence, all pieces' logits being kept (torchtune's
#: CEWithChunkedOutputLoss).
#: split: head and loss run on a few rows at a time in the compute dtype, all logits and log-probabilities are kept
#: (LitGPT's lm_head_chunk_size). vocab_parallel: Megatron's, in fp32 in place on a copy; te_fused: TransformerEngine's,
#: in place on the logits.
LossCode = Literal[
    "upcast_all", "upcast_in_loss", "pad_labels", "native", "upcast", "in_place", "fused_linear", "chunked",
    "split", "vocab_parallel", "te_fused",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadFigures:
    """Bytes above the stack: its output (the head's input) is included. kept: between forward and backward.

    logits: of the highest instant, logits and the loss's own. gradients: of the head, that stay. held: logits that the
    caller keeps while the layers go backward. answer: of the highest instant until the model returned.
    """

    forward_nbytes: int
    kept_nbytes: int
    backward_nbytes: int
    logits_nbytes: int
    gradients_nbytes: int
    held_nbytes: int = 0
    answer_nbytes: int = 0


def head_figures(
    run: Run,
    *,
    code: LossCode,
    shift: LossCode,
    hidden: int,
    vocab: int,
    final_norm: NormKind,
    softcap: bool,
    scaled: bool,
    caller_holds_logits: bool,
    converts_outputs: bool,
    chunks: int,
    vocab_split: int = 1,
    compiled: bool = False,
) -> HeadFigures:
    """Run the end of the model. vocab: rows of the head; vocab_split: ranks that share them. compiled: the loss is.

    converts_outputs: the model's outputs are copied to fp32 when it returns (Accelerate with autocast).
    """
    tape = Tape()
    memory = tape.memory
    rows = run.tokens // (run.tensor if run.sequence_parallel else 1)
    leaf = [tape.leaf(rows * hidden, run.style.residual, requires_grad=True)]
    loss, held = run_head(
        tape, run, leaf, code=code, shift=shift, hidden=hidden, vocab=vocab, final_norm=final_norm, softcap=softcap,
        scaled=scaled, converts_outputs=converts_outputs, chunks=chunks, vocab_split=vocab_split,
        holds=caller_holds_logits, compiled=compiled,
    )  # fmt: skip
    forward = memory.peak_nbytes
    forward_logits = memory.at_peak
    if not caller_holds_logits:
        held = None
    held_nbytes = 0 if held is None or held.storage is None else held.storage.nbytes
    kept = memory.total_nbytes
    memory.mark()
    grad = tape.new(1, FP32)
    tape.backward(loss, grad)
    del grad
    at_peak = forward_logits if forward >= memory.peak_nbytes else memory.at_peak
    del held
    return HeadFigures(
        forward_nbytes=forward,
        kept_nbytes=kept,
        backward_nbytes=memory.peak_nbytes,
        logits_nbytes=at_peak[Category.LOGITS],
        gradients_nbytes=memory.live[Category.GRADIENTS],
        held_nbytes=held_nbytes,
    )


def run_head(
    tape: Tape,
    run: Run,
    box_of_input: list[Tensor],
    *,
    code: LossCode,
    shift: LossCode,
    hidden: int,
    vocab: int,
    final_norm: NormKind,
    softcap: bool,
    scaled: bool,
    converts_outputs: bool,
    chunks: int,
    vocab_split: int = 1,
    holds: bool = False,
    compiled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(the loss, the logits that the model returns). The input is taken out of its box: nobody else keeps it.

    holds: the caller keeps the logits.
    """
    shape = LinearShape("head", hidden, vocab)
    layer = Layer(
        tape=tape, style=run.style, tokens=run.tokens, seq_len=run.seq_len, trained=run.trained, targeted=run.targeted,
        linears={"head": shape}, split=run.tensor, shard=run.tensor if run.sequence_parallel else 1,
        keeps_grads=run.keeps_grads,
    )  # fmt: skip
    h = parts.norm(layer, box_of_input.pop(), "final_norm", final_norm, hidden)
    h = parts.enter(layer, h)
    width = vocab // vocab_split
    if code == "fused_linear":
        return _fused_linear(layer, h, width), h
    if code == "chunked":
        box = [h]
        del h
        return _chunked(layer, box, width, chunks, recomputes=compiled), None
    plain = _plain_head(layer)
    logits = ops.linear(tape, ops.cast(tape, h, run.style.compute), plain, run.tokens * width)
    if scaled:
        logits = ops.scale(tape, logits)
    if softcap:
        logits = ops.scale(tape, ops.elementwise(tape, ops.scale(tape, logits), saves_output=True))
    _is_logits(logits)
    box = [logits]
    del logits
    loss, held = _loss(tape, box, code, shift, chunks, run, holds=holds, compiled=compiled, split=vocab_split)
    if converts_outputs and held is not None and held.itemsize != FP32:
        held = tape.new(held.numel, FP32, Category.LOGITS)
    return loss, held


def _plain_head(layer: Layer) -> Parameter:
    shape = layer.linears["head"]
    return layer.parameter("head.weight", shape.in_features * shape.out_features // layer.split)


def _loss(
    tape: Tape,
    box: list[Tensor],
    code: LossCode,
    shift: LossCode,
    chunks: int,
    run: Run,
    *,
    holds: bool,
    compiled: bool,
    split: int,
) -> tuple[Tensor, Tensor | None]:
    """The loss (a scalar), and the logits that the model returns. ``box`` holds the logits: they are taken out of it,
    so that nobody else keeps them."""
    if code == "in_place":
        prepared, _frame, held = _prepared(tape, box, shift, run.seq_len, holds=holds)
        return _over_itself(tape, prepared), held
    if code in ("vocab_parallel", "te_fused"):
        return _over_itself(tape, ops.cast(tape, box.pop(), FP32)), None
    if code == "split":
        logits = box.pop()
        return _split(tape, logits, chunks), logits
    if code == "upcast" and compiled:
        logits = box.pop()
        held_back = logits if holds else None
        return _compiled_cross_entropy(tape, logits, run.tokens), held_back
    prepared, _frame, held = _prepared(tape, box, code, run.seq_len, holds=holds)
    if code == "upcast" and split > 1:
        return _loss_parallel(tape, prepared), held
    if code == "native" and run.style.autocast:
        prepared = ops.cast(tape, prepared, FP32)
        _is_logits(prepared)
    return _cross_entropy(tape, prepared), held


def _prepared(
    tape: Tape, box: list[Tensor], code: LossCode, seq_len: int, *, holds: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(what the loss gets, what its caller's frame holds meanwhile, what the model returns)."""
    logits = box.pop()
    if code == "native":
        return logits, logits, logits
    wide = ops.cast(tape, logits, FP32)
    _is_logits(wide)
    if code == "upcast_all":
        del logits
        return _copy(tape, wide, seq_len), wide, wide
    if code == "upcast_in_loss":
        return _copy(tape, wide, seq_len), wide, logits
    if code == "upcast" and not holds:
        return wide, wide, None
    return wide, wide, logits


def _over_itself(tape: Tape, logits: Tensor) -> Tensor:
    """A kernel that writes the gradient over the logits: they are all that it keeps."""
    numel, size, storage = logits.numel, logits.itemsize, logits.storage

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (Tensor(storage, numel, size),)

    return tape.record((logits,), (logits,), backward, tape.new(1, FP32))


def _is_logits(tensor: Tensor) -> None:
    if tensor.storage is not None:
        tensor.storage.move_to(Category.LOGITS)


def _copy(tape: Tape, x: Tensor, seq_len: int) -> Tensor:
    """``x[..., :-1, :].contiguous()``: its gradient is written into a fresh tensor of zeros (slice_backward)."""
    numel, size = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.new(numel, size, Category.LOGITS),)

    return tape.record((x,), (), backward, tape.new(numel - numel // seq_len, size, Category.LOGITS))


def _cross_entropy(tape: Tape, logits: Tensor) -> Tensor:
    """log_softmax saves its result; nll_loss's and log_softmax's gradients are a tensor each."""
    numel, size = logits.numel, logits.itemsize
    log = tape.new(numel, size, Category.LOGITS)

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        of_log = tape.new(numel, size, Category.LOGITS)
        result = tape.new(numel, size, Category.LOGITS)
        del of_log
        return (result,)

    return tape.record((logits,), (log,), backward, tape.new(1, FP32))


def _chunked(layer: Layer, box: list[Tensor], vocab: int, chunks: int, *, recomputes: bool) -> Tensor:
    """The head on ``chunks`` pieces of every sequence, then cross-entropy piece by piece (torchtune's
    TransformerDecoder.chunked_output and CEWithChunkedOutputLoss, 0.3 to 0.6). Formula `chunked-loss`.

    Backward runs every piece's loss before the head's products, so that all pieces' gradients are there at once, each
    in the place of logits that are freed with it; then each product's gradient of the head is added to the ones before.
    recomputes: the upcast and the loss are one compiled kernel, which keeps the logits and two numbers a row.
    """
    tape, weight, h = layer.tape, _plain_head(layer), box.pop()
    weight.keeps_grad = weight.trained  # summed over the pieces before anybody takes it
    rows, sequences = layer.tokens // chunks, max(1, layer.tokens // layer.seq_len)
    logits, waiting = [], list[Tensor]()
    for index in range(chunks):
        piece = _piece(tape, h, chunks, waiting, first=index == 0, copied=sequences > 1)
        out = ops.linear(tape, ops.cast(tape, piece, layer.style.compute), weight, rows * vocab)
        _is_logits(out)
        logits.append(out)
        del piece, out
    del h
    losses = []
    for part in logits:
        losses.append(_compiled_cross_entropy(tape, part, rows) if recomputes else _cross_entropy_of_upcast(tape, part))
        del part
    numel = len(losses)
    return tape.record(losses, (), lambda tape, grad: [tape.new(1, FP32) for _ in range(numel)], tape.new(1, FP32))


def _loss_parallel(tape: Tape, logits: Tensor) -> Tensor:
    """Cross-entropy of logits split by columns (torch/distributed/tensor/parallel/loss.py): forward holds the shifted
    logits beside their exponentials; backward a tensor of zeros, the exponentials, their sum, and its product."""
    numel, size = logits.numel, logits.itemsize
    shifted = tape.new(numel, size, Category.LOGITS)
    exponentials = tape.new(numel, size, Category.LOGITS)
    del exponentials
    log = tape.new(numel, size, Category.LOGITS)
    del shifted

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        target = tape.new(numel, size, Category.LOGITS)
        exponentials = tape.new(numel, size, Category.LOGITS)
        total = tape.new(numel, size, Category.LOGITS)
        del exponentials
        result = tape.new(numel, size, Category.LOGITS)
        del target, total
        return (result,)

    return tape.record((logits,), (log,), backward, tape.new(1, FP32))


def _piece(tape: Tape, h: Tensor, chunks: int, waiting: list[Tensor], *, first: bool, copied: bool) -> Tensor:
    """One of ``h.chunk(chunks, dim=1)``. Of several sequences it is no contiguous piece, and linear copies it. The
    pieces' gradients wait for each other and are joined by a cat."""
    numel, whole, size = h.numel // chunks, h.numel, h.itemsize
    out = tape.new(numel, size) if copied else Tensor(h.storage, numel, size)

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor | None]:
        waiting.append(Tensor(grad.storage, grad.numel, grad.itemsize))
        if not first:
            return (None,)
        joined = tape.new(whole, size, Category.TEMPORARIES)
        waiting.clear()
        return (joined,)

    return tape.record((h,), (), backward, out)


def _cross_entropy_of_upcast(tape: Tape, logits: Tensor) -> Tensor:
    wide = ops.cast(tape, logits, FP32)
    _is_logits(wide)
    return _cross_entropy(tape, wide)


def _compiled_cross_entropy(tape: Tape, logits: Tensor, rows: int) -> Tensor:
    """``cross_entropy(logits.float(), …)`` through torch.compile: it keeps the logits as they came and a row's maximum
    and sum; backward writes the gradient in the logits' dtype in one kernel (inductor, torch 2.5 to 2.13)."""
    numel, size = logits.numel, logits.itemsize
    statistics = tape.new(2 * rows, FP32)

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.new(numel, size, Category.LOGITS),)

    return tape.record((logits,), (logits, statistics), backward, tape.new(1, FP32))


def _split(tape: Tape, logits: Tensor, chunks: int) -> Tensor:
    """Each piece's cross-entropy keeps its log-probabilities; going backward a piece at a time needs little."""
    numel, size = logits.numel, logits.itemsize
    kept = tape.new(numel, size, Category.LOGITS)

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        piece = tape.new(numel // chunks, size, Category.LOGITS)
        del piece
        return (Tensor(None, numel, size),)

    return tape.record((logits,), (kept,), backward, tape.new(1, FP32))


def _fused_linear(layer: Layer, h: Tensor, vocab: int) -> Tensor:
    """Liger's fused linear cross-entropy: chunks of 2^ceil(log2(tokens / ceil(vocab / hidden))) rows; the gradients of
    input and head are made in forward, the latter accumulated in the head's dtype."""
    tape, tokens = layer.tape, layer.tokens
    hidden = h.numel // tokens
    weight = layer.parameter("head.weight", vocab * hidden)
    ratio = -(-vocab // hidden)
    rows = min(tokens, 1 << max(0, (-(-tokens // ratio) - 1)).bit_length())
    size = h.itemsize
    grad_input = tape.new(h.numel, size)
    grad_weight = tape.new(weight.numel, weight.itemsize) if weight.trained else None
    logits = tape.new(rows * vocab, size, Category.LOGITS)
    wide = tape.new(rows * vocab, FP32, Category.LOGITS)
    part = tape.new(weight.numel, weight.itemsize) if weight.trained else None
    del logits, wide, part
    numel = h.numel
    saved = (grad_input,) if grad_weight is None else (grad_input, grad_weight)
    sources = (Tensor(grad_input.storage, numel, size), grad_weight)
    del grad_input, grad_weight

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        first, second = sources
        kept = None if second is None else Tensor(second.storage, second.numel, second.itemsize)
        return (Tensor(first.storage, numel, size), kept)

    return tape.record((h, weight), saved, backward, tape.new(1, FP32))
