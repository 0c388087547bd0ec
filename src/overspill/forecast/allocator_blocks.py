"""The pieces that the caching allocator's model (forecast/allocator.py) moves: blocks of memory, and pools of them.

A block knows its neighbours in its segment; a pool keeps the free ones ordered by stream and size for best fit, and the
unmapped ones of expandable segments by address.
"""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Block", "Pool", "link", "reach"]


class Block:
    __slots__ = (
        "address",
        "allocated",
        "expandable",
        "mapped",
        "nbytes",
        "next",
        "pending",
        "pool",
        "prev",
        "seen",
        "stream",
    )

    def __init__(self, pool: Pool, stream: int, address: int, nbytes: int) -> None:
        self.pool = pool
        self.stream = stream
        self.address = address
        self.nbytes = nbytes
        self.prev: Block | None = None
        self.next: Block | None = None
        self.allocated = False
        self.pending = False  # freed, but another stream has not passed yet
        self.mapped = True
        self.expandable = 0  # size of its expandable segment's pages; 0: an ordinary segment
        self.seen = 0  # the pool's count of searches when it became free, for garbage collection

    @property
    def free(self) -> bool:
        return not self.allocated and not self.pending

    @property
    def split(self) -> bool:
        return self.prev is not None or self.next is not None


class Pool:
    """Free blocks ordered by stream, size and address; unmapped ones by address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.keys: list[tuple[int, int, int]] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[tuple[int, int]] = []
        self.holes: dict[int, Block] = {}
        self.searches = 0

    def insert(self, block: Block) -> None:
        block.seen = self.searches
        insort(self.keys, (block.stream, block.nbytes, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, (block.stream, block.nbytes, block.address))]
        del self.blocks[block.address]

    def insert_hole(self, block: Block) -> None:
        insort(self.unmapped, (block.stream, block.address))
        self.holes[block.address] = block

    def remove_hole(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]
        del self.holes[block.address]


def reach(block: Block) -> int:
    after = block.next
    return block.nbytes + (after.nbytes if after is not None and not after.mapped else 0)


def link(block: Block, prev: Block | None, following: Block | None) -> None:
    block.prev, block.next = prev, following
    if prev is not None:
        prev.next = block
    if following is not None:
        following.prev = block
