"""Names, lengths and places: what a slot is, how long its file is, and in which directory it lies.

Pure arithmetic and comparison; nothing here opens a file. File names are a number of fixed width, never
joined from parameter names (DeepSpeed#5087), and lengths are padded before anything is sized (#1033).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from overspill.errors import OverspillError

__all__ = [
    "ALIGN_NBYTES",
    "DTYPE_NBYTES",
    "ROOT_PREFIX",
    "Root",
    "SlotSpec",
    "TensorSpec",
    "check_match",
    "check_name",
    "check_slots",
    "file_name",
    "file_number",
    "padded",
    "spread",
]

ALIGN_NBYTES: Final = 4096
NAME_LIMIT: Final = 100
ROOT_PREFIX: Final = "overspill-"
"""How the directory of a store on another disk is called, before its run id."""
_NAME: Final = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.+=-]*$")
_FILE: Final = re.compile(r"^f(\d{8})\.bin$")

DTYPE_NBYTES: Final[dict[str, int]] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class TensorSpec:
    """One parameter inside a slot. ``global_shape`` and ``shard_offset`` place a shard in the whole tensor."""

    name: str
    offset_nbytes: int
    shape: tuple[int, ...]
    dtype: str
    global_shape: tuple[int, ...] | None = None
    shard_offset: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True)
class SlotSpec:
    """One block's piece of one state class: a flat array of ``shape``, ``nbytes`` long before padding."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    state_class: str
    tensors: tuple[TensorSpec, ...] = ()
    rank: int = 0
    world_size: int = 1


def padded(nbytes: int) -> int:
    """Length of the file that holds ``nbytes``: a multiple of 4 KiB, at least one."""
    return max(-(-nbytes // ALIGN_NBYTES), 1) * ALIGN_NBYTES


def file_name(number: int) -> str:
    return f"f{number:08d}.bin"


def file_number(name: str) -> int | None:
    """The number in a slot file's name, or None for any other name."""
    match = _FILE.match(name)
    return int(match[1]) if match else None


def check_name(name: str, kind: str) -> str:
    """A name that is safe as a file name everywhere. Raises OverspillError OVS504."""
    if len(name) >= NAME_LIMIT or not _NAME.match(name):
        raise OverspillError(
            "OVS504",
            f"A {kind}'s name is made of letters, digits and _ . + = - and does not start with a dot.",
            field=kind,
            value=repr(name),
            limit=f"{NAME_LIMIT - 1} characters",
        )
    return name


def check_slots(slots: Sequence[SlotSpec]) -> None:
    """Every slot is consistent in itself and every name is its own. Raises OverspillError OVS504 or OVS206."""
    seen: set[str] = set()
    for slot in slots:
        check_name(slot.name, "slot")
        if slot.name in seen:
            raise OverspillError("OVS504", "Two slots have the same name.", field=slot.name)
        seen.add(slot.name)
        for dtype in (slot.dtype, *(tensor.dtype for tensor in slot.tensors)):
            if dtype not in DTYPE_NBYTES:
                known = ", ".join(DTYPE_NBYTES)
                raise OverspillError(
                    "OVS206", "The store does not know this dtype.", field=slot.name, value=dtype, limit=known
                )
        want_nbytes = prod(slot.shape) * DTYPE_NBYTES[slot.dtype]
        if slot.nbytes != want_nbytes or slot.nbytes <= 0:
            raise OverspillError(
                "OVS504",
                f"A slot of shape {slot.shape} and dtype {slot.dtype} holds {want_nbytes} bytes, more than none.",
                field=slot.name,
                value=f"{slot.nbytes} bytes",
            )
        for tensor in slot.tensors:
            if tensor.offset_nbytes < 0 or tensor.offset_nbytes + tensor.nbytes > slot.nbytes:
                raise OverspillError(
                    "OVS504",
                    f"Tensor {tensor.name} ends at byte {tensor.offset_nbytes + tensor.nbytes} of its slot.",
                    field=slot.name,
                    limit=f"{slot.nbytes} bytes",
                )


def check_match(stored: Sequence[SlotSpec], wanted: Sequence[SlotSpec]) -> None:
    """The store holds exactly what the model needs. Raises OVS406 that names the first difference and both sides.

    Done before any read, so that a file of bf16 is never read into a buffer of fp32 (DeepSpeed#2006).
    """
    stored_by_name = {slot.name: slot for slot in stored}
    wanted_by_name = {slot.name: slot for slot in wanted}
    for name in stored_by_name.keys() - wanted_by_name.keys():
        raise _mismatch(name, _facts(stored_by_name[name]), "no such slot")
    for name, want in wanted_by_name.items():
        have = stored_by_name.get(name)
        if have is None:
            raise _mismatch(name, "no such slot", _facts(want))
        tensors_have = {tensor.name: tensor for tensor in have.tensors}
        tensors_want = {tensor.name: tensor for tensor in want.tensors}
        for tensor_name in [*tensors_want, *(tensors_have.keys() - tensors_want.keys())]:
            pair = tensors_have.get(tensor_name), tensors_want.get(tensor_name)
            if pair[0] != pair[1]:
                raise _mismatch(f"{name}, tensor {tensor_name}", *(_tensor_facts(tensor) for tensor in pair))
        if have != want:
            raise _mismatch(name, _facts(have), _facts(want))


def _mismatch(where: str, have: str, want: str) -> OverspillError:
    return OverspillError("OVS406", f"The store has {have}; the model needs {want}.", field=where)


def _facts(slot: SlotSpec) -> str:
    facts = f"{slot.dtype} × {prod(slot.shape)} elements = {slot.nbytes} bytes of {slot.state_class}"
    shard = f", rank {slot.rank} of {slot.world_size}" if slot.world_size > 1 else ""
    return f"{facts}, {len(slot.tensors)} tensors{shard}"


def _tensor_facts(tensor: TensorSpec | None) -> str:
    if tensor is None:
        return "no such tensor"
    count = prod(tensor.shape)
    facts = f"{tensor.dtype} × {count} elements = {tensor.nbytes} bytes, shape {tensor.shape}"
    shard = f", shard at {tensor.shard_offset} of {tensor.global_shape}" if tensor.global_shape else ""
    return f"{facts} at byte {tensor.offset_nbytes}{shard}"


def spread(nbytes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """For each slot the index of its directory, in proportion to ``weights`` (measured bytes per second).

    Each slot goes where it would be finished first, so that neighbours in the order land on different disks.
    """
    filled_nbytes = [0] * len(weights)
    places: list[int] = []
    for length in nbytes:
        place = min(range(len(weights)), key=lambda index: ((filled_nbytes[index] + length) / weights[index], index))
        filled_nbytes[place] += length
        places.append(place)
    return places


@dataclass(frozen=True)
class Root:
    """One directory that holds slot files. ``at_home``: it is the store's own; one elsewhere keeps its own links."""

    path: Path
    at_home: bool

    @property
    def written_as(self) -> str:
        """How the manifest names it; the store's own directory may be moved as a whole."""
        return "." if self.at_home else str(self.path)

    @property
    def slots(self) -> Path:
        return self.path / "slots"

    @property
    def pins(self) -> Path:
        return self.path / "checkpoints"
