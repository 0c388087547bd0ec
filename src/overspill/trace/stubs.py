"""Modules whose kernels do not run on meta, as footprints: quantised linear layers, Liger's kernels, fused losses.

A stub keeps the tensors that the real module keeps, and takes in forward and backward what the real kernel takes; its
numbers mean nothing. Each says which file of which library it follows. `register` adds one of your own, by the class
that it stands for; `replaced` puts stubs in place of every module whose class has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
from torch import nn

from overspill.trace.interception import active

__all__ = [
    "LigerRMSNorm",
    "Linear4bit",
    "Linear8bit",
    "fused_cross_entropy_loss",
    "fused_linear_loss",
    "quantised",
    "register",
    "replaced",
]

_STUBS: Final[dict[str, Callable[[nn.Module], nn.Module]]] = {}


def register(class_name: str, make: Callable[[nn.Module], nn.Module]) -> None:
    """Declares that modules of this class (by its bare name) are traced as ``make(module)``."""
    _STUBS[class_name] = make


def replaced(model: nn.Module, stubs: dict[str, Callable[[nn.Module], nn.Module]] | None = None) -> nn.Module:
    """Puts a stub in place of every module whose class has one (those of ``stubs``, else the registered ones)."""
    known = _STUBS if stubs is None else stubs
    for name, module in list(model.named_modules()):
        make = known.get(type(module).__name__)
        if make is not None and name:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, make(module))
    return model


# ---- quantised weights (bitsandbytes) ----


class _Dequantised(torch.autograd.Function):
    """x @ W' + bias with W made from its code for the product, in forward and again in backward; x is not kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, module: Linear4bit) -> torch.Tensor:
        ctx.module, ctx.dtype = module, x.dtype
        return torch.nn.functional.linear(x, module.dequantise(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.matmul(gradient, ctx.module.dequantise(gradient.dtype)), None, None


class Linear4bit(nn.Module):
    """A linear layer in NF4 or FP4: bitsandbytes/nn/modules.py, Linear4bit, and autograd/_functions.py, MatMul4Bit.

    Half a byte per weight and a fp32 scale per 64; with double quantisation one byte per scale, and a fp32 scale per
    256 of those (functional.py, quantize_4bit). x is cast to ``compute_dtype`` and the result back.
    """

    BLOCK_NUMEL: Final = 64
    NESTED_NUMEL: Final = 256

    def __init__(self, linear: nn.Linear, *, compute_dtype: torch.dtype, double: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype, self.weight_dtype = compute_dtype, linear.weight.dtype
        self.loaded_nbytes = linear.weight.nbytes
        device = linear.weight.device
        numel = linear.weight.numel()
        self.blocks = -(-numel // self.BLOCK_NUMEL)
        self.nested = double
        packed = torch.empty(((numel + 1) // 2, 1), dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        scales = torch.uint8 if double else torch.float32
        self.register_buffer("absmax", torch.empty(self.blocks, dtype=scales, device=device))
        self.register_buffer("code", torch.empty(16, dtype=torch.float32, device=device))
        if double:
            nested = -(-self.blocks // self.NESTED_NUMEL)
            self.register_buffer("nested_absmax", torch.empty(nested, dtype=torch.float32, device=device))
            self.register_buffer("nested_code", torch.empty(256, dtype=torch.float32, device=device))
            self.register_buffer("offset", torch.empty((), dtype=torch.float32, device=device))
        self.bias = linear.bias

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in the dtype it had, cast to ``dtype``; scales are dequantised first."""
        scales = self.weight.new_empty(self.blocks, dtype=torch.float32) if self.nested else None
        weight = self.weight.new_empty((self.out_features, self.in_features), dtype=self.weight_dtype)
        del scales
        return weight.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.dtype
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        result: torch.Tensor = _Dequantised.apply(x.to(self.compute_dtype), bias, self)  # type: ignore[no-untyped-call]
        return result.to(kind)


class _Int8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, module: Linear8bit) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        half = rows.to(torch.float16)
        codes, scales = half.new_empty(half.shape, dtype=torch.int8), half.new_empty(half.shape[0], dtype=torch.float32)
        del half
        product = codes.new_empty((rows.shape[0], module.out_features), dtype=torch.int32)
        result = product.new_empty(product.shape, dtype=torch.float16).to(x.dtype)
        del codes, scales
        ctx.module, ctx.shape, ctx.rows, ctx.dtype = module, x.shape, rows, x.dtype
        return result.reshape(*x.shape[:-1], module.out_features)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        module: Linear8bit = ctx.module
        rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        weight = module.weight.new_empty(module.weight.shape, dtype=ctx.dtype)
        return torch.matmul(rows.to(ctx.dtype), weight).view(ctx.shape), None, None


class Linear8bit(nn.Module):
    """LLM.int8(): bitsandbytes/autograd/_functions.py, MatMul8bitLt, for frozen int8 weights without outlier columns.

    One byte per weight and a fp32 scale per row. Forward quantises x (fp16 first), makes an int32 product and a fp16
    result; x itself is kept for backward, which makes the weight in x's dtype.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.loaded_nbytes = linear.weight.nbytes
        device = linear.weight.device
        codes = torch.empty((self.out_features, self.in_features), dtype=torch.int8, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("SCB", torch.empty(self.out_features, dtype=torch.float32, device=device))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Int8Product.apply(x, self.bias, self)  # type: ignore[no-untyped-call]
        return result


def quantised(
    model: nn.Module,
    kind: Literal["nf4", "fp4", "int8"],
    *,
    compute_dtype: torch.dtype = torch.bfloat16,
    double: bool = True,
    skip: Sequence[str] = ("lm_head",),
) -> nn.Module:
    """Replaces every linear layer but those whose name ends in one of ``skip``, and freezes what there is."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or name.rpartition(".")[2] in skip:
            continue
        stub = Linear8bit(module) if kind == "int8" else Linear4bit(module, compute_dtype=compute_dtype, double=double)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, stub)
    return model


# ---- Liger kernels ----


class _LigerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, multiprocessors: int) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=torch.float32))
        ctx.multiprocessors = multiprocessors
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        partial = x.new_empty((ctx.multiprocessors, x.shape[-1]), dtype=torch.float32)
        return gradient.view_as(x), partial.sum(0).to(weight.dtype), None


class LigerRMSNorm(nn.Module):
    """Liger-Kernel src/liger_kernel/ops/rms_norm.py: keeps x and a fp32 value a row; dx overwrites dy.

    The weight's gradient is first one partial sum per multiprocessor of the GPU (132 on an H100 SXM).
    """

    def __init__(self, norm: nn.Module, *, multiprocessors: int = 132) -> None:
        super().__init__()
        self.weight = norm.weight
        self.multiprocessors = multiprocessors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _LigerNorm.apply(x, self.weight, self.multiprocessors)  # type: ignore[no-untyped-call]
        return result


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return gate.view_as(gate), up.view_as(up)


class LigerSwiGLU(nn.Module):
    """Liger-Kernel src/liger_kernel/ops/swiglu.py: keeps gate and up, whose gradients overwrite them."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(_SiluMul.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-untyped-call,operator]
        return result


#: For `replaced`: what Liger's patches replace in Llama, Mistral, Qwen 2 and 3.
LIGER: Final[dict[str, Callable[[nn.Module], nn.Module]]] = {
    **dict.fromkeys(("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"), LigerRMSNorm),
    **dict.fromkeys(("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"), LigerSwiGLU),
}


# ---- losses ----


class _FusedLinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, chunk_rows: int | None) -> torch.Tensor:
        rows, width = hidden.shape
        vocabulary = weight.shape[0]
        if chunk_rows is None:
            share = -(-rows // -(-vocabulary // width))
            chunk_rows = min(rows, 1 << max(share - 1, 0).bit_length())
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        losses = hidden.new_zeros(rows, dtype=torch.float32)
        for start in range(0, rows, chunk_rows):
            chunk = hidden[start : start + chunk_rows]
            logits = chunk @ weight.t()
            d_hidden[start : start + chunk_rows] = logits @ weight
            if d_weight is not None:
                torch.addmm(d_weight, logits.t(), chunk, out=d_weight)
            del logits
        ctx.save_for_backward(d_hidden, d_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden.mul_(gradient), None if d_weight is None else d_weight.mul_(gradient), None


def fused_linear_loss(model: Any, batch: dict[str, torch.Tensor], *, chunk_rows: int | None = None) -> torch.Tensor:
    """The loss from hidden states and the head's weight in chunks of rows; logits never exist whole.

    Liger-Kernel src/liger_kernel/ops/fused_linear_cross_entropy.py: gradients of hidden states and weight are made in
    the forward. A chunk has the next power of two of rows / ceil(vocabulary / hidden) unless ``chunk_rows`` says.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    hidden = model.get_decoder()(**inputs).last_hidden_state
    head = model.get_output_embeddings().weight
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        hidden, head = active().cache.cast(hidden, dtype), active().cache.cast(head, dtype)
    loss: torch.Tensor = _FusedLinearLoss.apply(hidden, head, chunk_rows)  # type: ignore[no-untyped-call]
    return loss


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits.detach())
        return logits.new_zeros(logits.shape[0], dtype=torch.float32).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        return logits.mul_(gradient)


def fused_cross_entropy_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Whole logits in their own dtype, whose gradient overwrites them (Liger-Kernel …/ops/cross_entropy.py)."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    loss: torch.Tensor = _FusedLoss.apply(logits.reshape(-1, logits.shape[-1]))  # type: ignore[no-untyped-call]
    return loss
