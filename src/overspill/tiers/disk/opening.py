"""Making a store and opening one: everything that happens before the first read or write.

Creation refuses early (space, permission, in use); opening finds the last committed step, checks it, and takes
back what a killed run left. Nothing is removed before the committed step has been read and verified.
"""

from __future__ import annotations

import mmap
import os
import uuid
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from overspill.errors import OverspillError
from overspill.tiers.disk.creation import note_creation, remove_root, undo_earlier_creation
from overspill.tiers.disk.fileio import FileIO, disk_error
from overspill.tiers.disk.layout import ROOT_PREFIX, Root, SlotSpec, check_match, file_number, padded, spread
from overspill.tiers.disk.lock import LOCK, Locks
from overspill.tiers.disk.manifest import MANIFEST, PREPARED, Manifest, SlotRow, read_manifest
from overspill.tiers.disk.owner import CREATING, Owner, claim, distant_roots, name_owner
from overspill.tiers.disk.pins import Pins, pin_names
from overspill.tiers.disk.pool import FilePool
from overspill.tiers.disk.reader import StoreReader, find_damage, row_path
from overspill.tiers.disk.space import (
    RESERVE,
    adopt,
    check_space,
    files_needed,
    make_directories,
    probe_direct,
    reserve,
)
from overspill.tiers.disk.version import Version

__all__ = ["Parts", "SlotState", "add_states", "forget_creation", "map_committed", "new_parts", "old_parts"]


@dataclass(eq=False)
class SlotState:
    """One slot and its versions, newest last: committed (immutable), prepared (durable), working."""

    spec: SlotSpec
    root: int
    padded_nbytes: int
    committed: Version | None = None
    prepared: Version | None = None
    working: Version | None = None
    mapping: tuple[Version, weakref.ref[mmap.mmap]] | None = None


class Notes(list[str]):
    """Fallbacks taken, each said once."""

    def say(self, text: str) -> None:
        if text not in self:
            self.append(text)


@dataclass
class Parts:
    """What a store is put together from."""

    io: FileIO
    directory: Path
    locks: Locks
    roots: list[Root]
    pool: FilePool
    pins: Pins
    manifest: Manifest
    states: dict[str, SlotState]
    notes: Notes
    reclaimed: list[str] = field(default_factory=list)


def new_parts(
    io: FileIO,
    directory: Path,
    slots: Sequence[SlotSpec],
    *,
    identity: Mapping[str, Any],
    copies: tuple[int, int],
    directories: Sequence[Path],
    weights: Sequence[float],
    checkpoints: Path | None,
    piece_nbytes: int,
) -> Parts:
    """An empty store's parts, with every file preallocated; the first manifest is still to be written."""
    home = checkpoints or directory / "checkpoints"
    make_directories(io, [directory])
    locks = Locks(io, directory / LOCK)
    try:
        if io.exists(directory / MANIFEST):
            raise OverspillError(
                "OVS604",
                "There is a store in this directory.",
                field=str(directory),
                next_step="Pass resume=True to go on with it, or choose another directory.",
            )
        if names := pin_names(io, home):
            raise OverspillError(
                "OVS604",
                f"There are checkpoints of another store here, the first: {names[0]}.",
                field=str(home),
                next_step="Go on from one of them (`overspill resume RUN --from NAME`), or choose another directory.",
            )
        run_id = uuid.uuid4().hex
        roots = [Root(path / f"{ROOT_PREFIX}{run_id[:12]}", at_home=False) for path in directories if path != directory]
        if len(roots) < len(directories) or not directories:
            place = list(directories).index(directory) if directories else 0
            roots.insert(place, Root(directory, at_home=True))
        undo_earlier_creation(io, directory)
        note_creation(io, directory, roots)
        elsewhere = [root for root in roots if not root.at_home]
        make_directories(io, [home, *(root.pins for root in elsewhere), *(root.slots for root in roots)])
        notes = Notes()
        owner = Owner(directory.resolve(), run_id)
        claim(io, locks, [root.path for root in elsewhere], owner.home)
        name_owner(io, [root.path for root in elsewhere], owner, notes.say)
        pool = FilePool(io, roots)
        pins = Pins(io, pool, roots, home, notes.say)
        states = _new_states(slots, spread([slot.nbytes for slot in slots], list(weights) or [1.0] * len(roots)))
        parts = Parts(io, directory, locks, roots, pool, pins, _empty(run_id), states, notes)
        adopt(pool, roots, set(), Counter(), 0)
        need = files_needed(slots, [state.root for state in states.values()], sum(copies))
        check_space(io, roots, need, sum(copies))
        for index, root in enumerate(roots):
            pool.direct[index] = probe_direct(io, root, notes.say)
        try:
            reserve(pool, need)
        except BaseException:
            undo_creation(parts)
            raise
        parts.manifest = Manifest(
            run_id=run_id,
            step=None,
            identity=identity,
            extra={},
            rows=[SlotRow(state.spec, state.root) for state in states.values()],
            directories=[root.written_as for root in roots],
            piece_nbytes=piece_nbytes,
            versions=copies[0],
            pins=copies[1],
        )
    except BaseException:
        locks.release()
        raise
    return parts


def _empty(run_id: str) -> Manifest:
    return Manifest(run_id, None, {}, {}, (), (), 0, 0, 0)


def _new_states(slots: Sequence[SlotSpec], places: Sequence[int]) -> dict[str, SlotState]:
    return {slot.name: SlotState(slot, place, padded(slot.nbytes)) for slot, place in zip(slots, places, strict=True)}


def forget_creation(parts: Parts) -> None:
    """The store stands: its manifest says where its files are."""
    with suppress(OSError):
        parts.io.unlink(parts.directory / CREATING)


def undo_creation(parts: Parts) -> None:
    """Remove what a failed creation made, and give the lock back. Directories that it found are left."""
    parts.pool.close_descriptors()
    for root in parts.roots:
        remove_root(parts.io, root.path, keep=root.at_home)
    for name in (PREPARED, MANIFEST, CREATING, RESERVE):
        with suppress(OSError):
            parts.io.unlink(parts.directory / name)
    parts.locks.release()


def old_parts(
    io: FileIO,
    directory: Path,
    slots: Sequence[SlotSpec] | None,
    *,
    verify: bool,
    from_pin: str | None,
    on_prepared: Literal["abandon", "commit"],
    checkpoints: Path | None,
) -> Parts:
    """An existing store's parts at its last committed step; with ``from_pin`` a damaged store is opened empty."""
    home = checkpoints or directory / "checkpoints"
    if not io.exists(directory / MANIFEST) and (from_pin is None or not io.exists(directory)):
        if pin_names(io, home):
            path = directory / MANIFEST
            raise OverspillError("OVS404", "The manifest is missing.", field=str(path), next_step=_offer(io, home))
        raise OverspillError("OVS601", "There is no store in this directory.", field=str(directory))
    locks = Locks(io, directory / LOCK)
    try:
        if on_prepared == "commit":
            _roll_forward(io, directory)
        manifest = _committed_manifest(io, directory, home, from_pin)
        if slots is not None:
            check_match([row.spec for row in manifest.rows], slots)
        _refuse_absent(io, manifest)
        owner = Owner(directory.resolve(), manifest.run_id)
        claim(io, locks, distant_roots(manifest), owner.home)
        written = [(row, row_path(manifest, directory, row)) for row in manifest.rows if row.file is not None]
        if verify:
            damage = find_damage(io, written, manifest.piece_nbytes)
            if damage is not None:
                raise damage.error(_offer(io, home))
        notes = Notes()
        roots = [
            Root(directory, at_home=True) if name == "." else Root(Path(name), at_home=False)
            for name in manifest.directories
        ]
        pool = FilePool(io, roots)
        pins = Pins(io, pool, roots, home, notes.say)
        states = _new_states([row.spec for row in manifest.rows], [row.directory for row in manifest.rows])
        parts = Parts(io, directory, locks, roots, pool, pins, manifest, states, notes)
        for row, path in written:
            number = file_number(path.name)
            assert number is not None and row.digests is not None
            state = states[row.spec.name]
            file = pool.known(state.root, number, state.padded_nbytes)
            nbytes, piece_nbytes = row.spec.nbytes, manifest.piece_nbytes
            state.committed = Version.committed(file, nbytes, piece_nbytes, row.digests, row.version)
        name_owner(io, distant_roots(manifest), owner, notes.say)  # nothing has been changed before
        make_directories(
            io, [home, *(root.slots for root in roots), *(root.pins for root in roots if not root.at_home)]
        )
        for index, root in enumerate(roots):
            pool.direct[index] = probe_direct(io, root, notes.say)
        _reclaim(parts)
    except BaseException:
        locks.release()
        raise
    return parts


def _refuse_absent(io: FileIO, manifest: Manifest) -> None:
    """A directory on another disk that is not mounted: nothing is damaged, and nothing must be made in its place."""
    for name in manifest.directories:
        if name != "." and not io.exists(Path(name)):
            raise OverspillError(
                "OVS404",
                "A directory that holds part of the state is not there.",
                field=name,
                next_step="Mount the disk that holds it under the same path, then try again; nothing has been changed.",
            )


def _committed_manifest(io: FileIO, directory: Path, home: Path, from_pin: str | None) -> Manifest:
    """The committed manifest; when it is damaged and a checkpoint was asked for, that one's, with no content yet."""
    path = directory / MANIFEST
    try:
        return read_manifest(io, path)
    except OverspillError as error:
        if error.code not in ("OVS404", "OVS403"):
            raise
        if from_pin is None:
            raise OverspillError(error.code, error.message, field=error.field, next_step=_offer(io, home)) from error
    with StoreReader(home / from_pin, io=io) as reader:
        pinned = reader.manifest
    rows = [replace(row, file=None, version=None, digests=None) for row in pinned.rows]
    # a root elsewhere keeps its links in ROOT/checkpoints/NAME
    directories = [name if name == "." else str(Path(name).parent.parent) for name in pinned.directories]
    return replace(pinned, step=None, extra={}, param_steps={}, rows=rows, directories=directories)


def _offer(io: FileIO, home: Path) -> str:
    name = Pins(io, FilePool(io, ()), (), home, lambda _: None).newest_good()
    if name is None:
        return "No checkpoint of this run verifies; the state cannot be recovered from this directory."
    return f"The newest checkpoint that verifies is {name}: `overspill resume RUN --from {name}`."


def _roll_forward(io: FileIO, directory: Path) -> None:
    """Commit a prepared step, for the caller knows that it was decided."""
    path = directory / PREPARED
    if not io.exists(path):
        return
    try:
        prepared = read_manifest(io, path)
    except OverspillError:
        return  # torn while being written: it was never prepared
    written = [(row, row_path(prepared, directory, row)) for row in prepared.rows if row.file is not None]
    if find_damage(io, written, prepared.piece_nbytes) is None:
        try:
            io.rename(path, directory / MANIFEST, "roll-forward")
            io.sync_directory(directory, "rolled-forward-name")
        except OSError as error:
            raise disk_error(error, path, "commit a prepared step") from error


def _reclaim(parts: Parts) -> None:
    """Take back what no manifest names, and top up what is reserved. ``reclaimed`` names what a killed run wrote."""
    io, manifest = parts.io, parts.manifest
    since_ns = 0
    with suppress(OSError):
        since_ns = io.status(parts.directory / MANIFEST).st_mtime_ns
    for name in (PREPARED, CREATING):
        path = parts.directory / name
        if io.exists(path):
            parts.reclaimed.append(str(path))
            try:
                io.unlink(path)
            except OSError as error:
                raise disk_error(error, path, "reclaim a file of an earlier run") from error
    states = parts.states.values()
    used = {state.committed.file.path for state in states if state.committed is not None}
    need = files_needed(
        [state.spec for state in states], [state.root for state in states], manifest.versions + manifest.pins
    )
    least = files_needed([state.spec for state in states], [state.root for state in states], manifest.versions)
    for state in states:
        if state.committed is not None:
            need[state.root, state.padded_nbytes] -= 1
            least[state.root, state.padded_nbytes] -= 1
    parts.reclaimed += parts.pins.clean_up()
    need -= parts.pins.held_files(used)
    need |= least
    wanted = Counter(need)
    for key in wanted:
        need[key] -= parts.pool.count_spares(*key)
    parts.reclaimed += adopt(parts.pool, parts.roots, used, need, since_ns)
    reserve(parts.pool, wanted)


def add_states(
    io: FileIO, pool: FilePool, states: dict[str, SlotState], slots: Sequence[SlotSpec], manifest: Manifest
) -> None:
    """Reserve room for more slots, then add them."""
    copies = manifest.versions + manifest.pins
    new = _new_states(slots, spread([slot.nbytes for slot in slots], [1.0] * len(pool.roots)))
    need = files_needed(slots, [state.root for state in new.values()], copies)
    check_space(io, pool.roots, need, copies)
    for key in need:
        need[key] += pool.count_spares(*key)
    reserve(pool, need)
    states.update(new)


def map_committed(io: FileIO, pool: FilePool, state: SlotState) -> mmap.mmap:
    """The committed file mapped read-only, once for all arrays over it; it is not recycled while one lives."""
    version = state.committed
    assert version is not None
    if state.mapping is not None and state.mapping[0] is version:
        mapping = state.mapping[1]()
        if mapping is not None:
            return mapping
    path = version.file.path
    fd = -1
    try:
        fd = io.open(path, os.O_RDONLY)
        mapping = io.map_read_only(fd, state.spec.nbytes)
    except OSError as error:
        raise disk_error(error, path, "map a state file") from error
    finally:
        if fd >= 0:
            io.close(fd)
    pool.hold(version.file)
    weakref.finalize(mapping, pool.let_go, version.file).atexit = False
    state.mapping = version, weakref.ref(mapping)
    return mapping
