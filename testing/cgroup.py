"""Runs a command in a memory control group of its own, so that the kernel holds it to a limit, swap off.

The kernel counts what the group's processes touched first: their anonymous pages, page tables and stacks, and file
pages that nobody had in memory before. Pages of libraries that other processes have read are not the group's; so a
process that measures itself takes anonymous memory from its own status and file memory from the group.
Control groups of version 1 (``/sys/fs/cgroup/memory``) and 2 (``/sys/fs/cgroup``, from Linux 5.19), as root;
`missing` says why there are none.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["MemoryGroup", "limit_here", "missing", "reset_peak_here", "use_here"]

MOUNT = Path("/sys/fs/cgroup")
_numbers = itertools.count()


@dataclass(frozen=True)
class _Names:
    """What a version calls the files of a group and the rows in them."""

    limit: str
    peak: str
    kills: str
    mapped: str
    kinds: tuple[str, ...]  # rows of memory.stat that say what is held


_V1 = _Names(
    limit="memory.limit_in_bytes",
    peak="memory.max_usage_in_bytes",
    kills="memory.oom_control",
    mapped="mapped_file",
    kinds=("rss", "cache", "mapped_file", "shmem"),
)
_V2 = _Names(
    limit="memory.max",
    peak="memory.peak",
    kills="memory.events",
    mapped="file_mapped",
    kinds=("anon", "file", "file_mapped", "shmem"),
)


def _names(group: Path) -> _Names:
    return _V2 if (group / _V2.limit).exists() else _V1


def _rows(file: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split() for line in file.read_text().splitlines())}


def _parent(mount: Path) -> Path | None:
    """Where groups are made: under the memory controller of version 1 if it is mounted, else of version 2."""
    if (mount / "memory" / _V1.limit).exists():
        return mount / "memory"
    controllers = mount / "cgroup.controllers"
    return mount if controllers.exists() and "memory" in controllers.read_text().split() else None


def missing(mount: Path = MOUNT, swaps: Path = Path("/proc/swaps")) -> str | None:
    """Why no memory group can be made here; None when one can."""
    parent = _parent(mount)
    if parent is None:
        return f"there is no memory control group of version 1 or 2 at {mount}"
    probe = parent / f"overspill-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError as error:
        return f"{parent} is not writable: {error.strerror}"
    try:
        return _lacking(parent, probe, swaps)
    finally:
        probe.rmdir()


def _lacking(parent: Path, group: Path, swaps: Path) -> str | None:
    if parent.name != "memory":
        if not (group / _V2.limit).exists():
            return f"{parent}/cgroup.subtree_control does not hand memory down to groups"
        if not (group / _V2.peak).exists():
            return "the kernel keeps no memory.peak; it is there from Linux 5.19"
    swap_is_on = len(swaps.read_text().splitlines()) > 1
    if swap_is_on and not any((group / name).exists() for name in ("memory.swap.max", "memory.memsw.limit_in_bytes")):
        return "swap is on and the kernel does not count it, so a limit would only make it slow"
    return None


def limit_here(group: Path, nbytes: int) -> None:
    """Set a group's limit, no swap beside it; may be called from inside of it."""
    (group / _names(group).limit).write_text(str(nbytes))
    # Version 1 limits memory and swap together, version 2 swap alone.
    for name, most in (("memory.memsw.limit_in_bytes", nbytes), ("memory.swap.max", 0)):
        if (group / name).exists():
            (group / name).write_text(str(most))


def reset_peak_here(group: Path) -> None:
    """Begin the peak anew. Version 2 cannot for all readers: there it stays that of the group's whole life."""
    if _names(group) is _V1:
        (group / _V1.peak).write_text("0")


def use_here(group: Path) -> dict[str, int]:
    """What the group holds by kind, as its version names them; `mapped`: file pages that are mapped."""
    names, rows = _names(group), _rows(group / "memory.stat")
    return {"mapped": rows[names.mapped], **{kind: rows[kind] for kind in names.kinds}}


class MemoryGroup:
    """A fresh group; it ends with the processes in it."""

    def __init__(self, mount: Path = MOUNT) -> None:
        parent = _parent(mount)
        assert parent is not None, missing(mount)
        self.path = parent / f"overspill-test-{os.getpid()}-{next(_numbers)}"
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
        return int((self.path / _names(self.path).peak).read_text())

    @property
    def kills(self) -> int:
        """Processes that the kernel ended because the limit was reached."""
        return _rows(self.path / _names(self.path).kills)["oom_kill"]

    @property
    def limit_hits(self) -> int:
        """How often the group was at its limit and the kernel had to take pages back."""
        if _names(self.path) is _V1:
            return int((self.path / "memory.failcnt").read_text())
        return _rows(self.path / _V2.kills)["max"]

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
