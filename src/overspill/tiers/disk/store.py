"""The disk store: versioned slots, copy on write, a commit in two phases, checkpoints as pins.

The committed version's files are never written. Writes go to a working version, which `prepare` makes durable
and `commit` makes the committed one by renaming the manifest; whatever stops the process, the next `open` is at
exactly one committed step. The store knows nothing of optimizers, nor of tensors beyond their names and places.
docs/reference/store-format.md is the format, docs/decisions/0002-disk-store.md says why it is so.

[Note: order of a commit]  Each arrow waits for the device:
    slot data, names of new slot files → manifest.next.json → its name → renamed to manifest.json → its name →
    the files of the superseded version may be written again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy.typing as npt

from overspill.errors import OverspillError
from overspill.tiers.disk import opening
from overspill.tiers.disk.core import Prepared, StoreCore
from overspill.tiers.disk.fileio import FileIO
from overspill.tiers.disk.layout import SlotSpec, check_match, check_slots
from overspill.tiers.disk.pins import PinInfo
from overspill.tiers.disk.reader import StoreReader, tensor_of, view
from overspill.tiers.disk.version import Version

__all__ = ["DiskStore", "Prepared"]

PIECE_NBYTES: Final = 1024 * 1024
REQUEST_NBYTES: Final = 4 * 1024 * 1024


class DiskStore(StoreCore):
    """One owner's store. Data calls (`read_into`, `write_from`, `map_tensor`) are safe from several threads.

    ``notes``: each fallback taken, said once. ``reclaimed``: what `open` found of a killed run.
    """

    # making and opening

    @classmethod
    def create(
        cls,
        directory: Path,
        slots: Sequence[SlotSpec],
        *,
        identity: Mapping[str, Any],
        pins: int,
        versions: int = 2,
        directories: Sequence[Path] = (),
        weights: Sequence[float] = (),
        checkpoints: Path | None = None,
        piece_nbytes: int = PIECE_NBYTES,
        request_nbytes: int = REQUEST_NBYTES,
        verify_reads: bool = False,
        io: FileIO | None = None,
    ) -> Self:
        """A new, empty store with room for ``versions + pins`` copies of the state, all preallocated.

        Args:
            identity: what the run is (model, job): JSON, kept in every manifest, for the caller to compare.
            pins: how many checkpoints are kept; each may hold one more version.
            versions: 2, or 3 where the next step's writes begin before this step's commit is decided.
            directories: where the slot files lie, default ``directory``; ``weights``: their measured speeds.
            checkpoints: where pins are listed, default ``directory / "checkpoints"``.
            piece_nbytes: unit of the checksums; writes that begin and end on it are hashed on their way.
        Raises:
            OverspillError: OVS401 space (need and free), OVS402 permission, OVS405 in use, OVS604 there is a store.
        """
        check_slots(slots)
        assert piece_nbytes % 4096 == 0 and piece_nbytes > 0 and versions >= 2 and pins >= 0
        parts = opening.new_parts(
            io or FileIO(),
            directory.absolute(),
            slots,
            identity=identity,
            copies=(versions, pins),
            directories=[path.absolute() for path in directories],
            weights=weights,
            checkpoints=checkpoints.absolute() if checkpoints else None,
            piece_nbytes=piece_nbytes,
        )
        try:
            store = cls(parts, request_nbytes=request_nbytes, verify_reads=verify_reads)
            store._write_next(parts.manifest)
            store._decide()
            opening.forget_creation(parts)
        except BaseException:
            opening.undo_creation(parts)
            raise
        return store

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        slots: Sequence[SlotSpec] | None = None,
        verify: bool = True,
        from_pin: str | None = None,
        on_prepared: Literal["abandon", "commit"] = "abandon",
        checkpoints: Path | None = None,
        request_nbytes: int = REQUEST_NBYTES,
        verify_reads: bool = False,
        io: FileIO | None = None,
    ) -> Self:
        """The store at its last committed step.

        Args:
            slots: what the model needs; compared in full before anything is read.
            verify: check every checksum of the committed version.
            from_pin: go on from this checkpoint instead, whatever state the store itself is in.
            on_prepared: what becomes of a step that was prepared and not decided. With several ranks: "commit" when
                any rank has committed it, for then all have prepared it.
        Raises:
            OverspillError: OVS404 a damaged file, by name, with the newest checkpoint that verifies; OVS406 another
                model, with both sides; OVS407 another format; OVS405 in use; OVS601 no store here.
        """
        parts = opening.old_parts(
            io or FileIO(),
            directory.absolute(),
            slots,
            verify=verify and from_pin is None,
            from_pin=from_pin,
            on_prepared=on_prepared,
            checkpoints=checkpoints.absolute() if checkpoints else None,
        )
        try:
            store = cls(parts, request_nbytes=request_nbytes, verify_reads=verify_reads)
            if from_pin is not None:
                store.restore_pin(from_pin)
        except BaseException:
            parts.locks.release()
            raise
        return store

    # facts

    @property
    def committed_step(self) -> int | None:
        """The step that a crash cannot lose; None before the first commit."""
        return self._head.step

    @property
    def extra(self) -> Mapping[str, Any]:
        """What was given to `prepare` for the committed step."""
        return self._head.extra

    @property
    def param_steps(self) -> Mapping[str, int]:
        return self._head.param_steps

    @property
    def identity(self) -> Mapping[str, Any]:
        return self._head.identity

    @property
    def run_id(self) -> str:
        return self._head.run_id

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return tuple(state.spec for state in self._states.values())

    @property
    def odirect(self) -> bool:
        """State bypasses the page cache on every directory."""
        return all(self._pool.direct)

    @property
    def bytes_read(self) -> int:
        return self._io.counters.bytes_read

    @property
    def bytes_written(self) -> int:
        return self._io.counters.bytes_written

    @property
    def scratch_nbytes(self) -> int:
        """Memory held for ragged edges (at most 4 MiB; none while all buffers are aligned)."""
        return self._transfer.scratch.nbytes

    def is_written(self, slot: str) -> bool:
        """The slot has content in some version."""
        state = self._state(slot, 0, 0)
        return any(version is not None for version in (state.committed, state.prepared, state.working))

    # data

    def read_into(
        self, slot: str, offset_nbytes: int, buffer: memoryview | bytearray, *, verify: bool | None = None
    ) -> None:
        """Fill ``buffer`` with the slot's newest bytes from ``offset_nbytes``: working where written, else committed.

        ``verify``: check the checksums of what is read (default: as the store was opened); OVS404 on damage.
        """
        target = memoryview(buffer).cast("B")
        state = self._state(slot, offset_nbytes, len(target))
        for version, entry, start, end in self._locate(state, offset_nbytes, offset_nbytes + len(target)):
            try:
                part = target[start - offset_nbytes : end - offset_nbytes]
                direct = self._pool.direct[entry.file.root]
                self._transfer.read(entry.fd, entry.file.path, start, part, direct=direct)
                if self._verify_reads if verify is None else verify:
                    self._verify(state, version, entry, start, part)
            finally:
                self._pool.done(entry)

    def write_from(self, slot: str, offset_nbytes: int, buffer: memoryview | bytearray, *, checksum: bool) -> None:
        """Write ``buffer`` into the slot's working version; a committed file is never written.

        checksum: hash the whole pieces on their way; what is not hashed is read back by `prepare`. Not for one range
        from two threads at once. A failed write fails the store until `rollback`.
        """
        source = memoryview(buffer).cast("B")
        start, end = offset_nbytes, offset_nbytes + len(source)
        state = self._state(slot, start, len(source))
        if not source:
            return
        with self._lock:
            self._check_usable()
            if state.working is None:
                file = self._pool.take(state.root, state.padded_nbytes)
                state.working = Version(file, state.spec.nbytes, self._head.piece_nbytes)
            version = state.working
            entry = self._pool.acquire(version.file)
            version.begin_write(start, end)
        try:
            digests = self._hash_whole_pieces(version, start, source) if checksum else None
            direct = self._pool.direct[state.root]
            self._transfer.write(entry.fd, entry.file.path, start, source, direct=direct, end_nbytes=state.spec.nbytes)
        except BaseException as error:
            with self._lock:
                version.fail_write()
                self._failure = self._failure or error
            raise
        finally:
            self._pool.done(entry)
        with self._lock:
            version.end_write(start, end, digests)

    def map_tensor(self, slot: str, tensor: str | None = None) -> npt.NDArray[Any]:
        """The committed slot, or one tensor of it, as a read-only array mapped from the file; bfloat16 as uint16 bits.

        The array keeps its bytes as long as it lives: the file is not recycled before.
        """
        state = self._state(slot, 0, 0)
        with self._lock:
            self._check_open()
            if state.committed is None:
                raise OverspillError("OVS504", "The slot has never been committed.", field=slot)
            mapping = opening.map_committed(self._io, self._pool, state)
        return view(mapping, state.spec, tensor_of(state.spec, tensor) if tensor is not None else None)

    # the commit, see [Note: order of a commit]

    def prepare(self, step: int, extra: Mapping[str, Any], *, param_steps: Mapping[str, int] | None = None) -> Prepared:
        """Make the working versions durable, undecided. Slots without one keep their committed version.

        Writes after this call belong to the next step. Raises OVS504 when a slot is not written in full, OVS401 or
        OVS403 when the disk fails; then the store has failed until `rollback`, and the committed step is intact.
        """
        with self._control:
            versions = self._take_working(step, extra)
            try:
                self._finish_files(versions)
                rows = [self._row(state, versions.get(name) or state.committed) for name, state in self._states.items()]
                steps = self._head.param_steps if param_steps is None else param_steps
                manifest = replace(self._head, step=step, extra=extra, rows=rows, param_steps=steps)
                self._write_next(manifest)
            except BaseException as error:
                with self._lock:
                    self._failure = self._failure or error
                raise
            self._prepared = Prepared(step, manifest, versions)
            return self._prepared

    def commit(self, prepared: Prepared) -> None:
        """Decide for the prepared step. The superseded version's files become spares, or stay with their pins."""
        with self._control:
            self._check_prepared(prepared)
            self._decide()
            with self._lock:
                self._head, self._prepared = prepared.manifest, None
                old = []
                for state in self._states.values():
                    if state.prepared is not None:
                        old.append(state.committed)
                        state.committed, state.prepared = state.prepared, None
                self._release(old)

    def abandon(self, prepared: Prepared) -> None:
        """Decide against the prepared step: back to the committed one, and forget what was written since."""
        with self._control:
            self._check_prepared(prepared)
            self._forget_next()
            self._drop_uncommitted()

    def rollback(self) -> None:
        """Forget everything written since the last commit; also the way on after a failed write or prepare."""
        self._check_open()
        with self._control:
            if self._broken:
                self._check_usable()
            if self._prepared is not None or self._failure is not None:
                self._forget_next()
            self._drop_uncommitted()

    # checkpoints

    def pin(self, name: str) -> Path:
        """A checkpoint of the committed step under ``checkpoints/name``: links, no state copied. Returns its path.

        Raises OVS604 when there is one of that name with another content.
        """
        with self._control:
            with self._lock:
                self._check_usable()
                if self._head.step is None:
                    raise OverspillError("OVS504", "Nothing has been committed yet.", field=name)
                committed = [state.committed for state in self._states.values()]
            files = [version.file if version is not None else None for version in committed]
            return self._pins.pin(name, self._head, files)

    def unpin(self, name: str) -> None:
        """Drop a checkpoint; its space goes back to the store. Raises OVS601 when there is none."""
        with self._control:
            self._check_open()
            self._pins.unpin(name)

    def pins(self) -> list[PinInfo]:
        """The checkpoints, oldest step first."""
        return self._pins.listing()

    def open_pin(self, name: str) -> StoreReader:
        """Read-only access to a checkpoint; close it when done."""
        return StoreReader(self._pins.path(name), io=self._io)

    def restore_pin(self, name: str) -> None:
        """Make a checkpoint the committed version, and forget what came after it. Its checksums are verified first.

        Raises OVS404 when the checkpoint is damaged (the store stays as it is), OVS406 when it is another model's.
        """
        with self._control, self.open_pin(name) as reader:
            specs = {spec.name: spec for spec in reader.slots}
            check_match(reader.slots, [state.spec for key, state in self._states.items() if key in specs])
            reader.verify()
            self.rollback()
            restored: dict[str, Version] = {}
            try:
                for row in reader.manifest.rows:
                    if row.file is not None:
                        assert row.digests is not None
                        state = self._states[row.spec.name]
                        file = self._pins.bring_back(reader.file(row.spec.name), state.root, state.padded_nbytes)
                        nbytes, piece_nbytes = row.spec.nbytes, reader.manifest.piece_nbytes
                        restored[row.spec.name] = Version.committed(
                            file, nbytes, piece_nbytes, row.digests, row.version
                        )
                rows = [self._row(state, restored.get(key)) for key, state in self._states.items()]
                manifest = replace(
                    reader.manifest,
                    rows=rows,
                    directories=self._head.directories,
                    versions=self._head.versions,
                    pins=self._head.pins,
                )
                self._write_next(manifest)
            except BaseException:
                self._release(list(restored.values()))
                raise
            self._decide()
            with self._lock:
                self._head = manifest
                old = [state.committed for state in self._states.values()]
                for key, state in self._states.items():
                    state.committed = restored.get(key)
                self._release(old)

    def add_slots(self, slots: Sequence[SlotSpec]) -> None:
        """Room for state that the store did not have (a parameter unfrozen late); part of the next commit on."""
        with self._control:
            self._check_usable()
            check_slots([*self.slots, *slots])
            opening.add_states(self._io, self._pool, self._states, slots, self._head)

    def close(self) -> None:
        """Release files and lock. What is not committed is forgotten. Mapped arrays stay valid."""
        with self._control, self._lock:
            if not self._closed:
                self._closed = "closed"
                self._pool.close_descriptors()
                self._locks.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
