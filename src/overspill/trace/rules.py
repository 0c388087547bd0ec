"""What a device does differently from another at the same step, as data: the trace is told, and does not guess.

Shapes of a step's tensors are the same everywhere; what else is kept or taken in between depends on the kernels. Each
field says which kernels allocate what, with its source. `CUDA` is PyTorch on an NVIDIA GPU; `EMULATED` and `CPU` are
for checks against real runs (tests/device, tests/unit/test_trace_cpu.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from overspill.forecast.events import GRANULE_NBYTES
from overspill.units import KiB, MiB

__all__ = ["CPU", "CUDA", "CUDA_HOPPER", "EMULATED", "AttentionFootprint", "AttentionKernel", "DeviceRules"]


class AttentionKernel(StrEnum):
    """Which kernel computes attention; each keeps and takes something else ([Note: Attention footprints])."""

    FLASH = "flash"
    SDPA = "sdpa"
    MATH = "math"
    FLEX = "flex"
    EAGER = "eager"


@dataclass(frozen=True, slots=True)
class AttentionFootprint:
    """What a fused kernel keeps beside q, k, v and the output, and takes in its backward.

    [Note: Attention footprints] All keep q, k, v, the output and one fp32 logsumexp per head and query.
    ``accumulator``: the backward adds dq in fp32, in a buffer padded to whole tiles (FlashAttention-2: ``dq_accum`` and
    ``softmax_d`` of torch's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd).
    ``delta``: an fp32 value per head and query in the backward (rowsum of dout * out).
    ``expands_gradients``: with fewer key/value than query heads, dk and dv are first made at the query's heads (same
    file, ``dk_expanded``). ``repeats_heads``: k and v are repeated to the query's heads before the kernel
    (memory-efficient attention takes no groups: aten/src/ATen/native/transformers/sdp_utils_cpp.h).
    ``queries_multiple``: the logsumexp's queries are rounded up (32: attention_backward.cu, kAlignLSE).
    """

    accumulator: bool = False
    delta: bool = True
    expands_gradients: bool = False
    repeats_heads: bool = False
    queries_multiple: int = 1
    tile: int = 128


_FLASH_2: Final = AttentionFootprint(accumulator=True, expands_gradients=True)
_EFFICIENT: Final = AttentionFootprint(repeats_heads=True, queries_multiple=32)
_FLEX: Final = AttentionFootprint()
_PLAIN: Final = AttentionFootprint(delta=False)


@dataclass(frozen=True, kw_only=True)
class DeviceRules:
    """The device's rules. Defaults are CUDA's.

    ``granule_nbytes``: sizes are rounded up to it when allocated bytes are counted.
    ``fused_dropout``: dropout keeps a mask of one byte per element (native_dropout) instead of a tensor of the
    input's dtype (is_fused_kernel_acceptable of aten/src/ATen/native/Dropout.cpp).
    ``fused_rms_norm``: torch's rms_norm is one kernel that keeps its input and one value a row.
    ``softmax_from_half``: softmax of fp16 with a fp32 result makes no fp32 copy first (…/native/SoftMax.cpp).
    ``foreach``: optimizers and clipping take lists of tensors at once unless told otherwise (torch/utils/
    _foreach_utils.py lists the devices).
    ``workspace_nbytes``: cuBLAS takes one per handle and stream from the allocator at its first product, and the
    thread that runs backward has a handle of its own (aten/src/ATen/cuda/CublasHandlePool.cpp).
    """

    granule_nbytes: int = GRANULE_NBYTES
    fused_dropout: bool = True
    fused_rms_norm: bool = True
    softmax_from_half: bool = True
    foreach: bool = True
    flash: AttentionFootprint = _FLASH_2
    efficient: AttentionFootprint = _EFFICIENT
    flex: AttentionFootprint = _FLEX
    workspace_nbytes: int = (4096 * 2 + 16 * 8) * KiB
    backward_has_own_workspace: bool = True


CUDA: Final = DeviceRules()
#: Hopper's default workspace is 32 MiB (same source).
CUDA_HOPPER: Final = DeviceRules(workspace_nbytes=32 * MiB)
#: The emulated accelerator with its fused attention: the CPU's kernels, the device's accounting.
EMULATED: Final = DeviceRules(
    fused_dropout=False,
    fused_rms_norm=False,
    softmax_from_half=False,
    flash=_PLAIN,
    efficient=_PLAIN,
    flex=_PLAIN,
    workspace_nbytes=0,
)
#: A CPU run whose tensors are counted without rounding.
CPU: Final = DeviceRules(
    granule_nbytes=1,
    fused_dropout=False,
    fused_rms_norm=False,
    softmax_from_half=False,
    foreach=False,
    flash=_PLAIN,
    efficient=_PLAIN,
    flex=_PLAIN,
    workspace_nbytes=0,
)
