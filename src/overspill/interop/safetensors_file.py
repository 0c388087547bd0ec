"""The safetensors format: eight bytes of header length, a JSON header, then the tensors' bytes.

Read and written here with plain file calls, so that a tensor goes from disk to its place in the pool, or back,
without a second copy and without mapped pages; the library's own reader maps the file, and its writer wants every
tensor at once. Header checks follow the format's specification (huggingface/safetensors, README): lengths within
the file, no overlap, no hole. No torch here, and no dtype conversion.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from overspill.errors import OverspillError
from overspill.files import parse_json
from overspill.units import MiB

__all__ = ["ITEM_NBYTES", "TensorEntry", "header_bytes", "read_entries", "read_pieces", "read_range"]

ITEM_NBYTES: Final[dict[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_LENGTH_NBYTES: Final = 8
_LARGEST_HEADER_NBYTES: Final = 100_000_000  # the limit of the safetensors library itself
_ALIGNMENT_NBYTES: Final = 8
PIECE_NBYTES: Final = 8 * MiB  # read at a time; the page cache is given back after each


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a file: where its bytes lie, counted from the start of the file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one file by name, in order of offset. Raises OverspillError OVS202 for a damaged file."""
    try:
        with file.open("rb") as stream:
            file_nbytes = os.fstat(stream.fileno()).st_size
            length = stream.read(_LENGTH_NBYTES)
            if len(length) < _LENGTH_NBYTES:
                _damaged(file, f"it has {file_nbytes} bytes, too few for a header")
            header_nbytes = int.from_bytes(length, "little")
            if header_nbytes > min(file_nbytes - _LENGTH_NBYTES, _LARGEST_HEADER_NBYTES):
                _damaged(file, f"its header should have {header_nbytes} bytes, the file has {file_nbytes}")
            text = stream.read(header_nbytes)
    except OSError as error:
        raise OverspillError("OVS202", f"The weights file cannot be read: {error.strerror}.", field=str(file)) from None
    try:
        header: Any = parse_json(text)
    except ValueError:
        _damaged(file, "its header is no JSON")
    if not isinstance(header, dict):
        _damaged(file, "its header is no JSON object")
    header.pop("__metadata__", None)
    data_begin = _LENGTH_NBYTES + header_nbytes
    entries = [_entry(file, name, row, data_begin) for name, row in header.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.nbytes))
    expected = data_begin
    for entry in entries:
        if entry.begin != expected:
            _damaged(file, "its tensors overlap or leave holes", entry.name)
        expected += entry.nbytes
        if expected > file_nbytes:
            _damaged(
                file, f"it is truncated: this tensor ends at byte {expected}, the file at {file_nbytes}", entry.name
            )
    if expected != file_nbytes:
        _damaged(file, f"its tensors end at byte {expected}, the file has {file_nbytes}")
    return {entry.name: entry for entry in entries}


def _entry(file: Path, name: str, row: Any, data_begin: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = row["dtype"], tuple(row["shape"]), row["data_offsets"]
    except (KeyError, TypeError, ValueError):
        _damaged(file, "its header lacks dtype, shape or data_offsets", name)
    numbers = (*shape, begin, end)
    if not all(type(number) is int and number >= 0 for number in numbers):
        _damaged(file, "its header has a length that is no whole number", name)
    if dtype not in ITEM_NBYTES:
        _damaged(file, f"its dtype {dtype!r} is not known", name)
    if end - begin != math.prod(shape) * ITEM_NBYTES[dtype]:
        _damaged(file, f"shape {list(shape)} of {dtype} does not take {end - begin} bytes", name)
    return TensorEntry(file, name, dtype, shape, data_begin + begin, end - begin)


def _damaged(file: Path, what: str, tensor: str | None = None) -> NoReturn:
    named = f" Tensor {tensor!r}." if tensor is not None else ""
    raise OverspillError("OVS202", f"{file.name} is damaged: {what}.{named}", field=str(file))


def read_range(descriptor: int, target: memoryview, begin: int, entry: TensorEntry) -> None:
    """Fill ``target`` with the file's bytes from ``begin`` on; a short read names the tensor (OVS202)."""
    left = target.cast("B")
    while len(left):
        try:
            got = os.preadv(descriptor, [left], begin)
        except OSError as error:
            raise OverspillError(
                "OVS202",
                f"Reading tensor {entry.name!r} from {entry.file.name} failed: {error.strerror}.",
                field=str(entry.file),
                next_step="Check the drive (`dmesg`), or download the file again.",
            ) from None
        if got == 0:
            _damaged(entry.file, f"it is truncated at byte {begin}", entry.name)
        left = left[got:]
        begin += got


def read_pieces(entry: TensorEntry, pieces: Iterable[tuple[int, memoryview]]) -> Iterator[int]:
    """Read a tensor piece by piece: fills each ``(first byte within the tensor, buffer)``, yields the bytes done.

    The pages that a piece brought into the page cache are given back after it: inside a cgroup they count.
    """
    try:
        descriptor = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise OverspillError(
            "OVS202", f"The weights file cannot be read: {error.strerror}.", field=str(entry.file)
        ) from None
    try:
        for offset, buffer in pieces:
            nbytes = buffer.nbytes
            read_range(descriptor, buffer, entry.begin + offset, entry)
            os.posix_fadvise(descriptor, entry.begin + offset, nbytes, os.POSIX_FADV_DONTNEED)
            yield nbytes
    finally:
        os.close(descriptor)


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The head of a file that holds these ``(name, dtype, shape)`` one after another, padded to 8 bytes."""
    rows: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * ITEM_NBYTES[dtype]
        rows[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_NBYTES)
    return len(text).to_bytes(_LENGTH_NBYTES, "little") + text
