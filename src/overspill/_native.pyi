"""The typed face of the native core (native/*.cpp). Checked against the built module by tests/unit/test_native_stub.py.

Arrays are 1-D, contiguous, on the CPU, and come in by DLPack: torch tensors or numpy arrays. bfloat16 is
torch.bfloat16, or uint16 holding the bits. Nothing is converted or copied silently: a wrong dtype, a strided
or a read-only array is a TypeError; unequal lengths, overlapping arrays and bad tables are a ValueError.
A name that ends in _ changes its arrays in place. ``level`` chooses the SIMD clone; all give the same bits.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Buffer

Array: TypeAlias = torch.Tensor | npt.NDArray[np.generic]
Segments: TypeAlias = torch.Tensor | npt.NDArray[np.int64]
Scalars: TypeAlias = torch.Tensor | npt.NDArray[np.float64]

RESYNC: Final[int]
"""Segment flag: take the master from the published weights (residual 0, or master = weights) before the update."""
SKIP: Final[int]
"""Segment flag: the parameter has no gradient this step; leave everything as it is."""
NORM_CHUNK: Final[int]
"""Elements per partial sum of squared_norms, counted from the segment's start. Part of the definition."""

class ThreadPool:
    """Threads for the kernels, the caller included: 1 starts none. Raises RuntimeError when used in a forked child."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

def simd_level() -> str:
    """The best of simd_levels(): what level="auto" means."""

def simd_levels() -> list[str]:
    """The SIMD clones that this build and CPU have, best first: "x86-64-v4", "x86-64-v3", "baseline", or "neon"."""

def adamw_(
    weights: Array,
    grads: Array,
    master: Array | None,
    exp_avg: Array,
    exp_avg_sq: Array,
    segments: Segments,
    scalars: Scalars,
    pool: ThreadPool,
    decoupled: bool = True,
    level: str = "auto",
) -> None:
    """One AdamW step (Adam with L2 where not decoupled) over a chunk, in one pass.

    master: None with float32 weights; float32, or int16 (the split residual), with bfloat16 weights.
    segments: int64 [n, 3] rows (start, stop, flags), ascending and disjoint; elements outside are not touched.
    scalars: float64 [n, 8] rows: lr, beta1, beta2, eps, weight_decay, bias_correction1, sqrt(bias_correction2),
    grad_scale.
    """

def sgd_(
    weights: Array,
    grads: Array,
    master: Array | None,
    momentum_buffer: Array | None,
    segments: Segments,
    scalars: Scalars,
    pool: ThreadPool,
    level: str = "auto",
) -> None:
    """One SGD step. scalars rows: lr, momentum, dampening, weight_decay, nesterov, first step, unused, grad_scale."""

def lion_(
    weights: Array,
    grads: Array,
    master: Array | None,
    exp_avg: Array,
    segments: Segments,
    scalars: Scalars,
    pool: ThreadPool,
    level: str = "auto",
) -> None:
    """One Lion step. scalars rows: lr, beta1, beta2, weight_decay, unused ×3, grad_scale."""

def squared_norms(
    grads: Array, segments: Segments, pool: ThreadPool, level: str = "auto"
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Per segment the sum of squares in float64, and how many elements are NaN or infinite.

    Cut in NORM_CHUNK elements from each segment's start; the order of addition is defined, so the result does not
    depend on threads, clone or batching. Segments with SKIP give 0, 0.
    """

def accumulate_(target: Array, source: Array, pool: ThreadPool, level: str = "auto") -> None:
    """target (float32) += source (float32 or bfloat16)."""

def join_(master: Array, weights: Array, residual: Array | None, pool: ThreadPool, level: str = "auto") -> None:
    """master (float32) = bfloat16 weights + int16 residual, exactly; without a residual a plain widening."""

def split_(weights: Array, residual: Array | None, master: Array, pool: ThreadPool, level: str = "auto") -> None:
    """bfloat16 weights and int16 residual from a float32 master; the inverse of join_. NaN becomes the one NaN."""

def stream_(a: Array, b: Array, c: Array, d: Array, pool: ThreadPool, level: str = "auto") -> None:
    """a += d, b += d, c += d in float32: the memory streams of Adam with trivial arithmetic, for benchmarks."""

def xxh3_64(buffer: Buffer | torch.Tensor) -> int:
    """XXH3-64 (seed 0) of the buffer's bytes."""

def xxh3_pieces(buffer: Buffer | torch.Tensor, piece_nbytes: int) -> npt.NDArray[np.uint64]:
    """XXH3-64 of each piece of piece_nbytes; the last may be shorter. An empty buffer has no pieces."""

def forbid_access(buffer: Buffer) -> None:
    """Whole pages that no one may read or write any more: an access is a segmentation fault.

    Raises RuntimeError when the buffer does not start at a page.
    """

def malloc_trim() -> bool:
    """Give free heap memory back to the system. False where nothing was given back, or the libc is not glibc."""

def set_malloc(mmap_threshold_nbytes: int, trim_threshold_nbytes: int, arena_max: int) -> bool:
    """Set glibc's mallopt. False where it is refused, or the libc is not glibc."""
