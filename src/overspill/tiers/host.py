"""The host pool: memory under a hard budget, accounted by state class.

Every byte that a session owns is allocated here; what torch takes from malloc (activations, scratch) is reserved
here without being mapped. Allocation beyond the budget is refused with the class, the need and the limit; nothing
is ever taken back silently. This is no allocator for small, short-lived things: a session allocates when it starts.

[Note: Fork] A forked DataLoader worker shares pages copy-on-write; the owner's next update would then copy every
page of weights, gradients and state once more. So a child inherits the addresses without the pages
(MADV_WIPEONFORK), and there they may not be touched: a read is a fault, not a zero. Leaving the addresses out
(MADV_DONTFORK) would be wrong: the child's malloc maps its own memory there, and the garbage collector then unmaps it
with the parent's object. Using the pool in a child raises OVS503.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from overspill import _native
from overspill.errors import OverspillError
from overspill.plan import StateClass
from overspill.units import format_nbytes

__all__ = ["PAGE_NBYTES", "Allocation", "HostPool"]

PAGE_NBYTES = mmap.PAGESIZE
_HUGE_PAGE_NBYTES = 2 * 1024 * 1024
_MADV_WIPEONFORK = 18  # linux/mman.h, from 4.14 on; Python's mmap does not name it


@dataclass(frozen=True, eq=False)
class Allocation:
    """Page-aligned memory of the pool. ``buffer`` is writable; ``nbytes`` is what the budget was charged."""

    buffer: Any  # anything with the buffer protocol: an anonymous mapping, or a pinned tensor's memory
    nbytes: int
    state_class: StateClass
    name: str


class HostPool:
    """Memory with a limit. Thread-safe.

    Args:
        limit_nbytes: the budget; allocations and reservations together never exceed it.
        map_memory: makes ``nbytes`` of writable, page-aligned memory; anonymous pages, unless a device wants them
            pinned.
    """

    def __init__(self, limit_nbytes: int, *, map_memory: Callable[[int, StateClass], Any] | None = None) -> None:
        self.limit_nbytes = limit_nbytes
        self._map_memory = map_memory or (lambda nbytes, _state_class: map_anonymous(nbytes))
        self._lock = threading.Lock()
        self._held: dict[StateClass, int] = {}
        self._owner_pid = os.getpid()

    def allocate(self, nbytes: int, state_class: StateClass, name: str) -> Allocation:
        """Map ``nbytes``, rounded up to pages and zeroed. Raises OverspillError: OVS301 beyond the budget, OVS503."""
        rounded = max(1, -(-nbytes // PAGE_NBYTES)) * PAGE_NBYTES
        self._charge(rounded, state_class, name)
        try:
            buffer = self._map_memory(rounded, state_class)
        except (OSError, MemoryError) as error:
            self._discharge(rounded, state_class)
            raise OverspillError(
                "OVS302",
                f"The machine refused {format_nbytes(rounded)} for {name}: {error}.",
                field="plan.memory",
                value=format_nbytes(self.limit_nbytes),
            ) from None
        return Allocation(buffer, rounded, state_class, name)

    def reserve(self, nbytes: int, state_class: StateClass, name: str) -> None:
        """Charge the budget for memory that others allocate. Raises OverspillError OVS301 beyond the budget."""
        self._charge(nbytes, state_class, name)

    def free(self, allocation: Allocation) -> None:
        """Give an allocation's budget back; its pages go when the last view of them goes."""
        self._discharge(allocation.nbytes, allocation.state_class)

    def held_nbytes_by_class(self) -> dict[str, int]:
        with self._lock:
            return {str(name): nbytes for name, nbytes in self._held.items() if nbytes}

    @property
    def held_nbytes(self) -> int:
        with self._lock:
            return sum(self._held.values())

    @property
    def free_nbytes(self) -> int:
        return self.limit_nbytes - self.held_nbytes

    def _charge(self, nbytes: int, state_class: StateClass, name: str) -> None:
        if os.getpid() != self._owner_pid:
            raise OverspillError("OVS503", "The memory pool was used in a forked child.", field=name)
        with self._lock:
            held = sum(self._held.values())
            if held + nbytes > self.limit_nbytes:
                by_class = ", ".join(f"{key} {format_nbytes(value)}" for key, value in self._held.items() if value)
                raise OverspillError(
                    "OVS301",
                    f"{name} ({state_class}) needs {format_nbytes(nbytes)}, but only "
                    f"{format_nbytes(self.limit_nbytes - held)} of the memory budget is left"
                    f"{' beside ' + by_class if by_class else ''}.",
                    field="plan.memory",
                    value=format_nbytes(self.limit_nbytes),
                    next_step=f"Raise plan.memory to {format_nbytes(held + nbytes)} or more, or move state to disk.",
                )
            self._held[state_class] = self._held.get(state_class, 0) + nbytes

    def _discharge(self, nbytes: int, state_class: StateClass) -> None:
        with self._lock:
            self._held[state_class] -= nbytes
            assert self._held[state_class] >= 0, "memory was given back twice"


_regions: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def map_anonymous(nbytes: int) -> mmap.mmap:
    """Private zero pages that a forked child does not inherit, on huge pages where the kernel has them."""
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(_MADV_WIPEONFORK)  # see [Note: Fork]
    _regions.add(region)
    if nbytes >= _HUGE_PAGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages; only speed depends on it
            region.madvise(mmap.MADV_HUGEPAGE)
    return region


def _forbid_in_child() -> None:
    for region in list(_regions):
        with contextlib.suppress(ValueError):  # closed
            _native.forbid_access(region)


os.register_at_fork(after_in_child=_forbid_in_child)
