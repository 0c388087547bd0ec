"""Operations on the tape: what each allocates, saves and needs on its way back.

Each mirrors one ATen operation or one published kernel; what it saves is derivatives.yaml of torch (tools/autograd,
torch 2.0 to 2.13) or the kernel's own autograd function, named in the docstring. Numbers of elements are those of the
tensors; an itemsize of 2 is bf16 or fp16, of 4 fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

from overspill.forecast.tape.core import Category, Parameter, Tape, Tensor

__all__ = [
    "add", "cast", "dropout", "elementwise", "embedding", "fused", "linear", "matmul", "mean_of_square", "mul",
    "mul_weight", "scale", "silu", "softmax", "split",
]  # fmt: skip

FP32 = 4


def cast(tape: Tape, x: Tensor, itemsize: int) -> Tensor:
    """``x.to(dtype)``: nothing saved; the same tensor when the dtype is the same."""
    if x.itemsize == itemsize:
        return x
    back = x.itemsize

    def backward(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        return (tape.new(grad.numel, back, Category.TEMPORARIES),)

    return tape.record((x,), (), backward, tape.new(x.numel, itemsize))


def linear(tape: Tape, x: Tensor, weight: Parameter, out_numel: int, *, bias: Parameter | None = None) -> Tensor:
    """``F.linear``: saves its input when the weight is trained. Result in the input's dtype."""
    out = tape.result(out_numel, x.itemsize, "matmul")
    x_numel, itemsize, x_grad = x.numel, x.itemsize, x.requires_grad

    def backward(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        grads: list[Tensor | None] = [
            tape.new(x_numel, itemsize, Category.TEMPORARIES) if x_grad else None,
            tape.new(weight.numel, itemsize, Category.TEMPORARIES) if weight.trained else None,
        ]
        if bias is not None:
            grads.append(tape.new(bias.numel, itemsize, Category.TEMPORARIES) if bias.trained else None)
        return grads

    inputs = (x, weight) if bias is None else (x, weight, bias)
    return tape.record(inputs, (x,) if weight.trained else (), backward, out)


def elementwise(
    tape: Tape,
    x: Tensor,
    *,
    saves_input: bool = False,
    saves_output: bool = False,
    itemsize: int | None = None,
    scratch: int = 0,
) -> Tensor:
    """One input, one result of its size. ``scratch``: tensors of that size alive in backward beside the gradient."""
    out = tape.new(x.numel, itemsize or x.itemsize)
    numel, back = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        held = [tape.new(numel, back, Category.TEMPORARIES) for _ in range(scratch)]
        result = tape.new(numel, back, Category.TEMPORARIES)
        del held
        return (result,)

    saved = ((x,) if saves_input else ()) + ((out,) if saves_output else ())
    return tape.record((x,), saved, backward, out)


def silu(tape: Tape, x: Tensor) -> Tensor:
    """silu, gelu: save their input."""
    return elementwise(tape, x, saves_input=True)


def scale(tape: Tape, x: Tensor) -> Tensor:
    """Multiplication by a Python number, negation, addition of one: nothing saved."""
    return elementwise(tape, x)


def add(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """Nothing saved; the gradient passes to both as it is, or cast down to the narrower one."""
    wide = max(x.itemsize, y.itemsize)
    sizes = (x.itemsize, y.itemsize)

    def backward(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        return tuple(
            Tensor(grad.storage, grad.numel, grad.itemsize)
            if size == wide
            else tape.new(grad.numel, size, Category.TEMPORARIES)
            for size in sizes
        )

    return tape.record((x, y), (), backward, tape.new(x.numel, wide))


def mul(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """Saves each factor whose partner needs a gradient. ``y`` may be smaller (broadcast): its gradient is summed."""
    wide = max(x.itemsize, y.itemsize)
    numel, small = x.numel, y.numel
    x_grad, y_grad, x_size, y_size = x.requires_grad, y.requires_grad, x.itemsize, y.itemsize

    def backward(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        for_x = tape.new(numel, x_size, Category.TEMPORARIES) if x_grad else None
        for_y = None
        if y_grad:
            for_y = tape.new(numel, y_size, Category.TEMPORARIES)
            if small != numel:
                for_y = tape.new(small, y_size, Category.TEMPORARIES)
        return (for_x, for_y)

    saved = ((y,) if x_grad else ()) + ((x,) if y_grad else ())
    return tape.record((x, y), saved, backward, tape.new(numel, wide))


def mul_weight(tape: Tape, x: Tensor, weight: Parameter) -> Tensor:
    """``weight * x`` with a vector: saves x when the weight is trained; its gradient is a full product, then summed."""
    wide = max(x.itemsize, weight.itemsize)
    numel, size, x_grad = x.numel, x.itemsize, x.requires_grad

    def backward(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        for_weight = None
        if weight.trained:
            for_weight = tape.new(numel, wide, Category.TEMPORARIES)
            for_weight = tape.new(weight.numel, weight.itemsize, Category.TEMPORARIES)
        return (tape.new(numel, size, Category.TEMPORARIES) if x_grad else None, for_weight)

    return tape.record((x, weight), (x,) if weight.trained else (), backward, tape.new(numel, wide))


def mean_of_square(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """``x.pow(2).mean(-1)``: pow saves x. Its backward holds x ** 1, 2 × that, and the gradient (pow_backward)."""
    square = tape.new(x.numel, x.itemsize)
    numel, size = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        spread = tape.new(numel, size, Category.TEMPORARIES)  # of the mean
        power = tape.new(numel, size, Category.TEMPORARIES)
        twice = tape.new(numel, size, Category.TEMPORARIES)
        result = tape.new(numel, size, Category.TEMPORARIES)
        del power, twice, spread
        return (result,)

    out = tape.new(rows, size)
    del square
    return tape.record((x,), (x,), backward, out)


def dropout(tape: Tape, x: Tensor, rate: float) -> Tensor:
    """native_dropout: saves a mask of one byte an element."""
    if rate <= 0:
        return x
    out = tape.new(x.numel, x.itemsize)
    mask = tape.new(x.numel, 1)
    numel, size = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        return (tape.new(numel, size, Category.TEMPORARIES),)

    return tape.record((x,), (mask,), backward, out)


def softmax(tape: Tape, x: Tensor, *, itemsize: int | None = None) -> Tensor:
    """Saves its result. With an itemsize: its input is converted first, a tensor that lives while the kernel runs
    (aten/src/ATen/native/SoftMax.cpp; only fp16 is widened inside the kernel)."""
    return elementwise(tape, x if itemsize is None else cast(tape, x, itemsize), saves_output=True)


def split(tape: Tape, x: Tensor, numels: Sequence[int], *, slices: bool = False) -> tuple[Tensor, ...]:
    """``x.split(...)`` or ``chunk``: views, whose gradients are joined by one cat when all are there.

    slices: ``x[..., a:b]`` instead, whose gradients are each written into zeros of x's size (slice_backward).
    """
    numel, size = x.numel, x.itemsize

    def whole(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        joined = tape.new(numel, size, Category.TEMPORARIES)
        waiting.clear()
        return (joined,)

    def passes(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        waiting.append(Tensor(grad.storage, grad.numel, grad.itemsize))
        return (Tensor(None, 0, grad.itemsize),)

    if slices:
        return tuple(
            tape.record((x,), (), lambda tape, grad: (tape.new(numel, size, Category.TEMPORARIES),), part)
            for part in (Tensor(x.storage, count, size) for count in numels)
        )
    waiting: list[Tensor] = []
    source = tape.record((x,), (), whole, Tensor(x.storage, numel, size))
    return tuple(tape.record((source,), (), passes, Tensor(x.storage, count, size)) for count in numels)


def matmul(tape: Tape, x: Tensor, y: Tensor, out_numel: int) -> Tensor:
    """Saves each factor whose partner needs a gradient."""
    x_grad, y_grad = x.requires_grad, y.requires_grad
    x_numel, y_numel, size = x.numel, y.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        return (
            tape.new(x_numel, size, Category.TEMPORARIES) if x_grad else None,
            tape.new(y_numel, size, Category.TEMPORARIES) if y_grad else None,
        )

    saved = ((y,) if x_grad else ()) + ((x,) if y_grad else ())
    return tape.record((x, y), saved, backward, tape.new(out_numel, size))


def embedding(tape: Tape, ids: Tensor, weight: Parameter, numel: int) -> Tensor:
    """Saves the ids. The gradient is dense: as large as the whole table."""

    def backward(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        return (tape.new(weight.numel, weight.itemsize, Category.TEMPORARIES) if weight.trained else None,)

    return tape.record((weight,), (ids,), backward, tape.new(numel, weight.itemsize))


def fused(
    tape: Tape,
    inputs: Sequence[Tensor | Parameter],
    out_numel: int,
    out_itemsize: int,
    *,
    saves: Sequence[Tensor] = (),
    extra_saved_nbytes: int = 0,
    forward_scratch_nbytes: int = 0,
    backward_scratch_nbytes: int = 0,
    in_place_grads: int = 0,
    saves_output: bool = False,
    attends: bool = False,
) -> Tensor:
    """One kernel with its own backward: saves what is named, and allocates a gradient for each input that needs one.

    attends: it is attention's, whose results selective checkpointing keeps.

    in_place_grads: of the first so many inputs the gradient is written over what was saved for it (Triton kernels of
    Liger and Unsloth do so): no allocation.
    """
    held = tape.scratch(forward_scratch_nbytes) if forward_scratch_nbytes else None
    if attends:
        out = tape.result(out_numel, out_itemsize, "attention")
        extra = (tape.result(extra_saved_nbytes, 1, "attention"),) if extra_saved_nbytes else ()
    else:
        out = tape.new(out_numel, out_itemsize)
        extra = (tape.new(extra_saved_nbytes, 1),) if extra_saved_nbytes else ()
    del held
    sizes = tuple(
        (one.numel, one.itemsize, one.trained if isinstance(one, Parameter) else one.requires_grad) for one in inputs
    )
    kept = tuple(
        Tensor(one.storage, one.numel, one.itemsize) for one in inputs[:in_place_grads] if isinstance(one, Tensor)
    )

    def backward(tape: Tape, grad: Tensor) -> Sequence[Tensor | None]:
        scratch = tape.scratch(backward_scratch_nbytes) if backward_scratch_nbytes else None
        grads = [
            (
                Tensor(kept[index].storage, numel, itemsize)
                if index < len(kept)
                else tape.new(numel, itemsize, Category.TEMPORARIES)
            )
            if needs
            else None
            for index, (numel, itemsize, needs) in enumerate(sizes)
        ]
        del scratch
        return grads

    saved = (*saves, *extra, *((out,) if saves_output else ()))
    return tape.record(inputs, saved, backward, out)
