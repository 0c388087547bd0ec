"""From what is alive to what the card shows: the allocator's holdings, the context, communicators; and the interval.

Reserved: the replay of the step's allocations (stream.py) through the allocator's model. nvidia-smi: reserved plus the
context and, with several ranks, NCCL's communicators (catalog/overheads.toml, each size with its source). Low: the
replay under the card's capacity, the smallest context; high: the replay without one, the largest, and fragmentation by
streams where collectives run beside the computation. docs/theory/reserved.md derives both, and says what is not known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from overspill.catalog.overheads import context, nccl_communicator
from overspill.forecast.allocator import Replay, replay
from overspill.forecast.allocator_settings import AllocatorSettings
from overspill.forecast.device.settings import Resolved
from overspill.forecast.device.stream import LOADING
from overspill.forecast.events import Event, Kind

__all__ = ["Range", "Shown", "needed", "probability_above", "shown"]

#: Communicators that a process makes beside the world's: one for each kind of group that it is in.
_WORLD = 1
#: What is uncertain of allocated itself: batches that differ from the one forecast, kernels of another version.
#: Source: the scoreboard's 90th percentile of |error|, docs/scoreboard.md.
ALLOCATED_SPREAD = 0.03
#: The same under torch.compile, whose fusion and buffer reuse differ by release and are not modelled: the range of one
#: configuration over the torch and torchtitan releases of a year (pytorch/ao, docs/source/workflows/training.md:
#: 33.7 to 47.7).
COMPILED_SPREAD = 0.12


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes: likely, and a 90 % interval."""

    low: int
    likely: int
    high: int


@dataclass(frozen=True, slots=True)
class Shown:
    """What the allocator holds, and what nvidia-smi shows."""

    reserved: Range
    smi: Range


def needed(allocated_nbytes: int, resolved: Resolved, *, torch: str | None = None) -> tuple[Range, Range]:
    """(allocated, what the card must have): the latter when the allocator gives back all that it caches."""
    low_extra, high_extra = _outside(resolved, torch)
    spread = round(allocated_nbytes * (COMPILED_SPREAD if resolved.style.compiled else ALLOCATED_SPREAD))
    allocated = Range(allocated_nbytes - spread, allocated_nbytes, allocated_nbytes + spread)
    middle = (low_extra + high_extra) // 2
    return allocated, Range(allocated.low + low_extra, allocated.likely + middle, allocated.high + high_extra)


def shown(
    allocated_nbytes: int,
    events: list[Event],
    resolved: Resolved,
    settings: AllocatorSettings,
    *,
    capacity_nbytes: int | None,
    torch: str | None = None,
    logits_nbytes: int = 0,
    loaded_nbytes: int = 0,
) -> Shown:
    """The figures of one rank. capacity_nbytes: what the runtime offers, less what others hold; None: not known.
    logits_nbytes: of the peak, where it is in the loss. loaded_nbytes: of a model that is whole on the card before it
    is split ([Note: Loaded whole])."""
    free = replay(events, settings)
    likely = allocated_nbytes + free.reserved_peak_nbytes - _alive(events, free)
    low_extra, high_extra = _outside(resolved, torch)
    fits = capacity_nbytes is not None and allocated_nbytes + low_extra <= capacity_nbytes
    if capacity_nbytes is not None and fits:
        likely = max(allocated_nbytes, min(likely, capacity_nbytes - low_extra))
    streams = _stream_nbytes(resolved, likely - allocated_nbytes, allocated_nbytes)
    stranded = logits_nbytes if not resolved.compiled_loss else 0
    block = min(_largest_transient(events), stranded) if stranded else 0
    spread = COMPILED_SPREAD if resolved.style.compiled else ALLOCATED_SPREAD
    low = round(min(likely, max(allocated_nbytes * (1 - spread), likely * (1 - spread))))
    high = round(likely * (1 + 2 * spread)) + streams + 2 * block
    likely += block
    middle = (low_extra + high_extra) // 2
    reserved = Range(low, likely + streams // 2, high)
    if loaded_nbytes:
        # [Note: Loaded whole] A quantised model is made on every card before FSDP splits it, unit by unit, while the
        # whole one is still there: at most a share comes on top, and the allocator keeps what it had.
        share = loaded_nbytes // max(1, resolved.sharding.ranks)
        low, high = max(low, loaded_nbytes), max(high, loaded_nbytes + share)
        reserved = Range(low, max(reserved.likely, loaded_nbytes + share // 2), high)
    smi = Range(low + low_extra, reserved.likely + middle, high + high_extra)
    if capacity_nbytes is not None and fits:
        reserved = _capped(reserved, capacity_nbytes - low_extra)
        smi = _capped(smi, capacity_nbytes)
    return Shown(reserved, smi)


def _alive(events: list[Event], replayed: Replay) -> int:
    """The highest that was allocated in a step; loading, which may stand higher, is not what the closed form counts."""
    begin = next((index for index, event in enumerate(events) if event.phase != LOADING), 0)
    return max(replayed.allocated_nbytes[begin:], default=0)


def _outside(resolved: Resolved, torch: str | None) -> tuple[int, int]:
    """Least and most of what the process holds beside torch's allocator."""
    bare, one = context(torch=torch), nccl_communicator()
    low, high = bare.low_nbytes, bare.high_nbytes
    communicators = _communicators(resolved)
    if communicators:
        low += one.low_nbytes
        high += communicators * one.high_nbytes
    return low, high


def _largest_transient(events: list[Event]) -> int:
    """[Note: Odd blocks] The largest block that comes and goes. Logits, their fp32 copy and the shifted one are a row
    apart in size: a cached block that is a little too small serves none of them, and stays until the card is full. How
    many of that size are stranded depends on the order of first use: none to two, mostly one."""
    gone = {event.block for event in events if event.kind is not Kind.MALLOC}
    return max((event.nbytes for event in events if event.kind is Kind.MALLOC and event.block in gone), default=0)


def _capped(one: Range, capacity: int) -> Range:
    likely = min(one.likely, capacity)
    return Range(min(one.low, capacity), likely, max(min(one.high, capacity), likely))


def _communicators(resolved: Resolved) -> int:
    groups = [resolved.sharding.ranks, resolved.tensor, resolved.context, resolved.expert, resolved.pipeline]
    return 0 if all(size == 1 for size in groups) else _WORLD + sum(size > 1 for size in groups[1:])


def _stream_nbytes(resolved: Resolved, cached: int, allocated: int) -> int:
    """Blocks that a collective's stream still uses when their owner lets go (record_stream) cannot be reused at once:
    at worst as much again as the transient part has cached."""
    if not resolved.sharding.splits_weights or resolved.sharding.kind == "fsdp2":
        return 0  # FSDP2 waits for events instead (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)
    return max(cached, allocated // 10)


def probability_above(one: Range, limit: int) -> float:
    """The probability that the figure exceeds ``limit``: a normal curve of which the interval holds 90 %."""
    half = (one.high - one.low) / 2
    if half <= 0:
        return float(one.likely > limit)
    sigma = half / 1.645
    centre = (one.high + one.low) / 2
    return 0.5 * math.erfc((limit - centre) / (sigma * math.sqrt(2)))
