"""A shuffled order that takes no memory: position → index by a keyed permutation, anew for each epoch.

A Feistel network over a grid of about n cells (a × b ≥ n, rounds add modulo a and b, so each round can be undone),
walked until the cell is below n (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). So any position
of any epoch can be asked for at once, which is what a resume needs, and the order depends on nothing but
(seed, n, epoch): not on numpy's or torch's generators, whose streams may change between versions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["Order"]

_ROUNDS: Final = 10
_MASK: Final = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every input bit moves every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class Order:
    """The order of ``n`` sequences in each epoch.

    Args:
        seed: of the shuffle.
        n: how many sequences there are, at least 1.
        shuffle: False gives 0, 1, … in every epoch.
    """

    seed: int
    n: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        assert self.n >= 1, self.n

    def index(self, epoch: int, position: int) -> int:
        """Which sequence stands at ``position`` (0 … n-1) of ``epoch``."""
        assert 0 <= position < self.n and epoch >= 0, (epoch, position)
        if not self.shuffle:
            return position
        key = _mix(_mix(self.seed & _MASK) ^ epoch)
        rows = math.isqrt(self.n - 1) + 1
        columns = -(-self.n // rows)
        cell = position
        while True:
            cell = _permute(cell, rows, columns, key)
            if cell < self.n:
                return cell

    def at(self, position: int) -> int:
        """The same for a position that counts through all epochs."""
        epoch, within = divmod(position, self.n)
        return self.index(epoch, within)


def _permute(cell: int, rows: int, columns: int, key: int) -> int:
    row, column = divmod(cell, columns)
    for number in range(_ROUNDS):
        round_key = _mix(key ^ number)
        if number % 2 == 0:
            row = (row + _mix(round_key ^ column)) % rows
        else:
            column = (column + _mix(round_key ^ row)) % columns
    return row * columns + column
