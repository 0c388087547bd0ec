"""From what is alive to what the card shows: the allocator's holdings, the context, communicators; and the interval.

Reserved: what is alive, and what the allocator caches beside it (cached.py). nvidia-smi: reserved plus the context
and, with several ranks, NCCL's communicators (catalog/overheads.toml, each size with its source): at the low end the
smallest that was seen, at the high end the largest. docs/theory/reserved.md derives both, and says what is not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from overspill.catalog.overheads import context, nccl_communicator
from overspill.forecast.device.cached import Range
from overspill.forecast.device.settings import Resolved

__all__ = ["Range", "Shown", "needed", "probability_above", "shown"]

#: Communicators that a process makes beside the world's: one for each kind of group that it is in.
_WORLD = 1
#: What is uncertain of allocated itself: batches that differ from the one forecast, kernels of another version.
#: Source: the scoreboard's 90th percentile of |error|, docs/scoreboard.md.
ALLOCATED_SPREAD = 0.03
#: The same under torch.compile, whose fusion and buffer reuse differ by release and are not modelled: the range of one
#: configuration over the torch and torchtitan releases of a year (pytorch/ao, docs/source/workflows/training.md:
#: 33.7 to 47.7).
COMPILED_SPREAD = 0.12


@dataclass(frozen=True, slots=True)
class Shown:
    """What the allocator holds, and what nvidia-smi shows."""

    reserved: Range
    smi: Range


def needed(allocated_nbytes: int, resolved: Resolved, *, torch: str | None = None) -> tuple[Range, Range]:
    """(allocated, what the card must have): the latter when the allocator gives back all that it caches."""
    low_extra, high_extra = _outside(resolved, torch)
    spread = round(allocated_nbytes * (COMPILED_SPREAD if resolved.style.compiled else ALLOCATED_SPREAD))
    allocated = Range(allocated_nbytes - spread, allocated_nbytes, allocated_nbytes + spread)
    middle = (low_extra + high_extra) // 2
    return allocated, Range(allocated.low + low_extra, allocated.likely + middle, allocated.high + high_extra)


def shown(
    allocated: Range,
    beyond: Range,
    resolved: Resolved,
    *,
    capacity_nbytes: int | None,
    torch: str | None = None,
    whole_nbytes: int = 0,
) -> Shown:
    """The figures of one rank. allocated, beyond: what is alive, and what is cached beside it (cached.py).
    capacity_nbytes: what the runtime offers, less what others hold; None: not known. whole_nbytes: of a model that is
    whole on the card before it is split ([Note: Loaded whole])."""
    low_extra, high_extra = _outside(resolved, torch)
    reserved = allocated + beyond
    if whole_nbytes:
        reserved = Range(*(max(one, whole_nbytes) for one in (reserved.low, reserved.likely, reserved.high)))
    smi = reserved + Range(low_extra, (low_extra + high_extra) // 2, high_extra)
    if capacity_nbytes is not None and allocated.likely + low_extra <= capacity_nbytes:
        if smi.likely > capacity_nbytes:
            # The allocator gives back all that it caches before it fails; then it holds what is alive.
            reserved = replace(reserved, low=min(reserved.low, allocated.likely))
            smi = replace(smi, low=min(smi.low, allocated.likely + low_extra))
        reserved = _capped(reserved, max(allocated.likely, capacity_nbytes - low_extra))
        smi = _capped(smi, capacity_nbytes)
    return Shown(reserved, smi)


def _outside(resolved: Resolved, torch: str | None) -> tuple[int, int]:
    """Least and most of what the process holds beside torch's allocator."""
    bare, one = context(torch=torch), nccl_communicator()
    low, high = bare.low_nbytes, bare.high_nbytes
    communicators = _communicators(resolved)
    if communicators:
        low += one.low_nbytes
        high += communicators * one.high_nbytes
    return low, high


def _capped(one: Range, capacity: int) -> Range:
    likely = min(one.likely, capacity)
    return Range(min(one.low, capacity), likely, max(min(one.high, capacity), likely))


def _communicators(resolved: Resolved) -> int:
    groups = [resolved.sharding.ranks, resolved.tensor, resolved.context, resolved.expert, resolved.pipeline]
    return 0 if all(size == 1 for size in groups) else _WORLD + sum(size > 1 for size in groups[1:])


def probability_above(one: Range, limit: int) -> float:
    """The probability that the figure exceeds ``limit``: a normal curve of which the interval holds 90 %."""
    half = (one.high - one.low) / 2
    if half <= 0:
        return float(one.likely > limit)
    sigma = half / 1.645
    centre = (one.high + one.low) / 2
    return 0.5 * math.erfc((limit - centre) / (sigma * math.sqrt(2)))
