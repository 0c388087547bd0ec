"""Power loss, replayed: record what a store asks of the file system, then cut it at any point.

The model is stricter than any one file system. Data of a file is safe after fdatasync or fsync of that file; a name
(made, linked, renamed, removed) is safe after fsync of its directory; until then each 4 KiB page of each write and
each change of each directory may be there or not, independently of the others. A rename within one directory is
atomic. Nothing here knows what a store means by its files (after ALICE, Pillai et al., OSDI 2014).
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overspill.tiers.disk.fileio import FileIO

PAGE_NBYTES = 4096
Image = dict[Path, tuple[int, bytes | None]]
"""A tree: for each path, parents first, its node and its content (None: a directory)."""


@dataclass(frozen=True)
class Op:
    """One entry of the log. ``node``: the file or directory; ``entries``: what names become (None: gone)."""

    kind: str  # write, resize, names, sync, mark
    node: int = 0
    offset: int = 0
    data: bytes = b""
    entries: tuple[tuple[str, int | None], ...] = ()
    is_directory: tuple[int, ...] = ()
    label: str = ""
    mark: Any = None


class RecordingIO(FileIO):
    """Does everything for real below ``root`` (except waiting for the device) and keeps the log.

    ``links=False``: a file system without hard links.
    """

    def __init__(self, root: Path, *, links: bool = True) -> None:
        super().__init__()
        self.root = root
        self.links = links
        self.log: list[Op] = []
        self._names: dict[int, dict[str, int]] = {0: {}}
        self._nodes = 1
        self._node_by_fd: dict[int, int] = {}

    def mark(self, mark: Any) -> None:
        """A note from the scenario, in its place in the log."""
        self.log.append(Op("mark", mark=mark))

    def _find(self, path: Path) -> tuple[int, str, int | None]:
        """(directory, name, node) of ``path``."""
        node, parts = 0, path.relative_to(self.root).parts
        for part in parts[:-1]:
            node = self._names[node][part]
        return node, parts[-1], self._names[node].get(parts[-1])

    def _directory(self, path: Path) -> int:
        if path == self.root:
            return 0
        node = self._find(path)[2]
        assert node is not None
        return node

    def _set(
        self, directory: int, label: str, *entries: tuple[str, int | None], is_directory: tuple[int, ...] = ()
    ) -> None:
        for name, node in entries:
            if node is None:
                self._names[directory].pop(name)
            else:
                self._names[directory][name] = node
        self.log.append(Op("names", directory, entries=entries, is_directory=is_directory, label=label))

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        directory, name, node = self._find(path)
        if node is None:
            node = self._nodes
            self._nodes += 1
            self._set(directory, "create", (name, node))
        if flags & os.O_TRUNC:
            self.log.append(Op("resize", node, offset=0))
        self._node_by_fd[fd] = node
        return fd

    def close(self, fd: int) -> None:
        del self._node_by_fd[fd]
        super().close(fd)

    def pwrite(self, fd: int, buffer: memoryview, offset_nbytes: int) -> int:
        nbytes = super().pwrite(fd, buffer, offset_nbytes)
        self.log.append(Op("write", self._node_by_fd[fd], offset_nbytes, bytes(buffer[:nbytes])))
        return nbytes

    def allocate(self, fd: int, nbytes: int) -> None:
        super().allocate(fd, nbytes)
        self.log.append(Op("resize", self._node_by_fd[fd], offset=nbytes))

    def fdatasync(self, fd: int, label: str) -> None:
        self.log.append(Op("sync", self._node_by_fd[fd], label=label))

    def fsync(self, fd: int, label: str) -> None:
        self.log.append(Op("sync", self._node_by_fd[fd], label=label))

    def sync_directory(self, path: Path, label: str) -> None:
        self.log.append(Op("sync", self._directory(path), label=label))

    def rename(self, source: Path, target: Path, label: str) -> None:
        super().rename(source, target, label)
        from_directory, from_name, node = self._find(source)
        to_directory, to_name, _ = self._find(target)
        assert node is not None
        if from_directory == to_directory:
            self._set(from_directory, label, (from_name, None), (to_name, node))
        else:
            self._set(to_directory, label, (to_name, node))
            self._set(from_directory, label, (from_name, None))

    def link(self, source: Path, target: Path) -> None:
        if not self.links:
            raise OSError(errno.EPERM, "no hard links here")
        super().link(source, target)
        node = self._find(source)[2]
        directory, name, _ = self._find(target)
        assert node is not None
        self._set(directory, "link", (name, node))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        directory, name, _ = self._find(path)
        self._set(directory, "unlink", (name, None))

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        directory, name, _ = self._find(path)
        node = self._nodes
        self._nodes += 1
        self._names[node] = {}
        self._set(directory, "mkdir", (name, node), is_directory=(node,))

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        directory, name, _ = self._find(path)
        self._set(directory, "rmdir", (name, None))


class UnsyncedIO(FileIO):
    """For looking at crash images: real, but never waits for the device."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return super().open(path, flags & ~os.O_DIRECT, mode)

    def fdatasync(self, fd: int, label: str) -> None:
        pass

    def fsync(self, fd: int, label: str) -> None:
        pass

    def sync_directory(self, path: Path, label: str) -> None:
        pass


@dataclass
class Chooser:
    """Which of the changes that are not safe survived. Each method answers for one page or one change of names."""

    name: str
    data: Callable[[], bool]
    names: Callable[[], bool]


def choosers(seed: int) -> list[Chooser]:
    """Everything, nothing, only data, only names, and two that toss a coin for each."""
    coins = [random.Random(seed), random.Random(seed + 1)]

    def coin(source: random.Random, chance: float) -> Callable[[], bool]:
        return lambda: source.random() < chance

    return [
        Chooser("all", lambda: True, lambda: True),
        Chooser("none", lambda: False, lambda: False),
        Chooser("only data", lambda: True, lambda: False),
        Chooser("only names", lambda: False, lambda: True),
        Chooser("coin", coin(coins[0], 0.5), coin(coins[0], 0.5)),
        Chooser("coin, mostly names", coin(coins[1], 0.3), coin(coins[1], 0.8)),
    ]


@dataclass
class Disk:
    """What is safe, and what is not yet, after a prefix of the log."""

    content: dict[int, bytearray] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    directories: set[int] = field(default_factory=lambda: {0})
    pending: dict[int, list[Op]] = field(default_factory=dict)

    def apply(self, op: Op) -> None:
        if op.kind == "sync":
            for change in self.pending.pop(op.node, []):
                if change.kind == "names":
                    _rename(self.names.setdefault(op.node, {}), change)
                else:
                    _modify(self.content.setdefault(op.node, bytearray()), change, lambda: True)
        elif op.kind != "mark":
            self.directories.update(op.is_directory)
            self.pending.setdefault(op.node, []).append(op)

    def image(self, chooser: Chooser) -> Image:
        """What is found after the power came back."""
        image: Image = {}
        self._collect(Path(), 0, chooser, image, {})
        return image

    def _collect(self, path: Path, node: int, chooser: Chooser, image: Image, files: dict[int, bytes]) -> None:
        entries = dict(self.names.get(node, {}))
        for change in self.pending.get(node, []):
            if chooser.names():
                _rename(entries, change)
        for name, child in entries.items():
            if child in self.directories:
                image[path / name] = child, None
                self._collect(path / name, child, chooser, image, files)
                continue
            if child not in files:
                content = bytearray(self.content.get(child, b""))
                for change in self.pending.get(child, []):
                    _modify(content, change, chooser.data)
                files[child] = bytes(content)
            image[path / name] = child, files[child]


def write_image(image: Image, root: Path) -> None:
    """Make the tree below the empty directory ``root``; one node under several names becomes hard links."""
    made: dict[int, Path] = {}
    for path, (node, content) in image.items():
        if content is None:
            (root / path).mkdir()
        elif node in made:
            (root / path).hardlink_to(made[node])
        else:
            (root / path).write_bytes(content)
            made[node] = root / path


def _rename(entries: dict[str, int], op: Op) -> None:
    for name, node in op.entries:
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _modify(content: bytearray, op: Op, survives: Callable[[], bool]) -> None:
    if op.kind == "resize":
        if survives():
            del content[op.offset :]
            content.extend(bytes(op.offset - len(content)))
        return
    for start in range(0, len(op.data), PAGE_NBYTES):
        if survives():
            page = op.data[start : start + PAGE_NBYTES]
            at = op.offset + start
            content.extend(bytes(max(at + len(page) - len(content), 0)))
            content[at : at + len(page)] = page


def replay(log: list[Op]) -> Iterator[tuple[int, Disk]]:
    """(cut, disk) for every point at which the power may go, the end included."""
    disk = Disk()
    yield 0, disk
    for index, op in enumerate(log):
        disk.apply(op)
        yield index + 1, disk


def without_sync(log: list[Op], label: str) -> list[Op]:
    """The log of a program that lacks the syncs of one call site."""
    return [op for op in log if not (op.kind == "sync" and op.label == label)]


def with_rename_earlier(log: list[Op], rename: str, sync: str) -> list[Op]:
    """The log of a program that does the labelled rename before the labelled sync, instead of after it."""
    mutant: list[Op] = []
    for op in log:
        if op.kind == "names" and op.label == rename:
            earlier = max(i for i, seen in enumerate(mutant) if seen.kind == "sync" and seen.label == sync)
            mutant.insert(earlier, op)
        else:
            mutant.append(op)
    return mutant


def with_rename_later(log: list[Op], rename: str, sync: str) -> list[Op]:
    """The log of a program that does the labelled rename, and the syncs around it, only after the next such sync."""
    mutant: list[Op] = []
    late: list[Op] = []
    for op in log:
        if op.kind == "names" and op.label == rename:
            late.append(op)
        else:
            mutant.append(op)
            if op.kind == "sync" and op.label == sync:
                mutant += late
                late = []
    return mutant + late
