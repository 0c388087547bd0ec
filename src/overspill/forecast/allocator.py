"""A model of torch's CUDA caching allocator: from allocation events to memory allocated and reserved over time.

It follows the rules of torch's c10/cuda/CUDACachingAllocator.cpp (read at 2.13), rewritten here as plain data
structures: rounding, two pools, best fit per stream, splitting and merging, what happens when the device is full, and
expandable segments. docs/theory/trace.md lists the rules with the constants' names. Private pools (CUDA graphs) and
other processes are not in it. Pure Python: a step of a 70B model takes about a second.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from overspill.forecast.allocator_blocks import Block, Pool, link, reach
from overspill.forecast.allocator_settings import AllocatorSettings
from overspill.forecast.events import GRANULE_NBYTES, BlockMisuse, Event, Kind
from overspill.units import MiB, TiB

__all__ = ["CachingAllocator", "OutOfMemory", "Replay", "replay"]

SMALL_REQUEST_NBYTES: Final = MiB  # kSmallSize: up to here the small pool
SMALL_SEGMENT_NBYTES: Final = 2 * MiB  # kSmallBuffer
LARGE_SEGMENT_NBYTES: Final = 20 * MiB  # kLargeBuffer
OWN_SEGMENT_NBYTES: Final = 10 * MiB  # kMinLargeAlloc: from here a segment of the request's own size
SEGMENT_STEP_NBYTES: Final = 2 * MiB  # kRoundLarge
_UNLIMITED_ADDRESSES_NBYTES: Final = 16 * TiB


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The request that could not be served, also after everything cached was given back."""

    event: int
    nbytes: int
    reserved_nbytes: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator held. Lists have one value for each event, after it; shorter after an out-of-memory."""

    allocated_peak_nbytes: int
    reserved_peak_nbytes: int
    allocated_nbytes: array[int]
    reserved_nbytes: array[int]
    retries: int
    """How often cached memory had to be given back to serve a request (num_alloc_retries)."""
    out_of_memory: OutOfMemory | None


class CachingAllocator:
    """The allocator's state. ``malloc`` and ``free`` take the caller's names for blocks."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.allocated_nbytes = 0
        self.reserved_nbytes = 0
        self.retries = 0
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._live: dict[int, Block] = {}
        self._waiting: dict[int, Block] = {}
        self._next_address = 0
        self._max_split = settings.max_split_nbytes
        capacity, fraction = settings.capacity_nbytes, settings.memory_fraction
        self._allowed = int(capacity * fraction) if capacity is not None and fraction is not None else None

    # ---- the interface ----

    def malloc(self, name: int, nbytes: int, stream: int = 0) -> bool:
        """False: out of memory."""
        if name in self._live:
            raise BlockMisuse(f"block {name} is allocated already")
        size = self.round_size(nbytes)
        pool = self._small if size <= SMALL_REQUEST_NBYTES else self._large
        block = self._find(pool, stream, size)
        if block is None:
            block = self._grow(pool, stream, size)
        if block is None:
            return False
        if self._should_split(block, size):
            rest = Block(pool, stream, block.address + size, block.nbytes - size)
            rest.expandable = block.expandable
            link(rest, block, block.next)
            block.nbytes = size
            pool.insert(rest)
        block.allocated = True
        self._live[name] = block
        self.allocated_nbytes += block.nbytes
        return True

    def free(self, name: int) -> None:
        self._reuse(self._release(name))

    def request_free(self, name: int) -> None:
        """A free while another stream still uses the block; `complete_free` follows."""
        block = self._release(name)
        block.pending = True
        self._waiting[name] = block

    def complete_free(self, name: int) -> None:
        block = self._waiting.pop(name, None)
        if block is not None:  # a retry may have waited for it already
            block.pending = False
            self._reuse(block)

    def round_size(self, nbytes: int) -> int:
        """Rule `rounding`."""
        if nbytes < GRANULE_NBYTES:
            return GRANULE_NBYTES
        divisions = self.settings.divisions(nbytes) if self.settings.roundup_power2_divisions else 0
        if divisions > 1 and nbytes > GRANULE_NBYTES * divisions:
            floor = 1 << (nbytes.bit_length() - 1)
            if nbytes == floor:
                return nbytes
            step = floor // divisions
            return -(-nbytes // step) * step
        return -(-nbytes // GRANULE_NBYTES) * GRANULE_NBYTES

    def blocks(self) -> list[tuple[int, int, bool]]:
        """(address, bytes, allocated) of every mapped block, by address. For checks."""
        found = [*self._live.values(), *self._waiting.values()]
        found += [*self._small.blocks.values(), *self._large.blocks.values()]
        return sorted((block.address, block.nbytes, block.allocated) for block in found)

    # ---- searching ----

    def _find(self, pool: Pool, stream: int, size: int) -> Block | None:
        """Rule `best fit`."""
        if self._allowed is not None and self.settings.garbage_collection_threshold > 0:
            pool.searches += 1
        at = bisect_left(pool.keys, (stream, size, -1))
        if at == len(pool.keys) or pool.keys[at][0] != stream:
            return None
        block = pool.blocks[pool.keys[at][2]]
        if block.expandable:
            # A block at the end of what is mapped counts with the addresses that it can still grow into.
            while at + 1 < len(pool.keys) and pool.keys[at + 1][0] == stream:
                other = pool.blocks[pool.keys[at + 1][2]]
                if not block.expandable or reach(other) >= reach(block):
                    break
                block, at = other, at + 1
        if self._max_split is not None:
            if size < self._max_split <= block.nbytes:
                return None
            if size >= self._max_split and block.nbytes >= size + self.settings.max_non_split_rounding_nbytes:
                return None
        pool.remove(block)
        return block

    def _should_split(self, block: Block, size: int) -> bool:
        """Rule `split`."""
        rest = block.nbytes - size
        if block.pool.small or self.settings.expandable_segments:
            return rest >= GRANULE_NBYTES
        return (self._max_split is None or size < self._max_split) and rest > SMALL_REQUEST_NBYTES

    # ---- growing and shrinking ----

    def _grow(self, pool: Pool, stream: int, size: int) -> Block | None:
        """Rules `segments` and `retry`."""
        if self._allowed is not None and self.settings.garbage_collection_threshold > 0:
            self._collect_garbage()
        block = self._new_segment(pool, stream, size)
        if block is None and self._release_oversized(pool, stream, size):
            block = self._new_segment(pool, stream, size)
        if block is None:
            self._release_cached()
            self.retries += 1
            block = self._new_segment(pool, stream, size)
        return block

    def _may_take(self, nbytes: int) -> bool:
        limits = [limit for limit in (self._allowed, self.settings.capacity_nbytes) if limit is not None]
        return not limits or self.reserved_nbytes + nbytes <= min(limits)

    def _new_segment(self, pool: Pool, stream: int, size: int) -> Block | None:
        if self.settings.expandable_segments:
            return self._expand(pool, stream, size)
        if size <= SMALL_REQUEST_NBYTES:
            nbytes = SMALL_SEGMENT_NBYTES
        elif size < OWN_SEGMENT_NBYTES:
            nbytes = LARGE_SEGMENT_NBYTES
        else:
            nbytes = -(-size // SEGMENT_STEP_NBYTES) * SEGMENT_STEP_NBYTES
        if not self._may_take(nbytes):
            return None
        self.reserved_nbytes += nbytes
        return Block(pool, stream, self._addresses(nbytes), nbytes)

    def _addresses(self, nbytes: int) -> int:
        """Fresh addresses; they start at a multiple of every page size, which `_unmap` relies on."""
        address = self._next_address
        self._next_address += -(-nbytes // LARGE_SEGMENT_NBYTES) * LARGE_SEGMENT_NBYTES
        return address

    def _release(self, name: int) -> Block:
        block = self._live.pop(name, None)
        if block is None:
            raise BlockMisuse(f"block {name} is not allocated")
        block.allocated = False
        self.allocated_nbytes -= block.nbytes
        return block

    def _reuse(self, block: Block) -> None:
        self._merge(block, block.prev)
        self._merge(block, block.next)
        block.pool.insert(block)

    def _merge(self, block: Block, other: Block | None) -> None:
        """Takes a free neighbour into ``block``, which is in no list."""
        if other is None or not other.free or other.mapped != block.mapped:
            return
        if other.mapped:
            block.pool.remove(other)
        else:
            block.pool.remove_hole(other)
        if block.prev is other:
            block.address = other.address
            block.prev = other.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.prev = block
        block.nbytes += other.nbytes

    def _give_back(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_nbytes -= block.nbytes

    def _release_oversized(self, pool: Pool, stream: int, size: int) -> bool:
        """Rule `oversized blocks first`: only with max_split_size_mb."""
        if self._max_split is None:
            return False
        wanted = max(size, self._max_split)
        at = bisect_left(pool.keys, (stream, wanted, -1))
        if at < len(pool.keys) and pool.keys[at][0] == stream and not pool.blocks[pool.keys[at][2]].expandable:
            self._give_back(pool.blocks[pool.keys[at][2]])
            return True
        released = 0
        while at > 0 and released < wanted:
            key = pool.keys[at - 1]
            block = pool.blocks[key[2]]
            at -= 1
            if key[0] != stream or key[1] < self._max_split:
                break
            if block.expandable or block.split:
                continue
            released += block.nbytes
            self._give_back(block)
        return released >= wanted

    def _release_cached(self) -> None:
        """Rule `retry`: wait for other streams, then give back every segment that nothing uses."""
        for name in list(self._waiting):
            self.complete_free(name)
        for pool in (self._large, self._small):
            for block in list(pool.blocks.values()):
                if block.expandable:
                    self._unmap(block)
                elif not block.split:
                    self._give_back(block)

    def _collect_garbage(self) -> None:
        """Rule `garbage collection`: the oldest unused segments of the large pool, until below the threshold."""
        assert self._allowed is not None
        threshold = int(self.settings.garbage_collection_threshold * self._allowed)
        if self.reserved_nbytes <= threshold:
            return
        target = self.reserved_nbytes - threshold
        pool = self._large
        unused = [block for block in pool.blocks.values() if not block.split and not block.expandable]
        age = sum(pool.searches - block.seen for block in unused)
        reclaimed, progress = 0, True
        while reclaimed < target and progress and unused:
            limit = age / len(unused)
            progress = False
            for block in sorted(unused, key=lambda b: (b.stream, b.nbytes, b.address)):
                if pool.searches - block.seen >= limit:
                    progress = True
                    reclaimed += block.nbytes
                    age -= pool.searches - block.seen
                    unused.remove(block)
                    self._give_back(block)

    # ---- expandable segments ----

    def _expand(self, pool: Pool, stream: int, size: int) -> Block | None:
        """Rule `expandable segments`: one range of addresses per stream and pool, mapped page by page."""
        block = self._room(pool, stream, size)
        if not block.mapped and not self._map(block, min(block.nbytes, size)):
            return None
        while block.nbytes < size:
            hole = block.next
            assert hole is not None and not hole.mapped
            if not self._map(hole, min(size - block.nbytes, hole.nbytes)):
                return None
            block = hole  # it has swallowed the mapped block before it
        pool.remove(block)
        return block

    def _room(self, pool: Pool, stream: int, size: int) -> Block:
        """The lowest run of free and unmapped addresses that is long enough, or a new range."""
        for at in range(bisect_left(pool.unmapped, (stream, -1)), len(pool.unmapped)):
            if pool.unmapped[at][0] != stream:
                break
            start = pool.holes[pool.unmapped[at][1]]
            if start.prev is not None and start.prev.free:
                start = start.prev
            found, block = 0, start
            while found < size and block is not None and block.free:
                found += block.nbytes
                block = block.next  # type: ignore[assignment]
            if found >= size:
                return start
        capacity = self.settings.capacity_nbytes
        page = SMALL_SEGMENT_NBYTES if pool.small else LARGE_SEGMENT_NBYTES
        span = _UNLIMITED_ADDRESSES_NBYTES if capacity is None else capacity + capacity // 8
        span = -(-max(span, size) // page) * page
        block = Block(pool, stream, self._addresses(span), span)
        block.mapped, block.expandable = False, page
        pool.insert_hole(block)
        return block

    def _map(self, hole: Block, size: int) -> bool:
        pool, page = hole.pool, hole.expandable
        size = min(-(-size // page) * page, hole.nbytes)
        if not self._may_take(size):
            return False
        pool.remove_hole(hole)
        hole.mapped = True
        if size < hole.nbytes:
            rest = Block(pool, hole.stream, hole.address + size, hole.nbytes - size)
            rest.mapped, rest.expandable = False, page
            link(rest, hole, hole.next)
            hole.nbytes = size
            pool.insert_hole(rest)
        self.reserved_nbytes += size
        self._merge(hole, hole.prev)
        self._merge(hole, hole.next)
        pool.insert(hole)
        return True

    def _unmap(self, block: Block) -> None:
        """Gives back the whole pages inside a free block; what is left of a page at either end stays mapped."""
        pool, page = block.pool, block.expandable
        begin = -(-block.address // page) * page
        end = (block.address + block.nbytes) // page * page
        if begin >= end:
            return
        pool.remove(block)
        for address, nbytes, before in (
            (block.address, begin - block.address, True),
            (end, block.address + block.nbytes - end, False),
        ):
            if nbytes:
                part = Block(pool, block.stream, address, nbytes)
                part.expandable = page
                link(part, block.prev if before else block, block if before else block.next)
                pool.insert(part)
        block.address, block.nbytes, block.mapped = begin, end - begin, False
        self.reserved_nbytes -= block.nbytes
        self._merge(block, block.prev)
        self._merge(block, block.next)
        pool.insert_hole(block)


def replay(events: Iterable[Event], settings: AllocatorSettings | None = None) -> Replay:
    """Runs events through the model. Stops at the first request that cannot be served.

    Raises BlockMisuse when the events are no history.
    """
    allocator = CachingAllocator(settings or AllocatorSettings())
    allocated, reserved = array("q"), array("q")
    allocated_peak = reserved_peak = 0
    failed: OutOfMemory | None = None
    for index, event in enumerate(events):
        if event.kind == Kind.MALLOC:
            if not allocator.malloc(event.block, event.nbytes, event.stream):
                failed = OutOfMemory(event=index, nbytes=event.nbytes, reserved_nbytes=allocator.reserved_nbytes)
                break
            allocated_peak = max(allocated_peak, allocator.allocated_nbytes)
            reserved_peak = max(reserved_peak, allocator.reserved_nbytes)
        elif event.kind == Kind.FREE:
            allocator.free(event.block)
        elif event.kind == Kind.FREE_REQUESTED:
            allocator.request_free(event.block)
        else:
            allocator.complete_free(event.block)
        allocated.append(allocator.allocated_nbytes)
        reserved.append(allocator.reserved_nbytes)
    return Replay(
        allocated_peak_nbytes=allocated_peak,
        reserved_peak_nbytes=reserved_peak,
        allocated_nbytes=allocated,
        reserved_nbytes=reserved,
        retries=allocator.retries,
        out_of_memory=failed,
    )
