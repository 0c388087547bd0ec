"""Taking back what a creation made: of one that failed, and of one that was killed, by the next in that directory.

Until a store's first manifest nothing says which directories on other disks are its own, so they are noted first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from overspill.errors import OverspillError
from overspill.tiers.disk.fileio import FileIO, disk_error
from overspill.tiers.disk.layout import Root
from overspill.tiers.disk.lock import LOCK, OwnerLock
from overspill.tiers.disk.owner import CREATING, OWNER, OWNER_NEW, noted_creation, refuse_other

__all__ = ["note_creation", "remove_root", "undo_earlier_creation"]


def note_creation(io: FileIO, directory: Path, roots: Sequence[Root]) -> None:
    """Leave word of directories elsewhere, so that a creation that is killed can be undone by the next one."""
    path = directory / CREATING
    data = json.dumps([str(root.path) for root in roots if not root.at_home]).encode()
    try:
        fd = io.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            io.pwrite(fd, memoryview(data), 0)
        finally:
            io.close(fd)
    except OSError as error:
        raise disk_error(error, path, "write here") from error


def undo_earlier_creation(io: FileIO, directory: Path) -> None:
    """Remove what it made elsewhere, but for what another store owns or makes: ``directory`` may be a copy."""
    for root in noted_creation(directory):
        with suppress(OverspillError):
            refuse_other(io, [root], directory.resolve())
            lock = OwnerLock(io, root / LOCK)
            remove_root(io, root)
            lock.release()


def remove_root(io: FileIO, root: Path, *, keep: bool = False) -> None:
    with suppress(OSError):
        for name in io.names(root / "slots"):
            io.unlink(root / "slots" / name)
        io.rmdir(root / "slots")
        if not keep:
            io.rmdir(root / "checkpoints")
            for name in {OWNER, OWNER_NEW, LOCK} & set(io.names(root)):
                io.unlink(root / name)
            io.rmdir(root)
