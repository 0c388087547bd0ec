"""Checkpoints as pins: a directory of hard links to the committed slot files, with a manifest of its own.

A pin appears whole or not at all: it is built under a hidden name, synced, and renamed. It goes the same way:
renamed to a hidden name, and only when that is on the device may its files be written again. Where hard links do
not work, files are copied, which is said once. Choosing which pins to keep is the caller's.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from overspill.errors import OverspillError
from overspill.tiers.disk.fileio import NO_LINK, FileIO, disk_error, write_file
from overspill.tiers.disk.layout import Root, check_name
from overspill.tiers.disk.manifest import MANIFEST, Manifest, SlotRow, encode, read_manifest
from overspill.tiers.disk.pool import FilePool, SlotFile
from overspill.tiers.disk.reader import StoreReader

__all__ = ["PinInfo", "Pins", "pin_names"]

BUILDING: Final = ".building-"
DROPPED: Final = ".dropped-"
COPY_NBYTES: Final = 1024 * 1024


@dataclass(frozen=True)
class PinInfo:
    """One checkpoint; ``step`` is None when its manifest cannot be read."""

    name: str
    path: Path
    step: int | None


def pin_names(io: FileIO, home: Path) -> list[str]:
    """The checkpoints that are listed in ``home``."""
    names = [name for name in io.names(home) if not name.startswith(".")]
    return [name for name in names if io.exists(home / name / MANIFEST)]


class Pins:
    """The checkpoints of one store. ``home``: where they are listed; links of other roots lie in those roots."""

    def __init__(
        self, io: FileIO, pool: FilePool, roots: Sequence[Root], home: Path, note: Callable[[str], None]
    ) -> None:
        self.io = io
        self.pool = pool
        self.home = home
        self._roots = roots
        self._note = note

    def path(self, name: str) -> Path:
        return self.home / check_name(name, "checkpoint")

    def names(self) -> list[str]:
        return pin_names(self.io, self.home)

    def listing(self) -> list[PinInfo]:
        """Oldest step first; damaged ones last."""
        pins = []
        for name in self.names():
            step: int | None = None
            with suppress(OverspillError):
                step = read_manifest(self.io, self.home / name / MANIFEST).step
            pins.append(PinInfo(name, self.home / name, step))
        return sorted(pins, key=lambda pin: (pin.step is None, pin.step or 0, pin.name))

    def newest_good(self) -> str | None:
        """The newest checkpoint whose every checksum matches: what is offered when the store is damaged."""
        for pin in reversed([pin for pin in self.listing() if pin.step is not None]):
            with suppress(OverspillError), StoreReader(pin.path, io=self.io) as reader:
                if reader.damage() is None:
                    return pin.name
        return None

    def pin(self, name: str, manifest: Manifest, files: Sequence[SlotFile | None]) -> Path:
        """Make checkpoint ``name`` of the committed ``manifest``; ``files``: of its rows."""
        path = self.path(name)
        if self.io.exists(path):
            return self._already(path, manifest)
        building = self.home / (BUILDING + name)
        places = [self._place(index, name, building) for index in range(len(self._roots))]
        try:
            self._remove_tree(building)
            self.io.mkdir(building)
            for place in places:
                if place != building:
                    self._remove_tree(place)
                    self.io.mkdir(place)
            rows = [self._add(row, file, places) for row, file in zip(manifest.rows, files, strict=True)]
            written_as = ["." if place == building else str(place) for place in places]
            document = encode(replace(manifest, rows=rows, directories=written_as))
            write_file(self.io, building / MANIFEST, document, "pin-manifest")
            for place in places:
                if place != building:
                    self.io.sync_directory(place, "pin-links-elsewhere")
                    self.io.sync_directory(place.parent, "pin-name-elsewhere")
            self.io.sync_directory(building, "pin-links")
            self.io.rename(building, path, "pin")
            self.io.sync_directory(self.home, "pin-name")
        except BaseException as error:
            with suppress(OSError, OverspillError):
                if self.io.exists(building):
                    self._reclaim(name, building, recycle=True)
            if isinstance(error, OSError):
                raise disk_error(error, path, "make a checkpoint") from error
            raise
        return path

    def unpin(self, name: str) -> None:
        """Drop a checkpoint. Its files become spares where nobody else holds their bytes."""
        path = self.path(name)
        if not self.io.exists(path / MANIFEST):
            raise OverspillError("OVS601", "There is no such checkpoint.", field=str(path))
        dropped = self.home / (DROPPED + name)
        try:
            recycle = self._unread(path)
            self._remove_tree(dropped)
            self.io.rename(path, dropped, "unpin")
            self.io.sync_directory(self.home, "unpin-name")
            self._reclaim(name, dropped, recycle=recycle)
        except OSError as error:
            raise disk_error(error, path, "drop a checkpoint") from error

    def clean_up(self) -> list[str]:
        """Remove what a killed run left half made or half dropped; returns what it found."""
        found: list[str] = []
        try:
            for hidden in self.io.names(self.home):
                for prefix in (BUILDING, DROPPED):
                    if hidden.startswith(prefix):
                        found.append(str(self.home / hidden))
                        recycle = self._unread(self.home / hidden)
                        self._reclaim(hidden.removeprefix(prefix), self.home / hidden, recycle=recycle)
            for root in self._roots:
                for name in () if root.at_home else self.io.names(root.pins):
                    if not self.io.exists(self.home / name / MANIFEST):
                        found.append(str(root.pins / name))
                        self._reclaim(name, None, recycle=True)
        except OSError as error:
            raise disk_error(error, self.home, "clean up checkpoints") from error
        return found

    def held_files(self, committed: set[Path]) -> Counter[tuple[int, int]]:
        """How many files of each (root, length) only checkpoints hold: what the reserve for pins is spent on."""
        held: Counter[tuple[int, int]] = Counter()
        try:
            statuses = [self.io.status(path) for path in committed if self.io.exists(path)]
            seen = {(status.st_dev, status.st_ino) for status in statuses}
            for name in self.names():
                for index, place in enumerate(self._place(i, name, self.home / name) for i in range(len(self._roots))):
                    for file in self.io.names(place):
                        status = self.io.status(place / file)
                        if file.endswith(".bin") and (status.st_dev, status.st_ino) not in seen:
                            seen.add((status.st_dev, status.st_ino))
                            held[index, status.st_size] += 1
        except OSError as error:
            raise disk_error(error, self.home, "look at the checkpoints") from error
        return held

    def bring_back(self, source: Path, root: int, padded_nbytes: int) -> SlotFile:
        """A slot file with a checkpoint's bytes: a link, or a copy where the file system has none."""
        file = self.pool.new_name(root, padded_nbytes)
        try:
            self.io.link(source, file.path)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise disk_error(error, file.path, "restore a checkpoint") from error
            self._say_copy(error)
            file = self.pool.take(root, padded_nbytes)
            try:
                self._copy(source, file.path, padded_nbytes, "restored-data")
            except OSError as copy_error:
                raise disk_error(copy_error, file.path, "restore a checkpoint", need_nbytes=padded_nbytes) from error
        return file

    def _place(self, root: int, name: str, building: Path) -> Path:
        return building if self._roots[root].at_home else self._roots[root].pins / name

    def _already(self, path: Path, manifest: Manifest) -> Path:
        with suppress(OverspillError):
            have = read_manifest(self.io, path / MANIFEST)
            same = [(row.spec.name, row.version) for row in have.rows]
            if have.step == manifest.step and same == [(row.spec.name, row.version) for row in manifest.rows]:
                digests = zip(have.rows, manifest.rows, strict=True)
                if all(_same_digests(one, other) for one, other in digests):
                    return path
        raise OverspillError(
            "OVS604",
            "There is a checkpoint of this name with another content.",
            field=str(path),
            next_step="Drop it first, or choose another name.",
        )

    def _add(self, row: SlotRow, file: SlotFile | None, places: Sequence[Path]) -> SlotRow:
        if file is None:
            return row
        target = places[row.directory] / file.path.name
        try:
            self.io.link(file.path, target)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            self._say_copy(error)
            spare = self.pool.take(file.root, file.padded_nbytes)
            try:
                self.io.rename(spare.path, target, "pin-copy")  # takes the space that was reserved for this copy
            except OSError:
                self.pool.keep(spare)
            self._copy(file.path, target, file.padded_nbytes, "pin-copy-data")
        return replace(row, file=target.name)

    def _copy(self, source: Path, target: Path, nbytes: int, label: str) -> None:
        buffer = mmap.mmap(-1, COPY_NBYTES)
        read_fd = write_fd = -1
        try:
            read_fd = self.io.open(source, os.O_RDONLY)
            write_fd = self.io.open(target, os.O_WRONLY | os.O_CREAT)
            self.io.allocate(write_fd, nbytes)
            with memoryview(buffer) as whole:
                done = 0
                while done < nbytes:
                    length = self.io.pread(read_fd, whole[: min(COPY_NBYTES, nbytes - done)], done)
                    if length == 0:
                        raise OverspillError("OVS404", f"The state file {source} is truncated.", field=str(source))
                    at = 0
                    while at < length:
                        at += self.io.pwrite(write_fd, whole[at:length], done + at)
                    done += length
            self.io.fdatasync(write_fd, label)
        finally:
            for fd in (read_fd, write_fd):
                if fd >= 0:
                    self.io.close(fd)

    def _say_copy(self, error: OSError) -> None:
        reason = os.strerror(error.errno or 0)
        self._note(f"{self.home}: no hard links to the state here ({reason}); checkpoints are copies and take time")

    def _unread(self, path: Path) -> bool:
        """Nobody has the checkpoint open, so its files may be written again."""
        try:
            fd = self.io.open(path / MANIFEST, os.O_RDONLY)
        except FileNotFoundError:
            return True
        try:
            return self.io.lock(fd)
        except OSError:  # no locks on this file system, so nobody can say that he reads
            return False
        finally:
            self.io.close(fd)

    def _reclaim(self, name: str, hidden: Path | None, *, recycle: bool) -> None:
        """Take the files of a checkpoint that is not listed any more. Files without another name become spares."""
        at_home = [index for index, root in enumerate(self._roots) if root.at_home]
        if hidden is not None:
            self._empty(hidden, at_home[0] if at_home else None, recycle=recycle)
        if self.io.exists(self.home / name / MANIFEST):
            return
        for index, root in enumerate(self._roots):
            if index not in at_home and self.io.exists(root.pins / name):
                self._empty(root.pins / name, index, recycle=recycle)

    def _empty(self, directory: Path, root: int | None, *, recycle: bool) -> None:
        for name in self.io.names(directory):
            path = directory / name
            status = self.io.status(path)
            free = status.st_nlink == 1 and not self.pool.is_held(status)
            if root is not None and recycle and name.endswith(".bin") and free:
                file = self.pool.new_name(root, status.st_size)
                with suppress(OSError):  # another file system: its space cannot serve the store
                    self.io.rename(path, file.path, "recycle")
                    self.pool.keep(file)
                    continue
            self._remove_tree(path)
        self.io.rmdir(directory)

    def _remove_tree(self, path: Path) -> None:
        if not self.io.exists(path):
            return
        if path.is_dir() and not path.is_symlink():
            for name in self.io.names(path):
                self._remove_tree(path / name)
            self.io.rmdir(path)
        else:
            self.io.unlink(path)


def _same_digests(one: SlotRow, other: SlotRow) -> bool:
    if one.digests is None or other.digests is None:
        return one.digests is other.digests
    return bool((one.digests == other.digests).all())
