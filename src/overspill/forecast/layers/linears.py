"""A layer's linears on the tape: plain, under autocast, quantised, with an adapter; and what a part knows of its layer.

Sources: torch.nn.functional.linear; bitsandbytes' MatMul4Bit and auto-gptq's QuantLinear; peft's lora.Linear; Unsloth's
fast_lora.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from overspill.forecast.layers.style import Style
from overspill.forecast.tape import Category, Parameter, Tape, Tensor, ops
from overspill.model.facts import LinearShape

__all__ = ["Layer", "base_linear", "linear"]


@dataclass(frozen=True)
class Layer:
    """What the parts need to know of the layer that they stand in. trained, targeted: by a linear's name.

    split: tensor-parallel ranks; widths are divided by it. shard: ranks that the residual stream is split over.
    """

    tape: Tape
    style: Style
    tokens: int
    seq_len: int
    trained: Callable[[str], bool]
    targeted: Callable[[str], bool]
    linears: dict[str, LinearShape]
    split: int = 1
    shard: int = 1
    keeps_grads: bool = True
    #: What the layer's own frame holds until it returns: attention weights, in written-out attention.
    frame: list[Tensor] = field(default_factory=list)

    def parameter(self, name: str, numel: int, itemsize: int | None = None) -> Parameter:
        size = self.style.weight if itemsize is None else itemsize
        return Parameter(numel, size, trained=self.trained(name), keeps_grad=self.keeps_grads)


def linear(layer: Layer, x: Tensor, name: str, out_width: int) -> Tensor:
    """A linear module, quantised or not, with its adapter if it is targeted."""
    style = layer.style
    out = base_linear(layer, x, name, out_width)
    if style.adapter is None or not layer.targeted(name):
        return out
    return _with_adapter(layer, x, out, name, out_width)


def base_linear(layer: Layer, x: Tensor, name: str, out_width: int) -> Tensor:
    tape, style = layer.tape, layer.style
    shape = layer.linears[name]
    weight = layer.parameter(name + ".weight", shape.in_features * shape.out_features // layer.split)
    out_numel = layer.tokens * out_width
    if style.quantised:
        return _quantised_linear(tape, style, x, weight, out_numel)
    narrow = ops.cast(tape, x, style.compute)
    if style.autocast and style.weight != style.compute:
        weight = _cast_weight(tape, weight, style.compute)
    bias = layer.parameter(name + ".bias", out_width) if shape.bias else None
    return ops.linear(tape, narrow, weight, out_numel, bias=bias)


def _cast_weight(tape: Tape, weight: Parameter, itemsize: int) -> Parameter:
    """Under autocast: the matmul's gradient is in the compute dtype and is cast to the weight's (forecast/phases.py
    counts the cached copy)."""
    return Parameter(weight.numel, weight.itemsize, trained=weight.trained, keeps_grad=weight.keeps_grad)


def _quantised_linear(tape: Tape, style: Style, x: Tensor, weight: Parameter, out_numel: int) -> Tensor:
    """bitsandbytes MatMul4Bit, auto-gptq's QuantLinear: the weight is dequantised for each use, nothing is saved."""
    back = x.itemsize
    narrow = ops.cast(tape, x, style.compute)
    dequantised = _dequantised(tape, style, weight)
    out = tape.new(out_numel, narrow.itemsize)
    saved = (dequantised,) if style.saves_dequantised else ()
    del dequantised
    x_numel, x_size, needs = narrow.numel, narrow.itemsize, narrow.requires_grad

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor | None]:
        held = None if style.saves_dequantised else _dequantised(tape, style, weight)
        result = tape.new(x_numel, x_size, Category.TEMPORARIES) if needs else None
        del held
        return (result,)

    out = tape.record((narrow,), saved, backward, out)
    del narrow
    return ops.cast(tape, out, back)  # bitsandbytes answers in the dtype of what it got


def _dequantised(tape: Tape, style: Style, weight: Parameter) -> Tensor:
    """One kernel writes it (bitsandbytes, a compiled torchao), or a chain of operations with int64 indices does."""
    if style.dequantise_itemsize > style.compute:
        burst = tape.scratch(weight.numel * style.dequantise_itemsize)
        del burst
    return tape.scratch(weight.numel * style.compute)


def _with_adapter(layer: Layer, x: Tensor, out: Tensor, name: str, out_width: int) -> Tensor:
    tape, style, adapter = layer.tape, layer.style, layer.style.adapter
    assert adapter is not None
    shape = layer.linears[name]
    down = Parameter(shape.in_features * adapter.rank, adapter.itemsize, trained=True, keeps_grad=layer.keeps_grads)
    up = Parameter(shape.out_features * adapter.rank, adapter.itemsize, trained=True, keeps_grad=layer.keeps_grads)
    inner, outer = layer.tokens * adapter.rank, layer.tokens * out_width
    if adapter.code == "fused":
        # LoRA_W and LoRA_QKV as in Unsloth's fast_lora: the input is saved, with dropout its dropped copy besides; the
        # inner product is recomputed.
        dropped = (tape.new(x.numel, x.itemsize),) if adapter.dropout > 0 else ()
        return ops.fused(
            tape, (x, down, up, out), outer, out.itemsize, saves=(x, *dropped), backward_scratch_nbytes=inner * 2
        )
    size = style.compute if style.autocast else adapter.itemsize
    source = x
    if adapter.code == "peft":
        source = ops.cast(tape, source, adapter.itemsize)  # x.to(lora_A.weight.dtype)
    source = ops.dropout(tape, source, adapter.dropout)
    source = ops.cast(tape, source, size)  # autocast
    a = ops.linear(tape, source, down, inner)
    del source
    b = ops.linear(tape, a, up, outer)
    del a
    b = ops.scale(tape, b)
    result = ops.add(tape, out, b)
    del b
    return ops.cast(tape, result, out.itemsize)
