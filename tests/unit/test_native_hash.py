"""XXH3-64 against the xxhash package, over every kind of buffer; and the malloc settings."""

from __future__ import annotations

import mmap
import os
import platform

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill import _native


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=3000))
def test_the_hash_is_xxh3_64(data: bytes) -> None:
    assert _native.xxh3_64(data) == xxhash.xxh3_64_intdigest(data)


@settings(max_examples=50, deadline=None)
@given(nbytes=st.integers(0, 5000), piece=st.integers(1, 6000))
def test_pieces_are_hashed_one_by_one_and_the_last_may_be_short(nbytes: int, piece: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    expected = [xxhash.xxh3_64_intdigest(data[at : at + piece]) for at in range(0, nbytes, piece)]
    hashes = _native.xxh3_pieces(data, piece)
    assert hashes.dtype == np.uint64 and hashes.tolist() == expected


def test_every_contiguous_buffer_is_taken_as_it_lies() -> None:
    data = os.urandom(8192)
    expected = xxhash.xxh3_64_intdigest(data)
    with mmap.mmap(-1, 8192) as mapped:
        mapped[:] = data
        array = np.frombuffer(data, np.int16)
        assert not array.flags.writeable
        tensor = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
        matrix = tensor.view(64, -1)
        for buffer in (data, bytearray(data), memoryview(data), memoryview(mapped), mapped, array, tensor, matrix):
            assert _native.xxh3_64(buffer) == expected
            assert _native.xxh3_pieces(buffer, 8192).tolist() == [expected]
        assert _native.xxh3_64(memoryview(mapped)[16:4000]) == xxhash.xxh3_64_intdigest(data[16:4000])
    # The with statement closed the mapping: no buffer was kept, or that would have been a BufferError.


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(10)[::2],
        torch.zeros(10)[::2],
        memoryview(bytes(10))[::2],
        "text",
        3,
        None,
        torch.zeros(3, device="meta"),
    ],
)
def test_what_is_no_contiguous_buffer_is_refused(buffer: object) -> None:
    with pytest.raises(TypeError):
        _native.xxh3_64(buffer)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _native.xxh3_pieces(buffer, 4)  # type: ignore[arg-type]


def test_a_piece_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        _native.xxh3_pieces(b"abc", 0)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only")
def test_malloc_can_be_set_and_trimmed() -> None:
    assert _native.set_malloc(mmap_threshold_nbytes=1 << 20, trim_threshold_nbytes=1 << 20, arena_max=2)
    kept = [bytearray(100_000) for _ in range(200)]
    del kept[::2]
    assert isinstance(_native.malloc_trim(), bool)
