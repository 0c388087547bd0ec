"""The one place that chooses the checksum: XXH3-64, over pieces of fixed length, then over their digests.

Two levels, so that pieces can be written, hashed and checked in any order and from any thread, and so that
damage can be placed to within one piece. The native core and the xxhash package give the same digests (a test
holds them equal); the native one hashes a whole request in one call without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["HASH_NAME", "Digests", "hash_bytes", "hash_pieces", "hash_slot"]

HASH_NAME: Final = "xxh3-64"
Digests = npt.NDArray[np.uint64]


def _hash_pieces_python(buffer: memoryview, piece_nbytes: int) -> Digests:
    pieces = range(0, len(buffer), piece_nbytes)
    digests = (xxhash.xxh3_64_intdigest(buffer[start : start + piece_nbytes]) for start in pieces)
    return np.fromiter(digests, dtype=np.uint64, count=len(pieces))


def _choose() -> Callable[[memoryview, int], Digests]:
    try:
        from overspill import _native
    except ImportError:  # a source tree that has not been built yet
        return _hash_pieces_python
    native: Any = _native

    def hash_pieces_native(buffer: memoryview, piece_nbytes: int) -> Digests:
        digests = native.xxh3_pieces(np.frombuffer(buffer, dtype=np.uint8), piece_nbytes)
        return np.asarray(digests, dtype=np.uint64)

    return hash_pieces_native if hasattr(native, "xxh3_pieces") else _hash_pieces_python


hash_pieces: Final = _choose()
"""Digest of each piece of ``buffer`` (bytes, at least one), the last piece as long as what is left."""


def hash_bytes(data: bytes) -> int:
    """Digest of a small thing, such as a manifest."""
    return xxhash.xxh3_64_intdigest(data)


def hash_slot(digests: Digests) -> int:
    """Digest of a slot: the hash of its pieces' digests, as little-endian 64-bit numbers."""
    return hash_bytes(digests.astype("<u8").tobytes())
