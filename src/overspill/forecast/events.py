"""Allocation events: what a training step asks of a device's allocator, in order, and why.

A trace (overspill.trace) or a recorded CUDA history gives such a list; the replay (forecast/allocator.py) reads it.
Sizes are what was asked for; rounding is the allocator's business. Pure Python, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final, NamedTuple

__all__ = ["GRANULE_NBYTES", "BlockMisuse", "Category", "Event", "Kind", "Peak", "peaks_by_phase", "rounded_nbytes"]

#: The allocator's smallest unit: every request is rounded up to a multiple of it (kMinBlockSize of torch's
#: c10/cuda/CUDACachingAllocator.cpp).
GRANULE_NBYTES: Final = 512


class Kind(IntEnum):
    """What happens to a block."""

    MALLOC = 0
    FREE = 1
    #: Freed by its owner while another stream may still use it (record_stream): no longer allocated, not yet reusable.
    FREE_REQUESTED = 2
    #: The other stream has passed: reusable.
    FREE_COMPLETED = 3


class Category(StrEnum):
    """What a block is for. A block has one category for its whole life: the most lasting use that was made of it."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    LOGITS = "logits and loss"
    INPUTS = "inputs"
    WORKSPACE = "workspaces"
    TEMPORARIES = "temporaries"


class Event(NamedTuple):
    """One call of the allocator.

    ``block`` names the allocation in both of its events; ``nbytes`` is the size asked for. ``phase`` is the phase
    point in which it happened ("forward", "loss", "backward of layers.3", …), ``module`` the innermost module at its
    malloc ("" outside of any).
    """

    kind: Kind
    block: int
    nbytes: int
    category: Category = Category.TEMPORARIES
    phase: str = ""
    module: str = ""
    stream: int = 0


class BlockMisuse(ValueError):
    """The list is no history: a block is allocated twice, or freed without having been allocated."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest instant of a phase: bytes allocated, by category, and the index of its event in the list."""

    phase: str
    nbytes: int
    by_category: tuple[tuple[Category, int], ...]
    event: int


def rounded_nbytes(nbytes: int, granule_nbytes: int = GRANULE_NBYTES) -> int:
    """What a request of ``nbytes`` takes: at least one granule, a multiple of it. 1 leaves sizes as they are."""
    return max(granule_nbytes, -(-nbytes // granule_nbytes) * granule_nbytes) if nbytes > 0 else 0


def peaks_by_phase(events: Iterable[Event], granule_nbytes: int = GRANULE_NBYTES) -> tuple[Peak, ...]:
    """The peak of each phase, in order of first appearance; a phase that comes again counts with its former visits.

    What is alive when a phase begins counts in it. Raises BlockMisuse when the events are no history.
    """
    alive: dict[int, tuple[int, Category]] = {}
    current = dict.fromkeys(Category, 0)
    total = 0
    best: dict[str, tuple[int, tuple[tuple[Category, int], ...], int]] = {}
    phase = None
    for index, event in enumerate(events):
        if event.phase != phase:
            phase = event.phase
            if phase not in best or total > best[phase][0]:
                best[phase] = (total, tuple(current.items()), index)
        if event.kind is Kind.MALLOC:
            if event.block in alive:
                raise BlockMisuse(f"event {index} allocates block {event.block}, which is allocated")
            nbytes = rounded_nbytes(event.nbytes, granule_nbytes)
            alive[event.block] = (nbytes, event.category)
            current[event.category] += nbytes
            total += nbytes
            if total > best[phase][0]:
                best[phase] = (total, tuple(current.items()), index)
        elif event.kind is not Kind.FREE_COMPLETED:
            if event.block not in alive:
                raise BlockMisuse(f"event {index} frees block {event.block}, which is not allocated")
            nbytes, category = alive.pop(event.block)
            current[category] -= nbytes
            total -= nbytes
    return tuple(
        Peak(phase=name, nbytes=nbytes, by_category=tuple((c, n) for c, n in split if n), event=at)
        for name, (nbytes, split, at) in best.items()
    )


def highest(peaks: Sequence[Peak]) -> Peak:
    """The peak of peaks: the first of the highest."""
    return max(peaks, key=lambda peak: (peak.nbytes, -peak.event))
