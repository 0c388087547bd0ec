"""Runs a command in a memory control group of its own, so that the kernel holds it to a limit, swap off.

The kernel counts what the group's processes touched first: their anonymous pages, page tables and stacks, and file
pages that nobody had in memory before. Pages of libraries that other processes have read are not the group's; so a
process that measures itself takes anonymous memory from its own status and file memory from the group.
Control groups of version 1 (``/sys/fs/cgroup/memory``), as root; `missing` says why there are none.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["MemoryGroup", "file_nbytes_here", "limit_here", "missing"]

ROOT = Path("/sys/fs/cgroup/memory")
_numbers = itertools.count()


def missing() -> str | None:
    """Why no memory group can be made here; None when one can."""
    if not (ROOT / "memory.limit_in_bytes").exists():
        return "there is no memory control group of version 1 at /sys/fs/cgroup/memory"
    probe = ROOT / f"overspill-probe-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        return f"{ROOT} is not writable: {error.strerror}"
    if len(Path("/proc/swaps").read_text().splitlines()) > 1 and not (ROOT / "memory.memsw.limit_in_bytes").exists():
        return "swap is on and the kernel does not count it, so a limit would only make it slow"
    return None


def limit_here(group: Path, nbytes: int) -> None:
    """Set a group's limit, memory with swap; may be called from inside of it."""
    (group / "memory.limit_in_bytes").write_text(str(nbytes))
    swap = group / "memory.memsw.limit_in_bytes"
    if swap.exists():
        swap.write_text(str(nbytes))


def file_nbytes_here(group: Path) -> int:
    """Mapped file pages that are charged to the group."""
    rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(rows["mapped_file"])


class MemoryGroup:
    """A fresh group; it ends with the processes in it."""

    def __init__(self) -> None:
        self.path = ROOT / f"overspill-test-{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()

    def run(
        self, command: Sequence[str], *, env: dict[str, str], cwd: Path, timeout_seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the group. A process that the kernel ended for memory has return code -9."""
        joining = ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *command]
        return subprocess.run(
            joining, capture_output=True, text=True, env=env, cwd=cwd, timeout=timeout_seconds, check=False
        )

    @property
    def peak_nbytes(self) -> int:
        return int((self.path / "memory.max_usage_in_bytes").read_text())

    @property
    def kills(self) -> int:
        """Processes that the kernel ended because the limit was reached."""
        rows = dict(line.split() for line in (self.path / "memory.oom_control").read_text().splitlines())
        return int(rows["oom_kill"])

    def close(self) -> None:
        for _ in range(200):  # data workers end a moment after their parent
            try:
                self.path.rmdir()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise AssertionError(f"processes are left in {self.path}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
