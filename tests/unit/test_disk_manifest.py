"""The manifest's format: it comes back as it was, any change to it is noticed, and sets of ranges are sets."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from disk_cases import slot
from hypothesis import given
from hypothesis import strategies as st

from overspill.errors import OverspillError
from overspill.tiers.disk.checksum import HASH_NAME, _hash_pieces_python, hash_bytes, hash_pieces, hash_slot
from overspill.tiers.disk.layout import TensorSpec
from overspill.tiers.disk.manifest import FORMAT_VERSION, Manifest, SlotRow, decode, encode
from overspill.tiers.disk.version import Ranges

PATH = Path("manifest.json")
names = st.text("abcXYZ019._-", min_size=1, max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
shards = st.none() | st.tuples(st.integers(0, 9), st.integers(1, 9))
tensors = st.builds(
    TensorSpec,
    name=st.text(min_size=1),
    offset_nbytes=st.integers(0, 10**12),
    shape=st.lists(st.integers(0, 10**6), max_size=4).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    global_shape=shards,
    shard_offset=shards,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    rows = []
    for name in draw(st.lists(names, unique=True, max_size=3)):
        spec = replace(slot(name, 10), tensors=tuple(draw(st.lists(tensors, max_size=2))), rank=1, world_size=2)
        digests = draw(st.none() | st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4))
        if digests is None:
            rows.append(SlotRow(spec, 0))
        else:
            rows.append(SlotRow(spec, 1, "slots/f00000001.bin", 3, np.array(digests, dtype=np.uint64)))
    return Manifest(
        run_id="r",
        step=draw(st.none() | st.integers(0)),
        identity=draw(st.dictionaries(st.text(), json_values, max_size=2)),
        extra=draw(st.dictionaries(st.text(), json_values, max_size=2)),
        rows=tuple(rows),
        directories=(".", "/disk2/overspill-1"),
        piece_nbytes=4096,
        versions=2,
        pins=1,
        param_steps=draw(st.dictionaries(st.text(), st.integers(0), max_size=3)),
    )


@given(manifests())
def test_a_manifest_comes_back_as_it_was_and_is_json(manifest: Manifest) -> None:
    data = encode(manifest)
    assert json.loads(data)["format"] == "overspill-store"
    again = decode(data, PATH)
    plain = replace(manifest, rows=())
    assert replace(again, rows=()) == plain
    assert encode(again) == data
    for row, same in zip(manifest.rows, again.rows, strict=True):
        assert (row.spec, row.directory, row.file, row.version) == (same.spec, same.directory, same.file, same.version)
        assert (row.digests is None) == (same.digests is None)
        assert row.digests is None or np.array_equal(row.digests, same.digests)  # type: ignore[arg-type]


@given(manifests(), st.data())
def test_any_flipped_bit_or_lost_end_of_a_manifest_is_noticed(manifest: Manifest, data: st.DataObject) -> None:
    good = encode(manifest)
    bad = bytearray(good)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(good) - 1))
        bad[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del bad[data.draw(st.integers(0, len(good) - 1)) :]
    with pytest.raises(OverspillError, match="OVS404"):
        decode(bytes(bad), PATH)


def test_a_whole_manifest_of_a_later_format_is_told_from_a_damaged_one() -> None:
    body = '{"new": 1}'
    version = FORMAT_VERSION + 1
    checksum = hash_bytes(f"{version}\n{body}".encode())
    text = '{"format": "overspill-store", "format_version": %d, "checksum": "%016x", "body": %s}\n'
    with pytest.raises(OverspillError, match="OVS407"):
        decode((text % (version, checksum, body)).encode(), PATH)


@pytest.mark.parametrize("extra", [{"loss": math.nan}, {"loss": math.inf}, {"state": object()}, {"raw": b"bytes"}])
def test_what_is_no_json_is_refused(extra: dict[str, object]) -> None:
    manifest = Manifest("r", 1, {}, extra, (), ("."), 4096, 2, 1)
    with pytest.raises(OverspillError, match="OVS504"):
        encode(manifest)


@given(st.binary(min_size=1, max_size=20000), st.sampled_from([4096, 8192]))
def test_the_native_and_the_python_checksum_agree(data: bytes, piece_nbytes: int) -> None:
    digests = hash_pieces(memoryview(data), piece_nbytes)
    assert np.array_equal(digests, _hash_pieces_python(memoryview(data), piece_nbytes))
    assert hash_slot(digests) == hash_bytes(b"".join(int(digest).to_bytes(8, "little") for digest in digests))


def test_the_hash_is_xxh3() -> None:
    assert (HASH_NAME, hash_bytes(b"")) == ("xxh3-64", 0x2D06800538D394C2)  # XXH3_64bits of nothing, seed 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 20)), max_size=30), st.integers(0, 70))
def test_ranges_are_a_set_of_bytes(changes: list[tuple[bool, int, int]], look_at: int) -> None:
    ranges, model = Ranges(), set[int]()
    for adds, start, length in changes:
        span = range(start, start + length)
        if adds:
            ranges.add(start, start + length)
            model |= set(span)
        else:
            ranges.remove(start, start + length)
            model -= set(span)
        listed = list(ranges)
        assert {at for low, high in listed for at in range(low, high)} == model
        assert all(before[1] < after[0] for before, after in pairwise(listed))
    parts = list(ranges.split(look_at, 80))
    assert [at for low, high, _ in parts for at in range(low, high)] == list(range(look_at, 80))
    assert all((at in model) == inside for low, high, inside in parts for at in range(low, high))
