"""Reading what is committed, without the right to change it: a checkpoint's directory, or rows of a manifest.

Arrays are memory maps of the immutable files, so opening them costs no memory. A reader holds a shared lock on
its manifest; whoever drops the checkpoint meanwhile then leaves the bytes alone instead of recycling them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from overspill.errors import OverspillError
from overspill.tiers.disk.checksum import hash_pieces
from overspill.tiers.disk.fileio import NO_DIRECT, FileIO, disk_error
from overspill.tiers.disk.layout import ALIGN_NBYTES, SlotSpec, TensorSpec, padded
from overspill.tiers.disk.manifest import MANIFEST, Manifest, SlotRow, read_manifest
from overspill.tiers.disk.owner import distant_roots, refuse_other
from overspill.tiers.disk.parallel import for_each
from overspill.tiers.disk.transfer import Transfer

__all__ = ["NUMPY_DTYPE", "Damage", "StoreReader", "find_damage", "row_path", "view"]

VERIFY_THREADS: Final = 4
VERIFY_NBYTES: Final = 1024 * 1024
NUMPY_DTYPE: Final = {"bfloat16": "uint16"}
"""numpy has no bfloat16: such arrays come as their bits."""


@dataclass(frozen=True)
class Damage:
    """One slot whose file is not what was committed."""

    slot: str
    path: Path
    why: str

    def error(self, offer: str | None = None) -> OverspillError:
        """OVS404 that names the slot and the file; ``offer``: what to do about it."""
        message = f"Slot {self.slot} is damaged: {self.why}."
        return OverspillError("OVS404", message, field=str(self.path), next_step=offer)


def row_path(manifest: Manifest, home: Path, row: SlotRow) -> Path:
    """Where a row's file lies, for the manifest that was read from the directory ``home``."""
    assert row.file is not None
    return home / manifest.directories[row.directory] / row.file


def find_damage(io: FileIO, rows: Sequence[tuple[SlotRow, Path]], piece_nbytes: int) -> Damage | None:
    """Read every row's file and compare its checksums. The first damage in order, or None. Errors of the disk raise."""
    transfer = Transfer(io, max(VERIFY_NBYTES, piece_nbytes))
    found: dict[int, Damage] = {}

    def check(numbered: tuple[int, tuple[SlotRow, Path]]) -> None:
        index, (row, path) = numbered
        if not any(earlier < index for earlier in list(found)):
            damage = _check_row(transfer, row, path, piece_nbytes)
            if damage is not None:
                found[index] = damage

    for_each(check, enumerate(rows), threads=VERIFY_THREADS, name="overspill-verify")
    return found[min(found)] if found else None


def _check_row(transfer: Transfer, row: SlotRow, path: Path, piece_nbytes: int) -> Damage | None:
    io, name, nbytes = transfer.io, row.spec.name, row.spec.nbytes
    assert row.digests is not None
    if not io.exists(path):
        return Damage(name, path, "its file is missing")
    have_nbytes = io.status(path).st_size
    if have_nbytes < padded(nbytes):
        return Damage(name, path, f"its file is truncated to {have_nbytes} of {padded(nbytes)} bytes")
    fd, direct = _open_for_reading(io, path)
    step_nbytes = max(VERIFY_NBYTES // piece_nbytes, 1) * piece_nbytes
    buffer = mmap.mmap(-1, -(-min(step_nbytes, nbytes) // ALIGN_NBYTES) * ALIGN_NBYTES)
    try:
        with memoryview(buffer) as whole:
            for start in range(0, nbytes, step_nbytes):
                length = min(step_nbytes, nbytes - start)
                transfer.read(fd, path, start, whole[:length], direct=direct)
                digests = hash_pieces(whole[:length], piece_nbytes)
                first = start // piece_nbytes
                wrong = np.flatnonzero(digests != row.digests[first : first + len(digests)])
                if len(wrong):
                    at = (first + int(wrong[0])) * piece_nbytes
                    end = min(at + piece_nbytes, nbytes)
                    return Damage(name, path, f"the checksum of bytes {at} to {end} does not match")
    finally:
        io.close(fd)
    return None


def _open_for_reading(io: FileIO, path: Path) -> tuple[int, bool]:
    """A descriptor, and whether it bypasses the page cache, which could hide what the device really holds."""
    fd = -1
    page = mmap.mmap(-1, ALIGN_NBYTES)
    try:
        fd = io.open(path, os.O_RDONLY | os.O_DIRECT)
        with memoryview(page) as whole:
            io.pread(fd, whole, 0)
        return fd, True
    except OSError as error:
        if fd >= 0:
            io.close(fd)
        if error.errno not in NO_DIRECT:
            raise disk_error(error, path, "read a state file") from error
    try:
        return io.open(path, os.O_RDONLY), False
    except OSError as error:
        raise disk_error(error, path, "open a state file") from error


def _map_file(io: FileIO, slot: str, path: Path, nbytes: int) -> mmap.mmap:
    fd = -1
    try:
        fd = io.open(path, os.O_RDONLY)
        if io.status(path).st_size < padded(nbytes):
            raise Damage(slot, path, "its file is truncated").error()
        return io.map_read_only(fd, nbytes)
    except OSError as error:
        raise disk_error(error, path, "map a state file") from error
    finally:
        if fd >= 0:
            io.close(fd)


def view(mapping: mmap.mmap, spec: SlotSpec, tensor: TensorSpec | None = None) -> npt.NDArray[Any]:
    """A read-only array over a mapped slot file: the whole flat slot, or one tensor in it."""
    dtype = (tensor or spec).dtype
    shape = (tensor or spec).shape
    flat = np.frombuffer(
        mapping,
        dtype=NUMPY_DTYPE.get(dtype, dtype),
        count=int(np.prod(shape, dtype=np.int64)),
        offset=tensor.offset_nbytes if tensor else 0,
    )
    return flat.reshape(shape)


def tensor_of(spec: SlotSpec, name: str) -> TensorSpec:
    """Raises OverspillError OVS504 when the slot has no such tensor."""
    for tensor in spec.tensors:
        if tensor.name == name:
            return tensor
    raise OverspillError("OVS504", "The slot has no such tensor.", field=spec.name, value=name)


class StoreReader:
    """A checkpoint (or a store that nobody trains in), read-only.

    ``home``: the directory of the checkpoint's store; with it a copy of a run is refused while the original is there,
    whose process does not see who reads through the copy. Raises OVS601 when there is no checkpoint or it is dropped
    meanwhile, OVS404 when its manifest is damaged, OVS407 for another format version, OVS408 for a copy.
    """

    def __init__(self, path: Path, *, home: Path | None = None, io: FileIO | None = None) -> None:
        self.path = path
        self._io = io or FileIO()
        manifest_path = path / MANIFEST
        if not self._io.exists(manifest_path):
            raise OverspillError("OVS601", "There is no checkpoint here.", field=str(path))
        self.manifest = read_manifest(self._io, manifest_path)
        if home is not None:
            roots = distant_roots(self.manifest, pin=not home.samefile(path))
            refuse_other(self._io, roots, home.resolve())
        self._rows = {row.spec.name: row for row in self.manifest.rows}
        self._maps: dict[str, mmap.mmap] = {}
        try:
            self._lock_fd = self._io.open(manifest_path, os.O_RDONLY)
        except OSError as error:
            raise disk_error(error, manifest_path, "open the manifest") from error
        with suppress(OSError):  # without locks the owner never recycles a checkpoint's files
            self._io.lock(self._lock_fd, shared=True)

    @property
    def step(self) -> int | None:
        return self.manifest.step

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return tuple(row.spec for row in self.manifest.rows)

    def file(self, slot: str) -> Path:
        """The file of a slot. Raises OVS504 for an unknown slot or one without content."""
        row = self._rows.get(slot)
        if row is None or row.file is None:
            raise OverspillError("OVS504", "This checkpoint has no content for the slot.", field=slot)
        return row_path(self.manifest, self.path, row)

    def array(self, slot: str) -> npt.NDArray[Any]:
        """The slot as a flat read-only array of its shape, mapped from the file. bfloat16 comes as uint16 bits."""
        return view(self._map(slot), self._rows[slot].spec)

    def tensor(self, slot: str, name: str) -> npt.NDArray[Any]:
        """One tensor of a slot, read-only, mapped from the file. bfloat16 comes as uint16 bits."""
        mapping = self._map(slot)
        return view(mapping, self._rows[slot].spec, tensor_of(self._rows[slot].spec, name))

    def damage(self) -> Damage | None:
        """Read everything and compare checksums."""
        rows = [(row, self.file(row.spec.name)) for row in self.manifest.rows if row.file is not None]
        with self._unless_dropped():
            damage = find_damage(self._io, rows, self.manifest.piece_nbytes)
            if damage is not None:
                self._refuse_dropped()
            return damage

    def _refuse_dropped(self) -> None:
        if not self._io.exists(self.path / MANIFEST):
            raise OverspillError(
                "OVS601",
                "The checkpoint was dropped meanwhile.",
                field=str(self.path),
                next_step="Try again, or name another with --from.",
            )

    @contextmanager
    def _unless_dropped(self) -> Iterator[None]:
        """An error of the disk within it is the dropped checkpoint's where that is the cause."""
        try:
            yield
        except OverspillError:
            self._refuse_dropped()
            raise

    def verify(self) -> None:
        """Raises OVS404 that names the slot, the file and the bytes."""
        damage = self.damage()
        if damage is not None:
            raise damage.error()

    def _map(self, slot: str) -> mmap.mmap:
        if slot not in self._maps:
            path = self.file(slot)
            nbytes = self._rows[slot].spec.nbytes
            with self._unless_dropped():
                self._maps[slot] = _map_file(self._io, slot, path, nbytes)
        return self._maps[slot]

    def close(self) -> None:
        """Give up the shared lock. Arrays handed out stay valid as long as the checkpoint exists."""
        if self._lock_fd >= 0:
            self._io.close(self._lock_fd)
            self._lock_fd = -1
        self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
