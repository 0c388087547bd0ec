"""The memory governor: gives freed heap back to the system before the budget is touched.

glibc keeps what torch frees (activations, fresh gradients), and each thread's arena keeps its own, so that resident
memory settles at the sum of the peaks of all phases instead of the largest. When this process's memory nears what the
budget allows on top of ``base``, free heap pages are returned with malloc_trim; below that, nothing is done and
nothing costs anything. It never limits anybody: that is what the pool and the plan do.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from overspill import _native
from overspill.train.malloc import map_large_blocks

__all__ = ["MemoryGovernor", "anonymous_nbytes"]

_STATM = Path("/proc/self/statm")
_WORTH_NBYTES = 16 * 1024 * 1024


def anonymous_nbytes() -> int | None:
    """Anonymous memory of this process, from /proc; None where there is no /proc."""
    try:
        fields = _STATM.read_bytes().split()
    except OSError:
        return None
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


class MemoryGovernor:
    """Watches one process.

    Args:
        limit_nbytes: anonymous memory that the process should stay under: base + budget.
        margin_nbytes: how near to the limit trimming starts; more than what one step of a backward allocates.
    """

    def __init__(self, limit_nbytes: int, margin_nbytes: int) -> None:
        self._threshold_nbytes = limit_nbytes - margin_nbytes
        self._floor_nbytes = 0
        map_large_blocks()
        self._descriptor = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC) if _STATM.exists() else -1

    def check(self) -> None:
        """Trim if memory is near the limit; called where the training thread passes anyway. About 5 µs."""
        if self._descriptor < 0:
            return
        fields = os.pread(self._descriptor, 128, 0).split()
        now = (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE
        # What a trim could not give back is in use; trimming again is worth it only for what came on top since.
        if now > max(self._threshold_nbytes, self._floor_nbytes + _WORTH_NBYTES):
            _native.malloc_trim()
            self._floor_nbytes = anonymous_nbytes() or 0
        elif now < self._floor_nbytes:
            self._floor_nbytes = now

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
