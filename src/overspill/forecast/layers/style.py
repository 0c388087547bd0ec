"""How a layer is carried out: which code path each part takes, as far as memory depends on it.

A `Style` is resolved from a job, a framework and its versions by forecast/resolve.py; nothing here decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Adapter", "Style"]

Norm = Literal["python", "composite", "kernel"]
Rope = Literal["python", "complex", "in_place", "kernel", "none"]
Attention = Literal["flash", "flash_aten", "eager", "math", "flex", "cudnn"]
Mlp = Literal["python", "recompute", "kernel", "kernel_pair"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA pairs. code: whose (peft's operation by operation, one fused function, litgpt's or torchtune's).

    peft casts the input to the adapters' dtype, and autocast casts it back: one saved copy for each module.
    """

    code: Literal["peft", "fused", "litgpt", "torchtune"]
    rank: int
    itemsize: int
    dropout: float = 0.0
    dora: bool = False


@dataclass(frozen=True, slots=True)
class Style:
    """itemsizes: bytes per element of the residual stream, of what the matmuls compute in, and of the weights.

    norm: ``python`` is a chain of operations with an fp32 copy (transformers), ``composite`` torch's rms_norm before
    2.8 (the same chain inside ATen), ``kernel`` one that saves its input and a row's factor. repeat_kv: keys and values
    are copied to all heads before attention. rope ``complex``: through fp32 complex numbers (torchtitan, torchtune).
    mlp ``recompute``: the kernel saves gate and up alone and writes their gradients over them (Liger, Unsloth);
    ``kernel``: gate and up side by side in one tensor, as Megatron's bias_swiglu; ``kernel_pair``: one generated
    kernel over both (torch.compile), which keeps them and recomputes. quantised: the base's dequantised copy lives
    while it is used. reentrant: of checkpointing. grouped_experts: all experts in one grouped matmul, else one after
    the other. expert_linears: each expert's matrices are modules.
    """

    residual: int
    compute: int
    weight: int
    autocast: bool = False
    code: Literal["transformers", "litgpt", "torchtune", "torchtitan", "megatron"] = "transformers"
    norm: Norm = "python"
    norm_fp32: bool = True
    norm_fp32_output: bool = False
    rope: Rope = "python"
    attention: Attention = "flash"
    repeat_kv: bool = False
    mlp: Mlp = "python"
    adapter: Adapter | None = None
    quantised: bool = False
    saves_dequantised: bool = False
    reentrant: bool = False
    flash_accumulates_fp32: bool = True
    grouped_experts: bool = False
    compiled: bool = False
    expert_linears: bool = False
