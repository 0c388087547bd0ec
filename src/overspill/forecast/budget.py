"""A memory budget divided: what must be resident, the staging ring, and how much optimizer state the rest caches.

Formula `budget` of docs/theory/memory.md. It decides nothing that a user may choose; `planner` turns a division into
a Plan, or into an error when there is none. More budget never puts more on disk; a property test says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from overspill.forecast.state import TrainingState

__all__ = ["CHUNK_NUMEL", "Division", "divide", "smallest_budget"]

CHUNK_NUMEL: Final = 1024 * 1024  # elements; 4 MiB a request and class in fp32 (docs/decisions/0002-disk-store.md)
SMALLEST_CHUNK_NUMEL: Final = 64 * 1024  # 256 KiB a request in fp32; a choice, not measured
_CHUNK_STEP_NUMEL: Final = 2048
FEWEST_BUFFERS: Final = 4  # one being read, one waiting, one in the kernel, one being written
#: More buffers hide more: figures in docs/theory/architecture.md, "Sizes that were chosen".
WANTED_BUFFERS: Final = 16
#: The staging ring's share of what is free, when a budget is too small for the wanted one.
STAGING_SHARE: Final = 4

Wish = Literal["auto", "host", "disk", "mixed"]


@dataclass(frozen=True, slots=True)
class Division:
    """resident: weights, gradients and the reserve. cached_numel: elements whose optimizer state stays in DRAM."""

    resident_nbytes: int
    staging_nbytes: int
    chunk_numel: int
    cached_numel: int
    numel: int

    @property
    def disk_fraction(self) -> float:
        return 0.0 if self.numel == 0 else (self.numel - self.cached_numel) / self.numel


def resident_nbytes(state: TrainingState, reserve_nbytes: int) -> int:
    return state.weights_nbytes + state.gradients_nbytes + reserve_nbytes


def smallest_budget(state: TrainingState, reserve_nbytes: int, wish: Wish, disk_fraction: float | None) -> int:
    """The least memory with which `divide` finds a division."""
    resident = resident_nbytes(state, reserve_nbytes)
    per_element = state.per_element.optimizer
    everything = state.numel * per_element
    ring = min(everything, FEWEST_BUFFERS * _chunk_of(state, SMALLEST_CHUNK_NUMEL) * per_element)
    if wish == "host" or (wish == "mixed" and disk_fraction == 0):
        return resident + everything
    if wish == "mixed" and disk_fraction is not None:
        return resident + round((1 - disk_fraction) * state.numel) * per_element + ring
    return resident + ring


def divide(
    state: TrainingState, reserve_nbytes: int, budget_nbytes: int, wish: Wish, disk_fraction: float | None = None
) -> Division | None:
    """The division of a budget, or None when it is below `smallest_budget`.

    Invariants: resident + staging + cached state ≤ budget; cached_numel grows with the budget.
    """
    per_element = state.per_element.optimizer
    resident = resident_nbytes(state, reserve_nbytes)
    free = budget_nbytes - resident
    if free < 0:
        return None
    everything = Division(resident, 0, CHUNK_NUMEL, state.numel, state.numel)
    if per_element == 0 or state.numel == 0:
        return everything
    fits_whole = state.numel * per_element <= free
    if wish == "host" or (wish == "mixed" and disk_fraction == 0):
        return everything if fits_whole else None
    if fits_whole and (wish == "auto" or (wish == "mixed" and disk_fraction is None)):
        return everything

    if wish == "disk":
        wanted = 0
    elif wish == "mixed" and disk_fraction is not None:
        wanted = round((1 - disk_fraction) * state.numel)
    else:
        wanted = None  # as much as fits
    for_ring = free if wanted is None else free - wanted * per_element
    smallest = min(FEWEST_BUFFERS * _chunk_of(state, SMALLEST_CHUNK_NUMEL), state.numel) * per_element
    largest = WANTED_BUFFERS * CHUNK_NUMEL * per_element
    if for_ring < smallest:
        return None
    # The ring takes its share of what is free; of a small budget, all that it needs.
    ring = min(max(for_ring // STAGING_SHARE if wanted is None else for_ring, smallest), largest)
    chunk = min(ring // (FEWEST_BUFFERS * per_element), CHUNK_NUMEL) // _CHUNK_STEP_NUMEL * _CHUNK_STEP_NUMEL
    chunk = _chunk_of(state, max(chunk, _CHUNK_STEP_NUMEL))
    staging = min(WANTED_BUFFERS, ring // (chunk * per_element)) * chunk * per_element
    cached = (free - ring) // per_element if wanted is None else wanted
    return Division(resident, staging, chunk, min(cached, state.numel), state.numel)


def _chunk_of(state: TrainingState, numel: int) -> int:
    """No chunk is larger than the largest block."""
    return min(numel, max(state.block_numels, default=_CHUNK_STEP_NUMEL))
