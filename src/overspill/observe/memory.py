"""How much memory this process really holds, from /proc: the measurement that a budget is compared with.

Anonymous and shared memory are what a memory budget is about; mapped files can be dropped by the kernel at any
time and are left out. Peaks inside a step (activations, logits) are short, so a thread looks every 20 ms; VmHWM would
be exact but counts mapped files and never falls. (train/governor.py asks a cheaper file, which cannot tell shared
memory from mapped files, for anonymous memory alone.)
"""

from __future__ import annotations

import threading
from pathlib import Path

__all__ = ["MemorySampler", "anonymous_and_shared_nbytes"]

_STATUS = Path("/proc/self/status")
INTERVAL_SECONDS = 0.02


def anonymous_and_shared_nbytes() -> int:
    """Resident anonymous plus shared memory of this process, bytes. 0 where there is no /proc."""
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    total = 0
    for line in text.splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += int(line.split()[1]) * 1024
    return total


class MemorySampler:
    """The highest ``anonymous_and_shared_nbytes()`` seen since `start`, above ``base_nbytes``."""

    def __init__(self, base_nbytes: int) -> None:
        self.base_nbytes = base_nbytes
        self.peak_nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="overspill-memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def now_nbytes(self) -> int:
        now = max(0, anonymous_and_shared_nbytes() - self.base_nbytes)
        self.peak_nbytes = max(self.peak_nbytes, now)
        return now

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_SECONDS):
            _ = self.now_nbytes

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=1.0)
