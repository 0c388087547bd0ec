"""Chunks for the kernel tests: random arrays salted with every awkward float, and one call for all optimizers.

Not a test file. A Chunk holds numpy arrays (bfloat16 as uint16 bits), so that the reference, every SIMD clone
and torch can start from equal state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overspill import _native
from overspill.optim import reference

Array = npt.NDArray[Any]

KINDS = ("adamw", "adam", "sgd", "sgd plain", "lion")
FORMATS = ("fp32", "fp32 master", "split")

AWKWARD_BITS = np.array(
    [
        *(0x00000000, 0x80000000),  # zeros
        *(0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80008000),  # denormals, the smallest normal
        *(0x3F808000, 0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001),  # ties of bfloat16 and their neighbours
        *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x5F000000),  # overflow by rounding, or when squared
        *(0x7F800000, 0xFF800000),  # infinities
        *(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x7F80FFFF),  # NaNs, payloads and signs
    ],
    dtype=np.uint32,
)


def floats(rng: np.random.Generator, n: int, scale: float, awkward: float, dtype: type) -> Array:
    """n normal floats of which a share is awkward; dtype uint16 gives bfloat16 bits."""
    x = (rng.standard_normal(n) * scale).astype(np.float32)
    salted = rng.random(n) < awkward
    x[salted] = rng.choice(AWKWARD_BITS, int(salted.sum())).view(np.float32)
    return reference.publish(x) if dtype is np.uint16 else x


@dataclass
class Chunk:
    """One chunk in one format, with its tables."""

    weights: Array
    grads: Array
    master: Array | None
    state1: Array
    state2: Array
    segments: Array
    scalars: Array

    def copy(self) -> Chunk:
        return Chunk(**{name: None if x is None else x.copy() for name, x in vars(self).items()})

    def results(self) -> dict[str, bytes]:
        """Every byte that an update may change."""
        arrays = {"weights": self.weights, "master": self.master, "state1": self.state1, "state2": self.state2}
        return {name: x.tobytes() for name, x in arrays.items() if x is not None}

    def part(self, start: int, stop: int) -> Chunk:
        """The chunk [start, stop) as views, with the segments cut to it."""
        rows = []
        for k, (a, b, _) in enumerate(self.segments.tolist()):
            if max(a, start) < min(b, stop):
                rows.append((k, max(a, start) - start, min(b, stop) - start))
        kept = [k for k, _, _ in rows]
        segments = np.array([(a, b, self.segments[k, 2]) for k, a, b in rows], np.int64).reshape(-1, 3)
        at = slice(start, stop)
        master = None if self.master is None else self.master[at]
        arrays = (self.weights[at], self.grads[at], master, self.state1[at], self.state2[at])
        return Chunk(*arrays, segments, np.ascontiguousarray(self.scalars[kept]))


def segments_over(rng: np.random.Generator, n: int, count: int) -> Array:
    """Up to count segments in [0, n), with gaps, some resynced, some skipped."""
    cuts = np.sort(rng.integers(0, n + 1, 2 * count))
    flags = rng.choice([0, 0, 0, _native.RESYNC, _native.SKIP], count)
    return np.stack([cuts[0::2], cuts[1::2], flags], axis=1).astype(np.int64)


def scalars_for(rng: np.random.Generator, kind: str, count: int) -> Array:
    """One plausible row per segment, corner settings (beta 0, no decay, first step, negative scale) among them."""
    rows = []
    for _ in range(count):
        lr = rng.choice([1e-3, 3e-4, 0.1, 0.0])
        decay = rng.choice([0.0, 0.01, 0.1])
        beta1, beta2 = rng.choice([0.9, 0.95, 0.5, 0.3, 0.0]), rng.choice([0.999, 0.95, 0.0])
        scale = rng.choice([1.0, 0.37, -1.0, 1 / 65536])
        if kind.startswith("adam"):
            step = int(rng.integers(1, 1000))
            rows.append((lr, beta1, beta2, 1e-8, decay, 1 - beta1**step, (1 - beta2**step) ** 0.5, scale))
        elif kind.startswith("sgd"):
            momentum = 0.9 if kind == "sgd" else 0.0
            rows.append((lr, momentum, rng.choice([0.0, 0.2]), decay, *rng.integers(0, 2, 2), 0.0, scale))
        else:
            rows.append((lr, beta1, beta2, decay, 0.0, 0.0, 0.0, scale))
    return np.array(rows, np.float64).reshape(count, 8)


def make_chunk(
    seed: int,
    *,
    kind: str,
    form: str,
    n: int,
    segments: int = 3,
    bf16_grads: bool = True,
    bf16_state: bool = False,
    awkward: float = 0.1,
) -> Chunk:
    """A chunk of n elements. The same seed gives the same masters, gradients and state in every format."""
    rng = np.random.default_rng(seed)
    state_dtype = np.uint16 if bf16_state else np.float32
    master = reference.one_nan(floats(rng, n, 0.02, awkward, np.float32))
    grads = floats(rng, n, 0.01, awkward, np.uint16 if bf16_grads else np.float32)
    state1 = floats(rng, n, 0.01, awkward, state_dtype)
    state2 = floats(rng, n, 1e-4, awkward, state_dtype)
    table = segments_over(rng, n, segments)
    scalars = scalars_for(rng, kind, segments)
    if form == "fp32":
        return Chunk(master, grads, None, state1, state2, table, scalars)
    weights = reference.publish(master)
    if form == "fp32 master":
        return Chunk(weights, grads, master, state1, state2, table, scalars)
    residual = np.empty(n, np.int16)
    reference.split_(weights, residual, master)
    return Chunk(weights, grads, residual, state1, state2, table, scalars)


def update(chunk: Chunk, kind: str, pool: _native.ThreadPool | None, level: str = "auto") -> None:
    """One update in place: by the native core, or by the reference where pool is None."""
    w, g, p, m, v, segments, scalars = vars(chunk).values()
    buffer = m if kind == "sgd" else None
    if pool is None:
        if kind.startswith("adam"):
            reference.adamw_(w, g, p, m, v, segments, scalars, decoupled=kind == "adamw")
        elif kind.startswith("sgd"):
            reference.sgd_(w, g, p, buffer, segments, scalars)
        else:
            reference.lion_(w, g, p, m, segments, scalars)
    elif kind.startswith("adam"):
        _native.adamw_(w, g, p, m, v, segments, scalars, pool, decoupled=kind == "adamw", level=level)
    elif kind.startswith("sgd"):
        _native.sgd_(w, g, p, buffer, segments, scalars, pool, level=level)
    else:
        _native.lion_(w, g, p, m, segments, scalars, pool, level=level)
