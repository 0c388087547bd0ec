"""What the allocator holds beyond what is alive, from replays of a step: least, likely, most.

A replay is exact for its events; what a run's real events differ in (small blocks, their order, batches of another
length) shifts how well cached blocks fit. The least is what the same events leave with one growing segment a stream
(expandable segments) or with one pool for all streams; the likely is the replay as it is; the most lies as far above it
as the least lies below. docs/theory/reserved.md derives each part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from overspill.forecast.allocator import replay
from overspill.forecast.allocator_settings import AllocatorSettings
from overspill.forecast.device.settings import Resolved
from overspill.forecast.device.states import Units
from overspill.forecast.device.stream import LOADING
from overspill.forecast.events import Event
from overspill.forecast.layers.figures import layer_figures
from overspill.forecast.layers.run import Run
from overspill.model.facts import LayerKind

__all__ = ["Range", "cached", "left_of_loading", "uneven_nbytes"]


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes: likely, and a 90 % interval."""

    low: int
    likely: int
    high: int

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.likely + other.likely, self.high + other.high)


def cached(
    events: list[Event], settings: AllocatorSettings, *, assumed: bool = False, recorded: list[Event] | None = None
) -> Range:
    """Bytes reserved beyond the highest that is alive in a step.

    assumed: the settings are a launcher's and not the job's own, so that the run may have gone without. recorded: the
    events with the tensors of asynchronous collectives held back ([Note: Recorded] of stream.py), where it is not known
    how far the host was ahead.
    """
    own = _beyond(events, settings)
    low = own
    if not settings.expandable_segments:  # else that is what was replayed
        low = min(low, _beyond(events, replace(settings, expandable_segments=True)))
    if any(event.stream for event in events):
        low = min(low, _beyond([event._replace(stream=0) for event in events], settings))
    high = 2 * own - low
    if assumed:
        high = max(high, _beyond(events, AllocatorSettings()))
    if recorded is not None:
        high = max(high, _beyond(recorded, settings))
    return Range(low, own, high)


def _beyond(events: list[Event], settings: AllocatorSettings) -> int:
    replayed = replay(events, settings)
    # Loading, whose instants may stand higher, is not what the closed form counts.
    begin = next((index for index, event in enumerate(events) if event.phase != LOADING), 0)
    return replayed.reserved_peak_nbytes - max(replayed.allocated_nbytes[begin:], default=0)


def left_of_loading(whole_nbytes: int, ranks: int) -> Range:
    """[Note: Loaded whole] bitsandbytes and GPTQ put a quantised model on the card whole, on every card; FSDP then
    splits it unit by unit (transformers/quantizers; torch/distributed/fsdp/_flat_param.py, shard). What the other ranks
    keep is let go in pieces of a matrix's size, into which most of a step's tensors do not fit: none to all of it
    stays."""
    freed = whole_nbytes - whole_nbytes // max(1, ranks)
    return Range(0, freed // 2, freed)


def uneven_nbytes(units: Units, resolved: Resolved, run_of: Callable[[LayerKind], Run]) -> Range:
    """[Note: Uneven] A router sends each expert another number of rows at each step, so that what was cached for one
    step's rows does not fit the next's: none to all of them are held twice. With expert parallelism a rank's share
    besides differs from the others', by as much again at worst. Of what is alive at once: one layer's rows where layers
    are checkpointed, else all layers'."""
    alive = 0
    for kind, count, _ in units.layers:
        if kind.moe is None:
            continue
        run = run_of(kind)
        twice = replace(kind, moe=replace(kind.moe, top_k=2 * kind.moe.top_k))
        rows = layer_figures(twice, run).kept_nbytes - layer_figures(kind, run).kept_nbytes
        alive = max(alive, rows) if resolved.checkpointing != "none" else alive + rows * count
    return Range(0, alive // 2, alive * (2 if resolved.expert > 1 else 1))
