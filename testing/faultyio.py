"""A file system that misbehaves on request: errors at the n-th call, short transfers, no O_DIRECT, no hard links.

It is the real I/O layer with one thing wrong, so that the store under test is the real one too.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from overspill.tiers.disk.fileio import FileIO

__all__ = ["FaultyIO"]


class FaultyIO(FileIO):
    """``fail(kind, path)`` is asked before each call and may raise OSError; ``calls`` lists the kinds so far.

    short: reads and writes move at most this many bytes. direct, links: what the file system offers.
    """

    def __init__(
        self,
        fail: Callable[[str, Path], None] = lambda kind, path: None,
        *,
        short_nbytes: int | None = None,
        direct: bool = True,
        links: bool = True,
        free_nbytes: int | None = None,
    ) -> None:
        super().__init__()
        self.fail = fail
        self.short_nbytes = short_nbytes
        self.direct = direct
        self.links = links
        self.free = free_nbytes
        self.calls: list[str] = []
        self._path_by_fd: dict[int, Path] = {}

    def _call(self, kind: str, path: Path) -> None:
        self.calls.append(kind)
        self.fail(kind, path)

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self._call("open", path)
        if flags & os.O_DIRECT and not self.direct:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        fd = super().open(path, flags, mode)
        self._path_by_fd[fd] = path
        return fd

    def pread(self, fd: int, buffer: memoryview, offset_nbytes: int) -> int:
        self._call("read", self._path_by_fd[fd])
        return super().pread(fd, buffer[: self.short_nbytes], offset_nbytes)

    def pwrite(self, fd: int, buffer: memoryview, offset_nbytes: int) -> int:
        self._call("write", self._path_by_fd[fd])
        return super().pwrite(fd, buffer[: self.short_nbytes], offset_nbytes)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._call("allocate", self._path_by_fd[fd])
        super().allocate(fd, nbytes)

    def fdatasync(self, fd: int, label: str) -> None:
        self._call("sync", self._path_by_fd[fd])
        super().fdatasync(fd, label)

    def fsync(self, fd: int, label: str) -> None:
        self._call("sync", self._path_by_fd[fd])
        super().fsync(fd, label)

    def sync_directory(self, path: Path, label: str) -> None:
        self._call("sync", path)
        super().sync_directory(path, label)

    def rename(self, source: Path, target: Path, label: str) -> None:
        self._call("rename", target)
        super().rename(source, target, label)

    def link(self, source: Path, target: Path) -> None:
        self._call("link", target)
        if not self.links:
            raise OSError(errno.EPERM, "no hard links")
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self._call("unlink", path)
        super().unlink(path)

    def mkdir(self, path: Path) -> None:
        self._call("mkdir", path)
        super().mkdir(path)

    def free_nbytes(self, path: Path) -> int:
        return super().free_nbytes(path) if self.free is None else self.free


def at_call(number: int, error: int) -> Callable[[str, Path], None]:
    """Fail the ``number``-th call (from 0), whatever it is."""
    left = [number]

    def fail(kind: str, path: Path) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise OSError(error, os.strerror(error))

    return fail
