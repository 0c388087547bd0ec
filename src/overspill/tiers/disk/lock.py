"""Who owns a store: an advisory lock on one file, which dies with its process.

The file's content (process id, host) is for people only; the lock is the kernel's. A forked child shares the
open file and would keep the lock alive after its parent's death, so the store closes it there (see fork.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Final

from overspill.errors import OverspillError
from overspill.tiers.disk.fileio import FileIO, disk_error

__all__ = ["LOCK", "Locks", "OwnerLock"]

LOCK: Final = "lock"
FACTS_NBYTES: Final = 512  # always as long, so that a shorter text needs no truncation


class OwnerLock:
    """Held from construction to ``release``. Raises OVS405 naming the owner's process, OVS402 without permission."""

    def __init__(self, io: FileIO, path: Path) -> None:
        self._io = io
        self.path = path
        try:
            self.fd = io.open(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise disk_error(error, path, "take the lock of the store") from error
        try:
            if not io.lock(self.fd):
                raise OverspillError(
                    "OVS405", "Another process uses this directory.", field=str(path.parent), value=self._owner()
                )
            facts = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).ljust(FACTS_NBYTES).encode()
            io.pwrite(self.fd, memoryview(facts), 0)
        except BaseException as error:
            io.close(self.fd)
            if isinstance(error, OSError):
                raise disk_error(error, path, "take the lock of the store") from error
            raise

    def _owner(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            facts = json.loads(os.pread(self.fd, FACTS_NBYTES, 0))
            return f"process {facts['pid']} on {facts['host']}"
        return "a process that did not leave its id"

    def release(self) -> None:
        if self.fd >= 0:
            self._io.close(self.fd)
            self.fd = -1


class Locks:
    """All locks of one store: its home's, and those of its directories on other disks. They go together."""

    def __init__(self, io: FileIO, path: Path) -> None:
        self._io = io
        self._held = [OwnerLock(io, path)]

    def take(self, path: Path) -> None:
        """One more. Raises as OwnerLock does."""
        self._held.append(OwnerLock(self._io, path))

    def fds(self) -> list[int]:
        return [lock.fd for lock in self._held if lock.fd >= 0]

    def release(self) -> None:
        for lock in self._held:
            lock.release()
