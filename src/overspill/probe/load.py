"""How many cores other processes take, from /proc/stat: a speed that is measured beside them is theirs too.

It looks at two instants and changes nothing. A container sees the whole machine's figures, which is what its cores
are shared with.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

__all__ = ["OthersLoad"]

_IDLE = (3, 4)  # of the fields of the first line: idle, iowait
_COUNTED = 8  # user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user and nice


class OthersLoad:
    """Begins to watch when it is made; ``root``: a test gives a directory that looks like /."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._file = root / "proc/stat"
        self._busy_seconds, self._own_seconds, self._began = self._now()

    def cores(self) -> float | None:
        """Cores that others took since, on average; None where /proc/stat cannot be read."""
        busy, own, now = self._now()
        if busy is None or self._busy_seconds is None or now <= self._began:
            return None
        return max(0.0, (busy - self._busy_seconds - (own - self._own_seconds)) / (now - self._began))

    def _now(self) -> tuple[float | None, float, float]:
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        busy = None
        with contextlib.suppress(OSError, ValueError, IndexError):
            ticks = [int(word) for word in self._file.read_text().splitlines()[0].split()[1 : 1 + _COUNTED]]
            busy = sum(n for i, n in enumerate(ticks) if i not in _IDLE) / os.sysconf("SC_CLK_TCK")
        return busy, own, time.monotonic()
