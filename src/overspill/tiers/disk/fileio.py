"""Every system call of the disk store, in one small class that a test can record, fail or cut short.

Nothing here knows of slots or manifests. Syncs and renames carry a label that names their call site, so
that the power-loss test can remove one of them and must then find the loss (the idea is from SQLite's test
VFS and ALICE, Pillai et al., OSDI 2014). The other place where errors of the system become errors with a code.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overspill.errors import OverspillError
from overspill.files import TOO_MANY_FILES
from overspill.units import format_nbytes

__all__ = ["NO_DIRECT", "NO_LINK", "FileIO", "IOCounters", "disk_error", "read_file", "write_file"]

_NO_SPACE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_PERMISSION: Final = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}
NO_DIRECT: Final = {errno.EINVAL, errno.EOPNOTSUPP}
"""How a file system says that it has no O_DIRECT."""
NO_LINK: Final = {errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EINVAL}
"""How a file system says that it has no hard link here: EPERM on FAT, EXDEV between two file systems, …"""


@dataclass
class IOCounters:
    """What went through the layer so far. ``bytes_*`` are what the kernel moved, padding included."""

    bytes_read: int = 0
    bytes_written: int = 0


class FileIO:
    """The real thing: each method is one system call, and counts what it moved. Safe to call from several threads.

    Python retries a call that a signal interrupted (PEP 475). Short reads and writes are the caller's to finish.
    """

    def __init__(self) -> None:
        self.counters = IOCounters()
        self._counting = threading.Lock()

    # files
    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pread(self, fd: int, buffer: memoryview, offset_nbytes: int) -> int:
        """Bytes read into ``buffer``; 0 at the end of the file."""
        nbytes = os.preadv(fd, [buffer], offset_nbytes)
        with self._counting:
            self.counters.bytes_read += nbytes
        return nbytes

    def pwrite(self, fd: int, buffer: memoryview, offset_nbytes: int) -> int:
        """Bytes written from ``buffer``, perhaps fewer than it holds."""
        nbytes = os.pwrite(fd, buffer, offset_nbytes)
        with self._counting:
            self.counters.bytes_written += nbytes
        return nbytes

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserve the blocks now, so that a full disk shows now; the file is ``nbytes`` long afterwards."""
        os.posix_fallocate(fd, 0, nbytes)

    def map_read_only(self, fd: int, nbytes: int) -> mmap.mmap:
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)

    def lock(self, fd: int, *, shared: bool = False) -> bool:
        """Take the advisory lock without waiting; False when another open file holds it."""
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    # durability
    def fdatasync(self, fd: int, label: str) -> None:
        """Data, and the size and extents needed to read it back, are on the device when this returns."""
        os.fdatasync(fd)

    def fsync(self, fd: int, label: str) -> None:
        os.fsync(fd)

    def sync_directory(self, path: Path, label: str) -> None:
        """Names made, renamed or removed in ``path`` are on the device when this returns."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # names
    def rename(self, source: Path, target: Path, label: str) -> None:
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        target.hardlink_to(source)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def mkdir(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def rmdir(self, path: Path) -> None:
        path.rmdir()

    # questions
    def names(self, path: Path) -> list[str]:
        """Sorted names in a directory; empty where there is none."""
        try:
            return sorted(entry.name for entry in path.iterdir())
        except FileNotFoundError:
            return []

    def status(self, path: Path) -> os.stat_result:
        return path.lstat()

    def exists(self, path: Path) -> bool:
        """Raises OverspillError OVS402 or OVS403 where that cannot be known, as below a closed directory."""
        try:
            self.status(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise disk_error(error, path, "look at this path") from error
        return True

    def free_nbytes(self, path: Path) -> int:
        """What this user may still write on the file system that holds ``path``."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize


def disk_error(error: OSError, path: Path, doing: str, *, need_nbytes: int | None = None) -> OverspillError:
    """The OverspillError for a system call that failed on ``path`` while ``doing`` (an infinitive)."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _NO_SPACE:
        need = f", which needs {format_nbytes(need_nbytes)}" if need_nbytes is not None else ""
        return OverspillError("OVS401", f"There is no space left to {doing}{need}.", field=str(path), value=reason)
    if error.errno in _NO_PERMISSION:
        return OverspillError("OVS402", f"The system refused to {doing}.", field=str(path), value=reason)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        sentence = f"The system gave no file descriptor to {doing}."
        return OverspillError("OVS403", sentence, field=str(path), value=reason, next_step=TOO_MANY_FILES)
    if error.errno == errno.ENOENT:
        return OverspillError("OVS404", f"A file is missing: could not {doing}.", field=str(path), value=reason)
    return OverspillError("OVS403", f"The disk failed to {doing}.", field=str(path), value=reason)


def read_file(io: FileIO, path: Path, doing: str) -> bytes:
    """A small file. Raises OVS404 where it is missing, OVS402 or OVS403."""
    try:
        fd = io.open(path, os.O_RDONLY)
    except OSError as error:
        raise disk_error(error, path, doing) from error
    try:
        data = bytearray(io.status(path).st_size)
        done = 0
        while done < len(data):
            nbytes = io.pread(fd, memoryview(data)[done:], done)
            if nbytes == 0:
                break
            done += nbytes
    except OSError as error:
        raise disk_error(error, path, doing) from error
    finally:
        io.close(fd)
    return bytes(data[:done])


def write_file(io: FileIO, path: Path, data: bytes, label: str) -> None:
    """A small file, whole and synced. Raises OVS401, OVS402 or OVS403."""
    fd = -1
    try:
        fd = io.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        done = 0
        while done < len(data):
            done += io.pwrite(fd, memoryview(data)[done:], done)
        io.fsync(fd, label)
    except OSError as error:
        raise disk_error(error, path, f"write {path.name}", need_nbytes=len(data)) from error
    finally:
        if fd >= 0:
            io.close(fd)
