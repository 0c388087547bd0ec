"""The end of a LitGPT step: final norm, head and loss, in chunks where the fine-tuning scripts ask for them.

litgpt/lora.py and adapter.py: ``[lm_head(x_i) for x_i in x.split(128, dim=1)]``; litgpt/utils.py:
chunked_cross_entropy. In between stands Lightning Fabric, whose module casts outputs to the default dtype: logits are
fp32, whatever the precision (lightning/fabric/wrappers.py, plugins/precision/half.py: convert_output). The loop keeps
them until the model has answered again.
"""

from __future__ import annotations

from overspill.forecast.layers import litgpt
from overspill.forecast.layers.head import HeadFigures
from overspill.forecast.layers.parts import FP32, Layer
from overspill.forecast.layers.run import Run
from overspill.forecast.tape import Category, Tape, Tensor, ops
from overspill.model.facts import LinearShape, NormKind

__all__ = ["litgpt_head_figures", "run_litgpt_head"]


def litgpt_head_figures(run: Run, *, hidden: int, vocab: int, final_norm: NormKind, softcap: bool) -> HeadFigures:
    """Run the end of the model on ``run.tokens`` rows; vocab: rows of the head."""
    tape = Tape()
    memory = tape.memory
    box = [tape.leaf(run.tokens * hidden, run.style.residual, requires_grad=True)]
    loss, held, answer = run_litgpt_head(
        tape, run, box, hidden=hidden, vocab=vocab, final_norm=final_norm, softcap=softcap
    )
    forward, at_forward = memory.peak_nbytes, memory.at_peak
    kept = memory.total_nbytes
    memory.mark()
    tape.backward(loss, tape.new(1, FP32))
    at_peak = at_forward if forward >= memory.peak_nbytes else memory.at_peak
    return HeadFigures(
        forward_nbytes=forward,
        kept_nbytes=kept,
        backward_nbytes=memory.peak_nbytes,
        logits_nbytes=at_peak[Category.LOGITS],
        gradients_nbytes=memory.live[Category.GRADIENTS],
        answer_nbytes=answer,
        held_nbytes=sum(one.storage.nbytes for one in held if one.storage is not None),
    )


def run_litgpt_head(
    tape: Tape, run: Run, box: list[Tensor], *, hidden: int, vocab: int, final_norm: NormKind, softcap: bool
) -> tuple[Tensor, list[Tensor], int]:
    """(the loss, the logits that the loop keeps, the peak until the model returned). The input is taken out of its
    box."""
    shape = LinearShape("head", hidden, vocab)
    layer = Layer(
        tape=tape, style=run.style, tokens=run.tokens, seq_len=run.seq_len, trained=run.trained, targeted=run.targeted,
        linears={"head": shape}, keeps_grads=run.keeps_grads,
    )  # fmt: skip
    code = run.style.litgpt
    assert code is not None
    h = litgpt.norm(layer, box.pop(), "final_norm", final_norm, hidden)
    sequences = run.tokens // run.seq_len
    rows = _chunks(run.seq_len, code.head_chunk, sequences)
    outputs = []
    for piece in _split(tape, h, [count * hidden for count in rows]):
        logits = litgpt.linear(layer, piece, shape, vocab)
        if softcap and (code.chunk_softcap or not code.head_chunk):
            logits = ops.scale(tape, ops.elementwise(tape, ops.scale(tape, logits), saves_output=True))
        _is_logits(logits)
        outputs.append(logits)
        del logits
    del h, piece
    held = []
    for output in outputs:
        wide = ops.cast(tape, output, FP32)
        _is_logits(wide)
        held.append(wide)
        del wide, output
    del outputs
    answer = tape.memory.peak_nbytes
    return _loss(tape, held, sequences, vocab, code.loss_chunk, whole=not code.head_chunk), held, answer


def _chunks(length: int, chunk: int, rows_each: int) -> list[int]:
    """Rows of each piece of ``length`` positions cut by ``chunk``; 0: one piece."""
    if not chunk:
        return [length * rows_each]
    whole, rest = divmod(length, chunk)
    return [chunk * rows_each] * whole + ([rest * rows_each] if rest else [])


def _loss(tape: Tape, logits: list[Tensor], sequences: int, vocab: int, chunk: int, *, whole: bool) -> Tensor:
    """chunked_cross_entropy. The last position has no target: slicing it off makes reshape copy several sequences."""
    pieces = list(logits)
    if sequences > 1:
        pieces[-1] = ops.elementwise(tape, pieces[-1])
        _is_logits(pieces[-1])
    if whole:
        total = pieces[0].numel // vocab
        pieces = _split(tape, pieces[0], [count * vocab for count in _chunks(total, chunk, 1)])
    losses = [_cross_entropy(tape, piece) for piece in pieces]
    del pieces
    return _gathered(tape, losses)


def _cross_entropy(tape: Tape, logits: Tensor) -> Tensor:
    """log_softmax keeps its result; nll_loss's gradient and log_softmax's are a tensor each."""
    numel, size = logits.numel, logits.itemsize
    log = tape.new(numel, size, Category.LOGITS)

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        of_log = tape.new(numel, size, Category.LOGITS)
        result = tape.new(numel, size, Category.LOGITS)
        del of_log
        return (result,)

    return tape.record((logits,), (log,), backward, tape.new(1, FP32))


def _gathered(tape: Tape, losses: list[Tensor]) -> Tensor:
    def backward(tape: Tape, grad: Tensor) -> list[Tensor | None]:
        return [Tensor(grad.storage, 1, FP32) for _ in losses]

    return tape.record(losses, (), backward, tape.new(1, FP32))


def _is_logits(tensor: Tensor) -> None:
    if tensor.storage is not None:
        tensor.storage.move_to(Category.LOGITS)


def _split(tape: Tape, x: Tensor, numels: list[int]) -> list[Tensor]:
    """``split``: views; the gradients of all wait for each other and are joined by a cat."""
    if len(numels) == 1:
        return [tape.view(x)]
    whole, size = x.numel, x.itemsize
    waiting: list[Tensor] = []

    def join(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        result = tape.new(whole, size, Category.TEMPORARIES)
        waiting.clear()
        return (result,)

    def wait(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        waiting.append(Tensor(grad.storage, grad.numel, grad.itemsize))
        return (Tensor(None, 0, size),)

    joined = tape.record((x,), (), join, Tensor(x.storage, whole, size))
    return [tape.record((joined,), (), wait, Tensor(x.storage, numel, size)) for numel in numels]
