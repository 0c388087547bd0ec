"""Moving a byte range between a buffer and an open file, whatever the alignment of either.

With O_DIRECT, offsets and lengths are multiples of 4 KiB and addresses of 512 B: what is aligned goes straight
from or to the caller's memory, in requests of bounded length, and only ragged edges bounce through one of a few
scratch buffers. Without O_DIRECT everything goes straight. No files, versions or checksums here.
"""

from __future__ import annotations

import mmap
import queue
import threading
from pathlib import Path
from typing import Final

import numpy as np

from overspill.errors import OverspillError
from overspill.tiers.disk.fileio import FileIO, disk_error
from overspill.tiers.disk.layout import ALIGN_NBYTES

__all__ = ["ADDRESS_ALIGN_NBYTES", "Transfer"]

ADDRESS_ALIGN_NBYTES: Final = 512
SCRATCH_NBYTES: Final = 1024 * 1024
SCRATCH_LIMIT: Final = 4
STUCK_LIMIT: Final = 3


class Scratch:
    """At most four page-aligned buffers of 1 MiB, made when first needed and lent out one at a time."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[mmap.mmap] = queue.LifoQueue()
        self._permits = threading.Semaphore(SCRATCH_LIMIT)
        self._made = 0

    @property
    def nbytes(self) -> int:
        """Memory held, for the caller's accounts."""
        return self._made * SCRATCH_NBYTES

    def borrow(self) -> mmap.mmap:
        self._permits.acquire()
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            self._made += 1
            return mmap.mmap(-1, SCRATCH_NBYTES)

    def give_back(self, buffer: mmap.mmap) -> None:
        self._idle.put(buffer)
        self._permits.release()


class Transfer:
    """Reads and writes for one store. Safe from several threads on ranges that do not overlap."""

    def __init__(self, io: FileIO, request_nbytes: int) -> None:
        assert request_nbytes > 0 and request_nbytes % ALIGN_NBYTES == 0
        self.io = io
        self.request_nbytes = request_nbytes
        self.scratch = Scratch()
        self._edges = threading.Lock()  # two writers may share the page at which their ranges meet

    def read(self, fd: int, path: Path, offset_nbytes: int, buffer: memoryview, *, direct: bool) -> None:
        """Fill ``buffer``. Raises OVS404 when the file ends too early, OVS403 when the disk fails."""
        done = 0
        while done < len(buffer):
            if not direct or _aligned(buffer, done, offset_nbytes + done):
                length = min(len(buffer) - done, self.request_nbytes)
                if direct:
                    length -= length % ALIGN_NBYTES
                done += self._pread(fd, path, buffer[done : done + length], offset_nbytes + done)
            else:
                done += self._read_bounced(fd, path, offset_nbytes + done, buffer[done:])

    def write(
        self, fd: int, path: Path, offset_nbytes: int, buffer: memoryview, *, direct: bool, end_nbytes: int
    ) -> None:
        """Write all of ``buffer``. ``end_nbytes``: the slot's true length; what lies behind it is padding."""
        done = 0
        while done < len(buffer):
            if not direct or _aligned(buffer, done, offset_nbytes + done):
                length = min(len(buffer) - done, self.request_nbytes)
                if direct:
                    length -= length % ALIGN_NBYTES
                done += self._pwrite(fd, path, buffer[done : done + length], offset_nbytes + done)
            else:
                done += self._write_bounced(fd, path, offset_nbytes + done, buffer[done:], end_nbytes)

    def _read_bounced(self, fd: int, path: Path, offset_nbytes: int, buffer: memoryview) -> int:
        skip = offset_nbytes % ALIGN_NBYTES
        length = min(len(buffer), SCRATCH_NBYTES - skip)
        scratch = self.scratch.borrow()
        try:
            with memoryview(scratch) as whole:
                self._read_pages(fd, path, whole[: _page_end(skip + length)], offset_nbytes - skip)
                buffer[:length] = whole[skip : skip + length]
        finally:
            self.scratch.give_back(scratch)
        return length

    def _write_bounced(self, fd: int, path: Path, offset_nbytes: int, buffer: memoryview, end_nbytes: int) -> int:
        skip = offset_nbytes % ALIGN_NBYTES
        length = min(len(buffer), SCRATCH_NBYTES - skip)
        pages = _page_end(skip + length)
        start = offset_nbytes - skip
        keeps_tail = offset_nbytes + length < min(start + pages, end_nbytes)
        scratch = self.scratch.borrow()
        try:
            with memoryview(scratch) as whole:
                if skip or keeps_tail:
                    with self._edges:
                        if skip:
                            self._read_pages(fd, path, whole[:ALIGN_NBYTES], start)
                        if keeps_tail and (pages > ALIGN_NBYTES or not skip):
                            last = pages - ALIGN_NBYTES
                            self._read_pages(fd, path, whole[last:pages], start + last)
                        whole[skip : skip + length] = buffer[:length]
                        self._write_pages(fd, path, whole[:pages], start)
                else:
                    whole[:length] = buffer[:length]
                    whole[length:pages] = bytes(pages - length)
                    self._write_pages(fd, path, whole[:pages], start)
        finally:
            self.scratch.give_back(scratch)
        return length

    def _read_pages(self, fd: int, path: Path, pages: memoryview, offset_nbytes: int) -> None:
        done = stuck = 0
        while done < len(pages):
            nbytes = self._pread(fd, path, pages[done:], offset_nbytes + done)
            done += nbytes - nbytes % ALIGN_NBYTES
            stuck = stuck + 1 if nbytes < ALIGN_NBYTES else 0
            if stuck > STUCK_LIMIT:
                raise _truncated(path, offset_nbytes + done + nbytes)

    def _write_pages(self, fd: int, path: Path, pages: memoryview, offset_nbytes: int) -> None:
        done = stuck = 0
        while done < len(pages):
            nbytes = self._pwrite(fd, path, pages[done:], offset_nbytes + done)
            done += nbytes - nbytes % ALIGN_NBYTES
            stuck = stuck + 1 if nbytes < ALIGN_NBYTES else 0
            if stuck > STUCK_LIMIT:
                raise OverspillError("OVS403", "The disk writes less than a page at a time.", field=str(path))

    def _pread(self, fd: int, path: Path, buffer: memoryview, offset_nbytes: int) -> int:
        try:
            nbytes = self.io.pread(fd, buffer, offset_nbytes)
        except OSError as error:
            raise disk_error(error, path, "read state") from error
        if nbytes == 0:
            raise _truncated(path, offset_nbytes)
        return nbytes

    def _pwrite(self, fd: int, path: Path, buffer: memoryview, offset_nbytes: int) -> int:
        try:
            return self.io.pwrite(fd, buffer, offset_nbytes)
        except OSError as error:
            raise disk_error(error, path, "write state", need_nbytes=len(buffer)) from error


def _truncated(path: Path, offset_nbytes: int) -> OverspillError:
    seen = f"ends at byte {offset_nbytes}"
    return OverspillError("OVS404", f"The state file {path} is truncated.", field=str(path), value=seen)


def _page_end(nbytes: int) -> int:
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES


def _aligned(buffer: memoryview, done: int, offset_nbytes: int) -> bool:
    """At least one page can go straight from here."""
    if offset_nbytes % ALIGN_NBYTES or len(buffer) - done < ALIGN_NBYTES:
        return False
    address = int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])
    return (address + done) % ADDRESS_ALIGN_NBYTES == 0
