"""Reads a recorded history of the real CUDA allocator, so that the model can be held against it.

`torch.cuda.memory._record_memory_history()` and `torch.cuda.memory._snapshot()` give ``device_traces``: what was
asked of the allocator and what it asked of the driver. The first becomes events; the second is what a replay of them
is compared with. Nothing is unpickled: the caller hands over the dictionary, or JSON that `compact` wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overspill.forecast.events import BlockMisuse, Event, Kind

__all__ = ["History", "compact", "read_history"]

_ACTIONS = {"alloc": Kind.MALLOC, "free_requested": Kind.FREE_REQUESTED, "free_completed": Kind.FREE_COMPLETED}
_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True)
class History:
    """Requests in order, and the device's own totals: bytes reserved from the driver at the peak and at the end."""

    events: tuple[Event, ...]
    reserved_peak_nbytes: int
    reserved_end_nbytes: int


def compact(snapshot: Mapping[str, Any], device: int = 0) -> list[list[int | str]]:
    """The rows (action, address, bytes, stream) of one device's trace: small, and plain JSON."""
    return [[e["action"], e["addr"], e["size"], e["stream"]] for e in snapshot["device_traces"][device] if "addr" in e]


def read_history(rows: Sequence[Sequence[Any]]) -> History:
    """Events of `compact` rows. Frees of blocks that are older than the recording are left out.

    Raises BlockMisuse for rows that are no history.
    """
    events: list[Event] = []
    blocks: dict[int, int] = {}
    waiting: dict[int, int] = {}
    streams: dict[int, int] = {}
    reserved = highest = 0
    for number, row in enumerate(rows):
        try:
            action, address, nbytes, stream = str(row[0]), int(row[1]), int(row[2]), int(row[3])
        except (IndexError, TypeError, ValueError):
            raise BlockMisuse(f"row {number} of the history is not action, address, bytes, stream") from None
        if action in _SEGMENTS:
            reserved += _SEGMENTS[action] * nbytes
            highest = max(highest, reserved)
            continue
        kind = _ACTIONS.get(action)
        if kind is Kind.MALLOC:
            blocks[address] = len(events)
            name, size = blocks[address], nbytes
        elif kind is Kind.FREE_REQUESTED and address in blocks:
            name, size = blocks.pop(address), nbytes
            waiting[address] = name
        elif kind is Kind.FREE_COMPLETED and address in waiting:
            name, size = waiting.pop(address), nbytes
        else:
            continue
        events.append(Event(kind, name, size, stream=streams.setdefault(stream, len(streams))))
    return History(tuple(events), reserved_peak_nbytes=highest, reserved_end_nbytes=reserved)
