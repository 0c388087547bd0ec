"""Whose state lies in a directory on another disk: a small file in it that names the store's home.

A copy of a run's directory names the same directories in ``plan.directories`` as its original, and without this file
both would write there, each over the other's steps. An owner stays the owner as long as its path holds that run; a run
that was moved, or a copy whose original is gone, takes the directory over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from overspill.errors import OverspillError
from overspill.files import parse_json
from overspill.tiers.disk.fileio import FileIO, disk_error, read_file, write_file
from overspill.tiers.disk.layout import ROOT_PREFIX
from overspill.tiers.disk.lock import LOCK, Locks
from overspill.tiers.disk.manifest import MANIFEST, PREPARED, Manifest, read_manifest

__all__ = [
    "CREATING",
    "OWNER",
    "OWNER_NEW",
    "Owner",
    "claim",
    "distant_roots",
    "name_owner",
    "noted_creation",
    "own_roots",
    "read_owner",
    "refuse_other",
]

CREATING: Final = "creating.json"
OWNER: Final = "owner.json"
OWNER_NEW: Final = "owner.json.new"
FORMAT: Final = "overspill-owner"


@dataclass(frozen=True)
class Owner:
    """The store whose manifest lies in ``home``."""

    home: Path
    run_id: str


def read_owner(io: FileIO, root: Path) -> Owner | None:
    """None where no store has named itself. Raises OverspillError OVS404 for a file that says nothing."""
    path = root / OWNER
    if not io.exists(path):
        return None
    try:
        facts = parse_json(read_file(io, path, "read whose state this is"), odd_texts=True)
        if facts["format"] != FORMAT:
            raise ValueError(f"its format is {facts['format']}")
        return Owner(Path(facts["home"]), str(facts["run_id"]))
    except (ValueError, KeyError, TypeError) as error:
        raise OverspillError(
            "OVS404",
            f"The file that names the owner of this state is damaged ({type(error).__name__}).",
            field=str(path),
            next_step="Remove the file if only one run keeps its state in this directory, then try again.",
        ) from error


def refuse_other(io: FileIO, roots: Iterable[Path], home: Path) -> None:
    """Raises OverspillError OVS408 where another directory than ``home`` owns one of ``roots`` and still holds it."""
    for root in roots:
        there = read_owner(io, root)
        if there is not None and not _same(there.home, home) and _still_owns(io, there):
            raise OverspillError(
                "OVS408",
                f"The state in {root} belongs to {there.home}, and {home} is a copy of that; two runs cannot share it.",
                next_step=f"Go on with {there.home}. To drop the copy, remove its directory by hand. The copy takes "
                f"the state over once {there.home} is moved away; `overspill runs rm` there would delete the state.",
            )


def claim(io: FileIO, locks: Locks, roots: Sequence[Path], home: Path) -> None:
    """Lock the directories on other disks. Raises OVS408 where another run owns one, OVS405 where a process uses it."""
    refuse_other(io, roots, home)  # names the other run, of which the lock would only name the process
    for root in roots:
        locks.take(root / LOCK)
    refuse_other(io, roots, home)  # from here on it cannot change


def name_owner(io: FileIO, roots: Sequence[Path], owner: Owner, note: Callable[[str], None]) -> None:
    """Durably name ``owner`` in each of ``roots``, which are locked, and say which were another path's before."""
    for root in roots:
        there = read_owner(io, root)
        if there is not None and there.run_id == owner.run_id and _same(there.home, owner.home):
            continue
        data = json.dumps({"format": FORMAT, "home": str(owner.home), "run_id": owner.run_id}) + "\n"
        new = root / OWNER_NEW
        write_file(io, new, data.encode(), "owner")
        try:
            io.rename(new, root / OWNER, "owner")
            io.sync_directory(root, "owner-name")
        except OSError as error:
            raise disk_error(error, root, "name the owner of this state") from error
        if there is not None and not _same(there.home, owner.home):
            note(f"{root}: this state was of {there.home}, which no longer holds the run; {owner.home} took it over")


def distant_roots(manifest: Manifest, *, pin: bool = False) -> list[Path]:
    """The store's directories on other disks. ``pin``: the manifest is a checkpoint's, whose links lie deeper there."""
    named = [Path(name) for name in manifest.directories]
    return [path.parent.parent if pin else path for path in named if path.is_absolute()]


def own_roots(io: FileIO, home: Path, directories: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """All of a store's directories on other disks, for its removal: those that are its own, and those that may be.

    They are found through its manifests, its checkpoints' included, and in ``directories`` through the file that names
    the owner, so that a damaged manifest leaves none behind. Raises OVS408 where another directory owns one.
    """
    begun = set(noted_creation(home))
    named = set(begun)
    run_ids: set[str] = set()
    for manifest, pin in _manifests(io, home):
        named.update(distant_roots(manifest, pin=pin))
        run_ids.add(manifest.run_id)
    beside = {place / name for place in directories for name in io.names(place) if name.startswith(ROOT_PREFIX)}
    own, perhaps = [], []
    for root in sorted(named | beside):
        if not root.name.startswith(ROOT_PREFIX) or not io.exists(root):
            continue  # whatever a forged manifest names, only what a store makes is removed
        there = read_owner(io, root)
        if there is None:
            own += [root] if root in named else []
            perhaps += [root] if root not in named and not run_ids else []
        elif there.run_id in run_ids or root in begun:
            refuse_other(io, [root], home)
            own.append(root)
        elif not run_ids and _same(there.home, home):
            perhaps.append(root)  # or an earlier run's at this path, which lives elsewhere now
    return own, perhaps


def noted_creation(home: Path) -> list[Path]:
    """Directories on other disks that a creation has made whose store does not stand yet; see creation.py."""
    with suppress(OSError, ValueError, TypeError):
        return [Path(name) for name in parse_json((home / CREATING).read_bytes(), odd_texts=True)]
    return []


def _manifests(io: FileIO, home: Path) -> Iterable[tuple[Manifest, bool]]:
    """Those that can be read in a store's home, and whether each is a checkpoint's."""
    checkpoints = home / "checkpoints"
    places = [(home / MANIFEST, False), (home / PREPARED, False)]
    places += [(checkpoints / name / MANIFEST, True) for name in io.names(checkpoints)]
    for path, pin in places:
        with suppress(OverspillError):
            if io.exists(path):
                yield read_manifest(io, path), pin


def _still_owns(io: FileIO, owner: Owner) -> bool:
    """The directory is there and holds that run. One that cannot be read counts: it may be mended, its state not."""
    if not io.exists(owner.home):
        return False
    run_ids = {manifest.run_id for manifest, _ in _manifests(io, owner.home)}
    return not run_ids or owner.run_id in run_ids


def _same(one: Path, other: Path) -> bool:
    try:
        return one == other or one.samefile(other)
    except OSError:
        return False
