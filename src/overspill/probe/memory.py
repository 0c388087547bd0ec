"""What memory this process may use: the machine's, its cgroup's, what is free, and how fast DRAM is.

Reads /proc and /sys only. A container sees the host's figures in /proc/meminfo; the limit that kills it is its
cgroup's, so that one wins (cgroup v2: memory.max up the tree; v1: memory.limit_in_bytes). It changes no limit.
"""

from __future__ import annotations

import contextlib
import resource
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Memory", "measure_matmul", "measure_memory", "pinned_limit", "read_memory"]

_UNLIMITED_V1 = 1 << 60  # cgroup v1 writes "no limit" as the largest multiple of a page below 2^63


@dataclass(frozen=True, slots=True)
class Memory:
    """total: of the machine, or the cgroup's limit where that is smaller. limited_by: which cgroup file said so."""

    total_nbytes: int
    available_nbytes: int
    limited_by: str | None
    swap_nbytes: int


def read_memory(root: Path = Path("/")) -> Memory:
    """Memory as seen under ``root`` (a test gives a directory that looks like one)."""
    info = _meminfo(root)
    total, available = info.get("MemTotal", 0), info.get("MemAvailable", info.get("MemFree", 0))
    limit, used, source = _cgroup(root)
    if limit is not None and limit < total:
        return Memory(limit, max(0, min(available, limit - used)), source, info.get("SwapTotal", 0))
    return Memory(total, available, None, info.get("SwapTotal", 0))


def _meminfo(root: Path) -> dict[str, int]:
    fields: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if words and words[0].isdigit():
                fields[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return fields


def _cgroup(root: Path) -> tuple[int | None, int, str | None]:
    """(limit, bytes used that cannot be given back, file) of the tightest cgroup that this process is in."""
    tightest: tuple[int | None, int, str | None] = (None, 0, None)
    for directory, limit_name, used_name in _cgroup_directories(root):
        limit = _number(directory / limit_name)
        if limit is None or limit >= _UNLIMITED_V1:
            continue
        if tightest[0] is None or limit < tightest[0]:
            # The page cache counts as used but is given back under pressure.
            cache = _stat(directory / "memory.stat", ("inactive_file", "total_inactive_file"))
            used = max(0, (_number(directory / used_name) or 0) - cache)
            tightest = (limit, used, str(directory / limit_name))
    return tightest


def _cgroup_directories(root: Path) -> list[tuple[Path, str, str]]:
    found: list[tuple[Path, str, str]] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        here = mount / path.lstrip("/")
        # Inside a container the path may not exist under the mount; the mount itself is then the container's own.
        levels = [here, *here.parents] if here.is_dir() else [mount]
        found += [(level, *names) for level in levels if level == mount or mount in level.parents]
    return found


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(file: Path, names: tuple[str, ...]) -> int:
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in names:
                return int(value)
    return 0


def pinned_limit() -> int | None:
    """RLIMIT_MEMLOCK in bytes; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def measure_memory(nbytes: int = 64 * 1024 * 1024, rounds: int = 3) -> float:
    """Bytes per second read and written by one copying thread, best of ``rounds``; both directions counted."""
    source = np.ones(nbytes // 8)
    target = np.zeros(nbytes // 8)
    best = min(_timed(lambda: np.copyto(target, source)) for _ in range(rounds))
    return float(round(2 * source.nbytes / best))


def measure_matmul(size: int = 768, rounds: int = 3) -> float:
    """fp32 FLOPs per second of a matrix product on all threads of numpy's BLAS, best of ``rounds``."""
    left = np.ones((size, size), dtype=np.float32)
    best = min(_timed(lambda: left @ left) for _ in range(rounds))
    return 2 * size**3 / best


def _timed(work: object) -> float:
    assert callable(work)
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)
