"""The slow, obvious meaning of every native kernel: numpy, one line per operation, one rounding per line.

The native core is held bitwise equal to this file by tests/unit/test_native_*.py; docs/theory/arithmetic.md
is this file in prose. Nothing in the training path imports it. Arrays are 1-D numpy; bfloat16 is uint16 bits.
The order of operations follows torch.optim's _single_tensor_adam and _single_tensor_sgd; Lion follows
Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["accumulate_", "adamw_", "join_", "lion_", "publish", "sgd_", "split_", "squared_norms", "widen"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

f32: Final = np.float32
RESYNC: Final = 1
SKIP: Final = 2
NORM_CHUNK: Final = 65536
LANES: Final = 16


def widen(x: Array) -> Floats:
    """float32 from bfloat16 bits; float32 stays as it is."""
    return (x.astype(np.uint32) << 16).view(f32) if x.dtype == np.uint16 else x.astype(f32)


def one_nan(x: Floats) -> Floats:
    """Every NaN as 0x7fc00000, since payload and sign depend on the order of operands in machine code."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32)).astype(np.uint32).view(f32)


def publish(x: Floats) -> npt.NDArray[np.uint16]:
    """bfloat16 bits, rounded half up in magnitude, NaN kept NaN."""
    bits = one_nan(x).view(np.uint32).astype(np.uint64)
    return ((bits + 0x8000) >> 16).astype(np.uint16)


def split_(weights: Array, residual: Array | None, master: Floats) -> None:
    """bfloat16 weights and the int16 residual that gives the float32 master back."""
    weights[:] = publish(master)
    if residual is not None:
        bits = one_nan(master).view(np.uint32).astype(np.int64)
        residual[:] = bits - (weights.astype(np.int64) << 16)


def join_(master: Floats, weights: Array, residual: Array | None) -> None:
    """The inverse of split_."""
    low = 0 if residual is None else residual.astype(np.int64)
    bits = (weights.astype(np.int64) << 16) + low
    master[:] = bits.astype(np.uint32).view(f32)


def _store(array: Array, at: slice, x: Floats) -> None:
    array[at] = publish(x) if array.dtype == np.uint16 else one_nan(x)


def _load_master(weights: Array, master: Array | None, at: slice) -> Floats:
    if master is None:
        return widen(weights[at])
    if master.dtype == f32:
        # A weight that is not what its master publishes was edited by the user, and is the truth.
        return np.where(publish(master[at]) == weights[at], one_nan(master[at]), widen(weights[at]))
    x = np.empty(at.stop - at.start, f32)
    join_(x, weights[at], master[at])
    return x


def _store_master(weights: Array, master: Array | None, at: slice, x: Floats) -> None:
    if master is None:
        weights[at] = one_nan(x)
    elif master.dtype == f32:
        master[at] = one_nan(x)
        weights[at] = publish(x)
    else:
        split_(weights[at], master[at], x)


def _updates(
    weights: Array,
    master: Array | None,
    segments: Array,
    scalars: Array,
    update: Callable[[slice, list[float]], Floats],
) -> None:
    """Walks the segments: skip, resync, update, publish."""
    for (start, stop, flags), row in zip(segments.tolist(), scalars.tolist(), strict=True):
        if flags & SKIP:
            continue
        at = slice(start, stop)
        if flags & RESYNC and master is not None:
            master[at] = widen(weights[at]) if master.dtype == f32 else 0
        with np.errstate(all="ignore"):
            _store_master(weights, master, at, update(at, row))


def adamw_(
    weights: Array,
    grads: Array,
    master: Array | None,
    exp_avg: Array,
    exp_avg_sq: Array,
    segments: Array,
    scalars: Array,
    decoupled: bool = True,
) -> None:
    """AdamW, or Adam with L2. scalars: lr, beta1, beta2, eps, weight_decay, correction1, sqrt(correction2), scale."""

    def update(at: slice, row: list[float]) -> Floats:
        lr, beta1, beta2, eps, weight_decay, correction1, correction2_sqrt, scale = row
        x = _load_master(weights, master, at)
        g = widen(grads[at]) * f32(scale)
        if decoupled:
            x = x * f32(1 - lr * weight_decay)
        elif weight_decay != 0:
            g = g + f32(weight_decay) * x
        m = widen(exp_avg[at])
        weight = f32(1 - beta1)
        m = m + weight * (g - m) if abs(weight) < 0.5 else g + (weight - f32(1)) * (g - m)
        v = widen(exp_avg_sq[at]) * f32(beta2)
        v = v + f32(1 - beta2) * g * g
        denom = np.sqrt(v) * f32(1 / correction2_sqrt)
        denom = denom + f32(eps)
        _store(exp_avg, at, m)
        _store(exp_avg_sq, at, v)
        updated: Floats = x + f32(-(lr / correction1)) * m / denom
        return updated

    _updates(weights, master, segments, scalars, update)


def sgd_(
    weights: Array, grads: Array, master: Array | None, momentum_buffer: Array | None, segments: Array, scalars: Array
) -> None:
    """SGD. scalars: lr, momentum, dampening, weight_decay, nesterov, first step, unused, scale."""

    def update(at: slice, row: list[float]) -> Floats:
        lr, momentum, dampening, weight_decay, nesterov, first, _, scale = row
        x = _load_master(weights, master, at)
        g = widen(grads[at]) * f32(scale)
        if weight_decay != 0:
            g = g + f32(weight_decay) * x
        if momentum_buffer is not None:
            buffer = g
            if not first:
                buffer = widen(momentum_buffer[at]) * f32(momentum)
                buffer = buffer + f32(1 - dampening) * g
            _store(momentum_buffer, at, buffer)
            g = g + f32(momentum) * buffer if nesterov else buffer
        return x + f32(-lr) * g

    _updates(weights, master, segments, scalars, update)


def lion_(weights: Array, grads: Array, master: Array | None, exp_avg: Array, segments: Array, scalars: Array) -> None:
    """Lion. scalars: lr, beta1, beta2, weight_decay, three unused, scale."""

    def update(at: slice, row: list[float]) -> Floats:
        lr, beta1, beta2, weight_decay, _, _, _, scale = row
        x = _load_master(weights, master, at) * f32(1 - lr * weight_decay)
        g = widen(grads[at]) * f32(scale)
        m = widen(exp_avg[at])
        direction: Floats = np.sign(m * f32(beta1) + f32(1 - beta1) * g)
        _store(exp_avg, at, m * f32(beta2) + f32(1 - beta2) * g)
        return x - f32(lr) * direction

    _updates(weights, master, segments, scalars, update)


def _partials(g: Array) -> Iterator[float]:
    for start in range(0, g.size, NORM_CHUNK):
        chunk = widen(g[start : start + NORM_CHUNK]).astype(np.float64)
        rows = np.zeros((-(-chunk.size // LANES), LANES))
        rows.flat[: chunk.size] = chunk
        lanes = np.zeros(LANES)
        for row in rows:
            lanes = lanes + row * row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        yield float(lanes[0])


def squared_norms(grads: Array, segments: Array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Sums of squares and counts of NaN or infinite elements, in the defined order."""
    sums = np.zeros(len(segments))
    nonfinite = np.zeros(len(segments), np.int64)
    for k, (start, stop, flags) in enumerate(segments.tolist()):
        if flags & SKIP:
            continue
        with np.errstate(all="ignore"):
            for partial in _partials(grads[start:stop]):
                sums[k] += partial
        nonfinite[k] = np.count_nonzero(~np.isfinite(widen(grads[start:stop])))
    return sums, nonfinite


def accumulate_(target: Floats, source: Array) -> None:
    """target += source in float32."""
    with np.errstate(all="ignore"):
        target[:] = one_nan(target + widen(source))
