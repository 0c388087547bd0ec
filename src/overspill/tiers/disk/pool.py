"""The slot files of a store: preallocated spares, files in use, and the descriptors open on them.

A file is handed out for a working version, becomes immutable when that is committed, and comes back when it is
superseded: as a spare if nothing else needs its bytes (no pin or link of the user's, no reader, no mapping),
else its name goes and its bytes stay with whoever holds them. Which version a file belongs to is not known here.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overspill.tiers.disk.fileio import FileIO, disk_error
from overspill.tiers.disk.layout import Root, file_name

__all__ = ["Descriptor", "FilePool", "SlotFile"]

DESCRIPTOR_LIMIT: Final = 128


@dataclass(eq=False)
class SlotFile:
    """A slot file by its current name. ``users``: calls in flight and mappings that need its bytes unchanged."""

    root: int
    number: int
    padded_nbytes: int
    path: Path
    users: int = 0
    named: bool = True


@dataclass(eq=False)
class Descriptor:
    """An open file and the calls that use it now; stale: to be closed by the last of them."""

    file: SlotFile
    fd: int
    users: int = 0
    stale: bool = False


class FilePool:
    """Safe from several threads. ``direct``: whether files are opened with O_DIRECT, per root."""

    def __init__(self, io: FileIO, roots: Sequence[Root]) -> None:
        self.io = io
        self.roots = roots
        self.direct = [False] * len(roots)
        self._next_number = 0
        self._spares: dict[tuple[int, int], list[SlotFile]] = {}
        self._unsynced_roots: set[int] = set()
        self._open: OrderedDict[SlotFile, Descriptor] = OrderedDict()
        self._held_without_name: dict[tuple[int, int], SlotFile] = {}  # by device and inode
        self._lock = threading.RLock()

    def known(self, root: int, number: int, padded_nbytes: int) -> SlotFile:
        """A file that exists already, found in a manifest or a directory."""
        self.skip_number(number)
        return SlotFile(root, number, padded_nbytes, self.roots[root].slots / file_name(number))

    def skip_number(self, number: int) -> None:
        """This number is, or was, a file's."""
        with self._lock:
            self._next_number = max(self._next_number, number + 1)

    def new_name(self, root: int, padded_nbytes: int) -> SlotFile:
        """A name never used before; the caller makes the file. Reuse could bring back a lost unlink's old bytes."""
        with self._lock:
            self._unsynced_roots.add(root)
            number = self._next_number
            self._next_number += 1
        return SlotFile(root, number, padded_nbytes, self.roots[root].slots / file_name(number))

    def create(self, root: int, padded_nbytes: int) -> SlotFile:
        """A fresh, preallocated file. Raises OVS401 when the disk is full."""
        file = self.new_name(root, padded_nbytes)
        fd = -1
        try:
            fd = self.io.open(file.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            self.io.allocate(fd, padded_nbytes)
        except OSError as error:
            if fd >= 0:
                with suppress(OSError):
                    self.io.unlink(file.path)
            raise disk_error(error, file.path, "preallocate a state file", need_nbytes=padded_nbytes) from error
        finally:
            if fd >= 0:
                self.io.close(fd)
        return file

    def take(self, root: int, padded_nbytes: int) -> SlotFile:
        """A file to be written from scratch: a spare, or a fresh one where none is left."""
        with self._lock:
            spares = self._spares.get((root, padded_nbytes), [])
            while spares:
                file = spares.pop()
                if self._links(file) == 1:
                    return file
                self._drop(file)  # somebody linked it meanwhile: those bytes are theirs now
        return self.create(root, padded_nbytes)

    def keep(self, file: SlotFile) -> None:
        """Put an unused file of this store among the spares."""
        with self._lock:
            self._spares.setdefault((file.root, file.padded_nbytes), []).append(file)

    def count_spares(self, root: int, padded_nbytes: int) -> int:
        return len(self._spares.get((root, padded_nbytes), ()))

    def is_held(self, status: os.stat_result) -> bool:
        """A call or a mapping of this process needs these bytes, though their name in ``slots/`` is gone."""
        with self._lock:
            file = self._held_without_name.get((status.st_dev, status.st_ino))
            return file is not None and file.users > 0

    def is_spare(self, path: Path) -> bool:
        return any(file.path == path for spares in self._spares.values() for file in spares)

    def release(self, file: SlotFile) -> None:
        """No version needs this file any more: recycle it, or give up its name where others hold its bytes."""
        with self._lock:
            if file.users == 0 and self._links(file) == 1:
                self.keep(file)
            else:
                self._drop(file)

    def sync_names(self, label: str) -> None:
        """Files made, or brought in, since the last call are in their directories for good."""
        with self._lock:
            roots, self._unsynced_roots = self._unsynced_roots, set()
        for root in sorted(roots):
            try:
                self.io.sync_directory(self.roots[root].slots, label)
            except OSError as error:
                with self._lock:
                    self._unsynced_roots |= roots
                raise disk_error(error, self.roots[root].slots, "sync the directory") from error

    def acquire(self, file: SlotFile) -> Descriptor:
        """An open descriptor on ``file``, whose bytes stay its own until ``done``. Idle ones are kept, up to 128."""
        with self._lock:
            entry = self._open.get(file)
            if entry is None:
                flags = os.O_RDWR | (os.O_DIRECT if self.direct[file.root] else 0)
                try:
                    entry = Descriptor(file, self.io.open(file.path, flags))
                except OSError as error:
                    raise disk_error(error, file.path, "open a state file") from error
                self._open[file] = entry
            self._open.move_to_end(file)
            entry.users += 1
            file.users += 1
            self._evict()
            return entry

    def done(self, entry: Descriptor) -> None:
        with self._lock:
            entry.users -= 1
            entry.file.users -= 1
            if entry.stale and entry.users == 0:
                self.io.close(entry.fd)

    def hold(self, file: SlotFile) -> None:
        """A mapping needs these bytes: the file is not recycled until ``let_go``."""
        with self._lock:
            file.users += 1

    def let_go(self, file: SlotFile) -> None:
        with self._lock:
            file.users -= 1
            held = self._held_without_name
            for key in [key for key, other in held.items() if other.users == 0]:
                del held[key]

    def close_descriptors(self) -> None:
        with self._lock:
            for file in list(self._open):
                self._close(file)

    def descriptors(self) -> list[int]:
        """Every open descriptor, without the lock: for the forked child, where no other thread exists."""
        return [entry.fd for entry in self._open.values()]

    def renew_lock(self) -> None:
        """In a forked child, where the thread that held the lock does not exist."""
        self._lock = threading.RLock()
        self._open.clear()

    def _evict(self) -> None:
        surplus = len(self._open) - DESCRIPTOR_LIMIT
        if surplus > 0:
            idle = [file for file, entry in self._open.items() if entry.users == 0]
            for file in idle[:surplus]:
                self._close(file)

    def _close(self, file: SlotFile) -> None:
        entry = self._open.pop(file, None)
        if entry is not None:
            entry.stale = True
            if entry.users == 0:
                self.io.close(entry.fd)

    def _links(self, file: SlotFile) -> int:
        try:
            return self.io.status(file.path).st_nlink
        except OSError as error:
            raise disk_error(error, file.path, "look at a state file") from error

    def _drop(self, file: SlotFile) -> None:
        self._close(file)
        if file.named:
            file.named = False
            try:
                if file.users > 0:
                    status = self.io.status(file.path)
                    self._held_without_name[status.st_dev, status.st_ino] = file
                self.io.unlink(file.path)
            except OSError as error:
                raise disk_error(error, file.path, "remove a state file") from error
