"""Room for a store: is there enough, reserve it now, and give back what a killed run left.

A full disk is an error when a run is planned, not after a night of training: need and free bytes are compared
per file system, and every file that the run will ever use is preallocated.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from overspill.errors import OverspillError
from overspill.tiers.disk.fileio import NO_DIRECT, FileIO, disk_error
from overspill.tiers.disk.layout import ALIGN_NBYTES, Root, SlotSpec, file_number, padded
from overspill.tiers.disk.pool import FilePool
from overspill.tiers.disk.transfer import ADDRESS_ALIGN_NBYTES
from overspill.units import format_nbytes

__all__ = [
    "adopt",
    "check_space",
    "files_needed",
    "free_reserve",
    "hold_reserve",
    "make_directories",
    "probe_direct",
    "reserve",
]

PROBE: Final = "probe.tmp"
RESERVE: Final = "reserve.bin"


def make_directories(io: FileIO, wanted: Sequence[Path]) -> None:
    """Make each directory, parents included, for this user only, and sync the names. Raises OVS402 or OVS401."""
    parents: dict[Path, None] = {}
    for path in wanted:
        missing = [path, *path.parents]
        missing = missing[: next((i for i, parent in enumerate(missing) if io.exists(parent)), len(missing))]
        for directory in reversed(missing):
            try:
                io.mkdir(directory)
            except OSError as error:
                raise disk_error(error, directory, "make the directory") from error
            parents[directory.parent] = None
        if not path.is_dir():
            raise OverspillError("OVS402", "This path is not a directory.", field=str(path))
    for parent in parents:
        try:
            io.sync_directory(parent, "new-directory")
        except OSError as error:
            raise disk_error(error, parent, "sync the directory") from error


def files_needed(specs: Sequence[SlotSpec], places: Sequence[int], copies: int) -> Counter[tuple[int, int]]:
    """How many files of each (root, length) hold ``copies`` of the state: (versions + pins) of them."""
    need: Counter[tuple[int, int]] = Counter()
    for spec, place in zip(specs, places, strict=True):
        need[place, padded(spec.nbytes)] += copies
    return need


def check_space(io: FileIO, roots: Sequence[Root], need: Counter[tuple[int, int]], copies: int) -> None:
    """Compare with what is free on each file system. Raises OVS401 with the two figures and what they are made of."""
    need_by_device: Counter[int] = Counter()
    path_by_device: dict[int, Path] = {}
    for (root, nbytes), count in need.items():
        device = io.status(roots[root].path).st_dev
        need_by_device[device] += nbytes * count
        path_by_device.setdefault(device, roots[root].path)
    for device, need_nbytes in need_by_device.items():
        path = path_by_device[device]
        free_nbytes = io.free_nbytes(path)
        if need_nbytes > free_nbytes:
            state = format_nbytes(need_nbytes / copies)
            raise OverspillError(
                "OVS401",
                f"The store needs {format_nbytes(need_nbytes)} here ({copies} copies of {state} of state: the "
                f"committed version, the one in work, and checkpoints kept); {format_nbytes(free_nbytes)} are free.",
                field=str(path),
                value=f"{need_nbytes} bytes",
                limit=f"{free_nbytes} bytes",
            )


def reserve(pool: FilePool, need: Counter[tuple[int, int]]) -> None:
    """Preallocate until the pool has ``need`` spares. Raises OVS401; files made so far stay with the pool."""
    for (root, nbytes), count in need.items():
        while pool.count_spares(root, nbytes) < count:
            pool.keep(pool.create(root, nbytes))


def hold_reserve(io: FileIO, directory: Path, nbytes: int) -> None:
    """Space for one manifest, so that a disk which others have filled cannot stop a commit. Raises OVS401."""
    path = directory / RESERVE
    fd = -1
    try:
        fd = io.open(path, os.O_RDWR | os.O_CREAT)
        io.allocate(fd, nbytes)
    except OSError as error:
        raise disk_error(error, path, "reserve space", need_nbytes=nbytes) from error
    finally:
        if fd >= 0:
            io.close(fd)


def free_reserve(io: FileIO, directory: Path) -> bool:
    """Give the reserve up for the manifest that is being written; False when it is gone already."""
    try:
        io.unlink(directory / RESERVE)
    except OSError:
        return False
    return True


def probe_direct(io: FileIO, root: Root, note: Callable[[str], None]) -> bool:
    """Whether files here can be written past the page cache; if not, says so once."""
    path = root.slots / PROBE
    fd = -1
    page = mmap.mmap(-1, 2 * ALIGN_NBYTES)
    try:
        fd = io.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)
        with memoryview(page) as whole:
            odd = whole[ADDRESS_ALIGN_NBYTES : ADDRESS_ALIGN_NBYTES + ALIGN_NBYTES]
            io.pwrite(fd, odd, 0)
            io.pread(fd, odd, 0)
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise disk_error(error, path, "write here") from error
        note(f"{root.path}: this file system has no O_DIRECT; state passes through the page cache")
        return False
    finally:
        if fd >= 0:
            io.close(fd)
        with suppress(OSError):
            io.unlink(path)
    return True


def adopt(
    pool: FilePool, roots: Sequence[Root], used: set[Path], need: Counter[tuple[int, int]], since_ns: int
) -> list[str]:
    """Sort the files that no manifest names: spares as far as ``need`` goes, the rest removed.

    Returns those written after ``since_ns``: the working versions of a run that was killed.
    """
    written_since: list[str] = []
    left = Counter(need)
    for index, root in enumerate(roots):
        try:
            for name in pool.io.names(root.slots):
                path, number = root.slots / name, file_number(name)
                if number is not None:
                    pool.skip_number(number)
                if path in used or pool.is_spare(path):
                    continue
                status = pool.io.status(path)
                if status.st_mtime_ns > since_ns:
                    written_since.append(str(path))
                key = (index, status.st_size)
                if number is not None and status.st_nlink == 1 and left[key] > 0:
                    left[key] -= 1
                    pool.keep(pool.known(index, number, status.st_size))
                else:
                    pool.io.unlink(path)
        except OSError as error:
            raise disk_error(error, root.slots, "reclaim files of an earlier run") from error
    return written_since
