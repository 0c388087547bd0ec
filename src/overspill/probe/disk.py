"""What the disk under a directory can do: file system, free space, O_DIRECT, hard links, and measured speeds.

The speed test writes and reads one file of its own with O_DIRECT, a few large requests in flight, for a fraction of a
second, and removes it. It is a look, not a benchmark (that is benchmarks/disk.py); without O_DIRECT it measures
nothing, since it would measure the page cache.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from overspill.files import SCRATCH_PREFIX
from overspill.machine import Disk

__all__ = ["SPEED_TEST_NBYTES", "nearest_existing", "probe_disk"]

SPEED_TEST_NBYTES = 256 * 1024 * 1024
_REQUEST_NBYTES = 4 * 1024 * 1024
_THREADS = 4


def probe_disk(directory: str | Path, *, measure: bool = True, speed_test_nbytes: int = SPEED_TEST_NBYTES) -> Disk:
    """The disk that ``directory`` is, or will be, on. Directories that do not exist yet are not made.

    measure: also test its speed, with at most a tenth of the free space.
    """
    at = nearest_existing(Path(directory))
    _remove_left_over(at)
    free = shutil.disk_usage(at).free
    direct = links = False
    rates = (0.0, 0.0, 0.0)
    if os.access(at, os.W_OK | os.X_OK):
        prefix = f"{SCRATCH_PREFIX}{socket.gethostname()}-{os.getpid()}-"
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=prefix, dir=at) as scratch:
            direct, links = _takes_direct(Path(scratch)), _takes_links(Path(scratch))
            nbytes = min(speed_test_nbytes, free // 10) // _REQUEST_NBYTES * _REQUEST_NBYTES
            if measure and direct and nbytes >= 2 * _REQUEST_NBYTES:
                rates = _speeds(Path(scratch) / "speed", nbytes)
    return Disk(
        directory=str(directory),
        filesystem=_filesystem(at),
        free_nbytes=free,
        odirect=direct,
        hard_links=links,
        read_bytes_per_s=rates[0],
        write_bytes_per_s=rates[1],
        mixed_bytes_per_s=rates[2],
    )


def _remove_left_over(at: Path) -> None:
    """What a probe that was killed on this host has left there."""
    prefix = f"{SCRATCH_PREFIX}{socket.gethostname()}-"
    for scratch in at.glob(f"{prefix}*"):
        owner = scratch.name.removeprefix(prefix).split("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(scratch, ignore_errors=True)


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest parent that is a directory."""
    here = path.expanduser().absolute()
    while not here.is_dir():
        here = here.parent
    return here


def _filesystem(path: Path) -> str:
    """The type of the mount that holds the path, from /proc/self/mounts: the longest mount point that is a parent."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            fields = line.split()
            mount = Path(fields[1].replace("\\040", " "))
            if (mount == path or mount in path.parents) and len(mount.parts) >= best:
                best, kind = len(mount.parts), fields[2]
    return kind


def _takes_direct(scratch: Path) -> bool:
    """Whether a 4 KiB write with O_DIRECT works: tmpfs and some overlays refuse it, at open or at the first write."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return False
    try:
        with _opened(scratch / "direct", os.O_RDWR | os.O_CREAT | direct) as file, mmap.mmap(-1, 4096) as page:
            return os.pwrite(file, page, 0) == 4096
    except OSError:
        return False


def _takes_links(scratch: Path) -> bool:
    try:
        (scratch / "one").touch()
        (scratch / "two").hardlink_to(scratch / "one")
        return (scratch / "one").stat().st_nlink == 2
    except OSError:
        return False


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _speeds(path: Path, nbytes: int) -> tuple[float, float, float]:
    """(read, write, mixed) bytes per second; mixed counts both directions. The file is written once untimed, so that
    its blocks are allocated as a store's preallocated ones are."""
    offsets = range(0, nbytes, _REQUEST_NBYTES)
    with (
        _opened(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT) as file,
        contextlib.ExitStack() as stack,
        ThreadPoolExecutor(_THREADS) as threads,  # last, so that its threads have ended before their pages go
    ):
        pages = [stack.enter_context(mmap.mmap(-1, _REQUEST_NBYTES)) for _ in range(_THREADS)]
        for page in pages:
            page.write(os.urandom(4096) * (_REQUEST_NBYTES // 4096))

        def read(worker: int, offset: int) -> int:
            return os.preadv(file, [pages[worker]], offset)

        def write(worker: int, offset: int) -> int:
            return os.pwrite(file, pages[worker], offset)

        def run(worker: int, kind: str) -> int:
            moved = 0
            for index, offset in enumerate(offsets[worker::_THREADS]):
                reads = kind == "read" or (kind == "mixed" and index % 2 == 0)
                moved += (read if reads else write)(worker, offset)
            return moved

        def timed(kind: str) -> float:
            start = time.perf_counter()
            moved = sum(threads.map(run, range(_THREADS), [kind] * _THREADS))
            return float(round(moved / (time.perf_counter() - start)))

        timed("write")
        return timed("read"), timed("write"), timed("mixed")
