"""The mechanics under DiskStore: which version holds a range, hashing, and the two durable moves of a commit.

Kept apart so that store.py reads as the list of what a store can do. The order of the steps of a commit, and
why, is [Note: order of a commit] in store.py.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from overspill.errors import OverspillError
from overspill.tiers.disk.checksum import Digests, hash_pieces
from overspill.tiers.disk.fileio import disk_error, write_file
from overspill.tiers.disk.fork import close_in_children
from overspill.tiers.disk.manifest import MANIFEST, PREPARED, Manifest, SlotRow, encode
from overspill.tiers.disk.opening import Parts, SlotState
from overspill.tiers.disk.parallel import for_each
from overspill.tiers.disk.pool import Descriptor
from overspill.tiers.disk.reader import Damage
from overspill.tiers.disk.space import free_reserve, hold_reserve
from overspill.tiers.disk.transfer import Transfer
from overspill.tiers.disk.version import Version

__all__ = ["Prepared", "StoreCore"]

SYNC_THREADS: Final = 4
RESERVE_NBYTES: Final = 16 * 1024


@dataclass(frozen=True, eq=False)
class Prepared:
    """A step that is durable and undecided: `commit` or `abandon` it."""

    step: int
    manifest: Manifest
    versions: Mapping[str, Version]


class StoreCore:
    """State and private moves of one open store."""

    def __init__(self, parts: Parts, *, request_nbytes: int, verify_reads: bool) -> None:
        self.directory: Path = parts.directory
        self.notes = parts.notes
        self.reclaimed: list[str] = parts.reclaimed
        self._io = parts.io
        self._locks = parts.locks
        self._pool = parts.pool
        self._pins = parts.pins
        self._head = parts.manifest
        self._states = parts.states
        self._transfer = Transfer(parts.io, request_nbytes)
        self._verify_reads = verify_reads
        self._prepared: Prepared | None = None
        self._failure: BaseException | None = None
        self._broken = False  # a commit failed half way: only a new open can tell which step is committed
        self._document_nbytes = 0
        self._closed: Literal["", "closed", "forked"] = ""
        self._lock = threading.RLock()  # who owns which version; held for microseconds
        self._control = threading.RLock()  # one prepare, commit, pin, … at a time; held over their I/O
        close_in_children(self)

    # may we?

    def _check_open(self) -> None:
        if self._closed == "forked":
            raise OverspillError("OVS503", "The store was used in a forked child.", field=str(self.directory))
        if self._closed:
            raise OverspillError("OVS504", "The store is closed.", field=str(self.directory))

    def _check_usable(self) -> None:
        self._check_open()
        if self._failure is not None:
            message = f"The store failed before: {self._failure}"
            raise OverspillError("OVS501", message, field=str(self.directory)) from self._failure

    def _check_prepared(self, prepared: Prepared) -> None:
        self._check_open()
        if prepared is not self._prepared:
            raise OverspillError(
                "OVS504", "This step is not the one that is prepared.", field="step", value=prepared.step
            )
        if self._broken:
            self._check_usable()

    def _state(self, slot: str, offset_nbytes: int, nbytes: int) -> SlotState:
        self._check_open()
        state = self._states.get(slot)
        if state is None:
            raise OverspillError("OVS504", "The store has no such slot.", field=slot)
        if offset_nbytes < 0 or offset_nbytes + nbytes > state.spec.nbytes:
            raise OverspillError(
                "OVS504",
                "The range lies outside of the slot.",
                field=slot,
                value=f"bytes {offset_nbytes} to {offset_nbytes + nbytes}",
                limit=f"{state.spec.nbytes} bytes",
            )
        return state

    # data

    def _locate(self, state: SlotState, start: int, end: int) -> list[tuple[Version, Descriptor, int, int]]:
        """Which versions hold ``[start, end)``; each file is held until `done`, so that it is not recycled."""
        found: list[tuple[Version, Descriptor, int, int]] = []
        with self._lock:
            self._check_usable()
            base = state.prepared or state.committed
            parts = [(start, end, False)]
            if state.working is not None:
                parts = list(state.working.written.split(start, end))
            try:
                for low, high, in_working in parts:
                    version = state.working if in_working else base
                    if version is None:
                        raise OverspillError(
                            "OVS504", "This range has never been written.", field=state.spec.name, value=f"byte {low}"
                        )
                    found.append((version, self._pool.acquire(version.file), low, high))
            except BaseException:
                for _, entry, _, _ in found:
                    self._pool.done(entry)
                raise
        return found

    def _hash_whole_pieces(self, version: Version, start: int, source: memoryview) -> Digests | None:
        """Digests of the pieces that lie entirely in what is being written at ``start``."""
        first, last = version.whole_pieces(start, start + len(source))
        if first == last:
            return None
        low, high = version.piece_range(first)[0], version.piece_range(last - 1)[1]
        return hash_pieces(source[low - start : high - start], version.piece_nbytes)

    def _verify(self, state: SlotState, version: Version, entry: Descriptor, start: int, part: memoryview) -> None:
        """Compare what was read with the checksums; a piece that was read in part is read again in full."""
        end = start + len(part)
        for piece in range(start // version.piece_nbytes, -(-end // version.piece_nbytes)):
            with self._lock:
                hashed, want = bool(version.hashed[piece]), version.digests[piece]
            if not hashed:
                continue  # being written in this step; there is nothing to compare with yet
            low, high = version.piece_range(piece)
            if start <= low and high <= end:
                data = part[low - start : high - start]
            else:
                data = memoryview(bytearray(high - low))
                direct = self._pool.direct[entry.file.root]
                self._transfer.read(entry.fd, entry.file.path, low, data, direct=direct)
            if hash_pieces(data, version.piece_nbytes)[0] != want:
                why = f"the checksum of bytes {low} to {high} does not match"
                raise Damage(state.spec.name, entry.file.path, why).error()

    # the commit

    def _take_working(self, step: int, extra: Mapping[str, Any]) -> dict[str, Version]:
        """Every working version, complete and at rest, becomes the prepared one."""
        with self._lock:
            self._check_usable()
            if self._prepared is not None:
                waiting = f"step {self._prepared.step}"
                raise OverspillError("OVS504", "A prepared step is undecided.", field="step", value=waiting)
            try:
                json.dumps(extra, allow_nan=False)
            except (TypeError, ValueError) as error:
                message = f"What goes into a commit must be JSON without NaN or infinity: {error}."
                raise OverspillError(
                    "OVS504", message, field="extra", next_step="Write tensors as text, leave out what is no number."
                ) from error
            versions: dict[str, Version] = {}
            for name, state in self._states.items():
                if state.working is None:
                    continue
                gap = state.working.missing()
                if gap is not None or state.working.writers:
                    message = "A slot is being written" if gap is None else "A slot is written only in part"
                    seen = f"bytes {gap[0]} to {gap[1]} missing" if gap else f"{state.working.writers} writes in flight"
                    raise OverspillError("OVS504", f"{message}; it cannot be committed.", field=name, value=seen)
                versions[name] = state.working
            for name, version in versions.items():
                version.step = step
                self._states[name].prepared, self._states[name].working = version, None
            return versions

    def _finish_files(self, versions: Mapping[str, Version]) -> None:
        """Hash what is left and sync, several files at once: a device merges flushes that wait together."""

        def finish(version: Version) -> None:
            self._hash_rest(version)
            self._sync(version)

        for_each(finish, versions.values(), threads=SYNC_THREADS, name="overspill-sync")

    def _hash_rest(self, version: Version) -> None:
        """Read back the pieces that were not hashed when they were written."""
        todo = np.flatnonzero(~version.hashed)
        if len(todo) == 0:
            return
        buffer = mmap.mmap(-1, version.piece_nbytes)
        entry = self._pool.acquire(version.file)
        try:
            with memoryview(buffer) as whole:
                for piece in map(int, todo):
                    low, high = version.piece_range(piece)
                    direct = self._pool.direct[entry.file.root]
                    self._transfer.read(entry.fd, entry.file.path, low, whole[: high - low], direct=direct)
                    version.digests[piece] = hash_pieces(whole[: high - low], version.piece_nbytes)[0]
                    version.hashed[piece] = True
        finally:
            self._pool.done(entry)

    def _sync(self, version: Version) -> None:
        entry = self._pool.acquire(version.file)
        try:
            self._io.fdatasync(entry.fd, "slot-data")
        except OSError as error:
            raise disk_error(error, entry.file.path, "sync state") from error
        finally:
            self._pool.done(entry)

    def _row(self, state: SlotState, version: Version | None) -> SlotRow:
        if version is None:
            return SlotRow(state.spec, state.root)
        file = f"slots/{version.file.path.name}"
        return SlotRow(state.spec, state.root, file, version.step, version.digests)

    def _write_next(self, manifest: Manifest) -> None:
        """The manifest beside the committed one, durable, with every slot file that it names."""
        path = self.directory / PREPARED
        self._pool.sync_names("slot-names")
        document = encode(manifest)
        self._document_nbytes = len(document)
        try:
            write_file(self._io, path, document, "manifest")
        except OverspillError as error:
            if error.code != "OVS401" or not free_reserve(self._io, self.directory):
                raise
            write_file(self._io, path, document, "manifest")
        try:
            self._io.sync_directory(self.directory, "prepared-name")
        except OSError as error:
            raise disk_error(error, path, "sync the directory") from error

    def _decide(self) -> None:
        """Make the next manifest the committed one. When this fails half way, both versions' files stay untouched."""
        path = self.directory / MANIFEST
        try:
            self._io.rename(self.directory / PREPARED, path, "commit")
            self._io.sync_directory(self.directory, "committed-name")
        except OSError as error:
            failure = disk_error(error, path, "commit")
            self._failure, self._broken = failure, True
            raise failure from error
        with suppress(OverspillError):  # the superseded manifest's space is free now; without it the next commit tries
            hold_reserve(self._io, self.directory, RESERVE_NBYTES + 2 * self._document_nbytes)

    def _forget_next(self) -> None:
        path = self.directory / PREPARED
        try:
            if self._io.exists(path):
                self._io.unlink(path)
            self._io.sync_directory(self.directory, "abandoned-name")
        except OSError as error:
            raise disk_error(error, path, "abandon a step") from error

    def _drop_uncommitted(self) -> None:
        with self._lock:
            for state in self._states.values():
                self._release([state.prepared, state.working])
                state.prepared = state.working = None
            self._prepared = None
            self._failure = None

    def _release(self, versions: Sequence[Version | None]) -> None:
        """Files that no version needs. What cannot be recycled now is found at the next open; that is no error here."""
        for version in versions:
            if version is not None:
                try:
                    self._pool.release(version.file)
                except OverspillError as error:
                    self.notes.say(f"{version.file.path} was not recycled: {error.message}")

    # fork

    def fds(self) -> list[int]:
        """Every open descriptor, for the fork handler."""
        return [*self._pool.descriptors(), *self._locks.fds()]

    def mark_forked(self) -> None:
        """In the child: refuse everything. Another thread may have held a lock at the fork, so they are new."""
        self._closed = "forked"
        self._lock, self._control = threading.RLock(), threading.RLock()
        self._pool.renew_lock()
