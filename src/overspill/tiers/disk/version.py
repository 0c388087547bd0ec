"""One version of one slot: its file, which ranges of it are written, and which pieces have a checksum.

A working version fills up range by range, in any order; a range being rewritten counts as unwritten until the
write has ended, so that a failed write can never be committed. No I/O here; the store holds the lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from overspill.tiers.disk.checksum import Digests
from overspill.tiers.disk.pool import SlotFile

__all__ = ["Ranges", "Version"]


class Ranges:
    """A set of bytes as sorted, disjoint, non-touching half-open ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._ends, strict=True))

    def add(self, start: int, end: int) -> None:
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last], self._ends[first:last] = [start], [end]

    def remove(self, start: int, end: int) -> None:
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        kept = [
            (low, high)
            for low, high in (((self._starts[first], start), (end, self._ends[last - 1])) if first < last else ())
            if low < high
        ]
        self._starts[first:last] = [low for low, _ in kept]
        self._ends[first:last] = [high for _, high in kept]

    def split(self, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """``[start, end)`` cut where membership changes: (start, end, inside)."""
        index = bisect_right(self._ends, start)
        while start < end:
            if index < len(self._starts) and self._starts[index] <= start:
                stop = min(end, self._ends[index])
                yield start, stop, True
                index += 1
            else:
                stop = min(end, self._starts[index]) if index < len(self._starts) else end
                yield start, stop, False
            start = stop


class Version:
    """``digests[i]`` is valid where ``hashed[i]``. ``step`` is set when the version is committed."""

    def __init__(self, file: SlotFile, nbytes: int, piece_nbytes: int) -> None:
        self.file = file
        self.nbytes = nbytes
        self.piece_nbytes = piece_nbytes
        n_pieces = -(-nbytes // piece_nbytes)
        self.digests: Digests = np.zeros(n_pieces, dtype=np.uint64)
        self.hashed: npt.NDArray[np.bool_] = np.zeros(n_pieces, dtype=np.bool_)
        self.written = Ranges()
        self.writers = 0
        self.step: int | None = None

    @classmethod
    def committed(cls, file: SlotFile, nbytes: int, piece_nbytes: int, digests: Digests, step: int | None) -> Version:
        version = cls(file, nbytes, piece_nbytes)
        version.digests = digests
        version.hashed[:] = True
        version.written.add(0, nbytes)
        version.step = step
        return version

    def whole_pieces(self, start: int, end: int) -> tuple[int, int]:
        """First and one past the last piece that lies entirely in ``[start, end)``; the last piece may be short."""
        first = -(-start // self.piece_nbytes)
        last = len(self.digests) if end == self.nbytes else end // self.piece_nbytes
        return first, max(first, last)

    def piece_range(self, piece: int) -> tuple[int, int]:
        start = piece * self.piece_nbytes
        return start, min(start + self.piece_nbytes, self.nbytes)

    def begin_write(self, start: int, end: int) -> None:
        self.writers += 1
        self.written.remove(start, end)
        self.hashed[start // self.piece_nbytes : -(-end // self.piece_nbytes)] = False

    def end_write(self, start: int, end: int, digests: Digests | None) -> None:
        """The bytes are in the file. ``digests``: of the whole pieces in the range."""
        self.writers -= 1
        self.written.add(start, end)
        if digests is not None:
            first, last = self.whole_pieces(start, end)
            self.digests[first:last] = digests
            self.hashed[first:last] = True

    def fail_write(self) -> None:
        self.writers -= 1

    def missing(self) -> tuple[int, int] | None:
        """The first range that was never written, if any."""
        for start, end, inside in self.written.split(0, self.nbytes):
            if not inside:
                return start, end
        return None
