"""The manifest: the JSON document that says which files make up one step, and by which checksums.

It is one JSON object whose last key holds the body; the checksum before it covers the body's own bytes, so a
reader needs no canonical form. docs/reference/store-format.md is the specification. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from overspill.errors import OverspillError
from overspill.files import parse_json
from overspill.tiers.disk.checksum import HASH_NAME, Digests, hash_bytes, hash_slot
from overspill.tiers.disk.fileio import FileIO, read_file
from overspill.tiers.disk.layout import SlotSpec, TensorSpec

__all__ = ["FORMAT_VERSION", "MANIFEST", "PREPARED", "Manifest", "SlotRow", "decode", "encode", "read_manifest"]

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
PREPARED: Final = "manifest.next.json"
_PREFIX: Final = '{"format": "overspill-store", "format_version": %d, "checksum": "%016x", "body": '
_SUFFIX: Final = "}\n"


@dataclass(frozen=True)
class SlotRow:
    """One slot in one version: where its bytes are. ``file`` is relative to the directory; None: never written."""

    spec: SlotSpec
    directory: int
    file: str | None = None
    version: int | None = None
    digests: Digests | None = None


@dataclass(frozen=True)
class Manifest:
    """Everything that is known of one committed step. ``extra`` (RNG, data position, …) is the caller's JSON."""

    run_id: str
    step: int | None
    identity: Mapping[str, Any]
    extra: Mapping[str, Any]
    rows: Sequence[SlotRow]
    directories: Sequence[str]
    piece_nbytes: int
    versions: int
    pins: int
    param_steps: Mapping[str, int] = field(default_factory=dict)


@lru_cache(maxsize=65536)
def _spec_text(spec: SlotSpec) -> str:
    """The part of a row that never changes; with 10,000 parameters it is nearly all of the manifest."""
    tensors = []
    for tensor in spec.tensors:
        facts: dict[str, Any] = {"name": tensor.name, "offset_nbytes": tensor.offset_nbytes}
        facts |= {"shape": tensor.shape, "dtype": tensor.dtype}
        if tensor.global_shape is not None:
            facts["global_shape"] = tensor.global_shape
        if tensor.shard_offset is not None:
            facts["shard_offset"] = tensor.shard_offset
        tensors.append(facts)
    row = {"name": spec.name, "nbytes": spec.nbytes, "dtype": spec.dtype, "shape": spec.shape}
    row |= {"state_class": spec.state_class, "rank": spec.rank, "world_size": spec.world_size, "tensors": tensors}
    return json.dumps(row)[:-1]


def _row_text(row: SlotRow) -> str:
    place = {"directory": row.directory, "file": row.file, "version": row.version}
    if row.digests is not None:
        place["xxh3"] = f"{hash_slot(row.digests):016x}"
        place["pieces"] = row.digests.astype(">u8").tobytes().hex()
    return f"{_spec_text(row.spec)}, {json.dumps(place)[1:]}"


def encode(manifest: Manifest) -> bytes:
    """The document. Raises OverspillError OVS504 when ``extra`` or ``identity`` is no JSON."""
    head: dict[str, Any] = {
        "run_id": manifest.run_id,
        "step": manifest.step,
        "hash": HASH_NAME,
        "piece_nbytes": manifest.piece_nbytes,
    }
    head |= {"versions": manifest.versions, "pins": manifest.pins, "directories": list(manifest.directories)}
    head |= {"identity": manifest.identity, "extra": manifest.extra, "param_steps": manifest.param_steps}
    try:
        head_text = json.dumps(head, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise OverspillError(
            "OVS504",
            f"What goes into a commit must be JSON without NaN or infinity: {error}.",
            field="extra",
            next_step="Write tensors as text and leave out what is not a number.",
        ) from error
    rows = ",\n".join(_row_text(row) for row in manifest.rows)
    body = f'{head_text[:-1]}, "slots": [\n{rows}\n]}}'
    return ((_PREFIX % (FORMAT_VERSION, _checksum(FORMAT_VERSION, body))) + body + _SUFFIX).encode()


def _checksum(version: int, body: str) -> int:
    return hash_bytes(f"{version}\n{body}".encode())


def decode(data: bytes, path: Path) -> Manifest:
    """The manifest in ``data``. Raises OVS404 when it is not what was written, OVS407 for another format version."""
    try:
        document = parse_json(data, odd_texts=True)
        version, claimed = int(document["format_version"]), int(document["checksum"], 16)
        text, prefix = data.decode(), _PREFIX % (version, claimed)
        whole = document["format"] == "overspill-store" and text.startswith(prefix) and text.endswith(_SUFFIX)
        whole = whole and _checksum(version, text[len(prefix) : -len(_SUFFIX)]) == claimed
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, f"it is no manifest ({type(error).__name__})") from error
    if not whole:
        raise _damaged(path, "its checksum does not match its content")
    if version != FORMAT_VERSION:
        raise OverspillError(
            "OVS407", "This store has another format version.", field=str(path), value=version, limit=FORMAT_VERSION
        )
    return _from_body(document["body"])


def _damaged(path: Path, why: str) -> OverspillError:
    return OverspillError("OVS404", f"The manifest {path} is damaged: {why}.", field=str(path))


def _from_body(body: Mapping[str, Any]) -> Manifest:
    return Manifest(
        run_id=body["run_id"],
        step=body["step"],
        identity=body["identity"],
        extra=body["extra"],
        rows=tuple(_row_from(row) for row in body["slots"]),
        directories=tuple(body["directories"]),
        piece_nbytes=body["piece_nbytes"],
        versions=body["versions"],
        pins=body["pins"],
        param_steps=body["param_steps"],
    )


def _row_from(row: Mapping[str, Any]) -> SlotRow:
    tensors = tuple(
        TensorSpec(
            name=tensor["name"],
            offset_nbytes=tensor["offset_nbytes"],
            shape=tuple(tensor["shape"]),
            dtype=tensor["dtype"],
            global_shape=tuple(tensor["global_shape"]) if "global_shape" in tensor else None,
            shard_offset=tuple(tensor["shard_offset"]) if "shard_offset" in tensor else None,
        )
        for tensor in row["tensors"]
    )
    spec = SlotSpec(
        name=row["name"],
        dtype=row["dtype"],
        shape=tuple(row["shape"]),
        nbytes=row["nbytes"],
        state_class=row["state_class"],
        tensors=tensors,
        rank=row["rank"],
        world_size=row["world_size"],
    )
    digests = np.frombuffer(bytes.fromhex(row["pieces"]), dtype=">u8").astype(np.uint64) if "pieces" in row else None
    return SlotRow(spec=spec, directory=row["directory"], file=row["file"], version=row["version"], digests=digests)


def read_manifest(io: FileIO, path: Path) -> Manifest:
    """Read and check a manifest file. Raises OVS404 (missing, damaged), OVS407, OVS402 or OVS403."""
    return decode(read_file(io, path, "read the manifest"), path)
