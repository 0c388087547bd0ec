"""What a trace gives: the events of the steps, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from overspill.forecast.allocator import Replay, replay
from overspill.forecast.allocator_settings import AllocatorSettings
from overspill.forecast.events import Category, Event, Kind, Peak, highest
from overspill.trace.layers import Repetition

__all__ = ["Trace"]


@dataclass(frozen=True)
class Trace:
    """What a step asks of the allocator. ``events`` hold requested sizes; peaks are rounded as the device does."""

    events: tuple[Event, ...]
    peaks: tuple[Peak, ...]
    granule_nbytes: int
    repetitions: tuple[tuple[str, Repetition], ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def peak(self) -> Peak:
        return highest(self.peaks)

    @property
    def peak_nbytes(self) -> int:
        """Bytes allocated at the highest instant (torch.cuda.max_memory_allocated)."""
        return self.peak.nbytes

    @property
    def by_category_at_peak(self) -> dict[Category, int]:
        return dict(self.peak.by_category)

    @property
    def resting_nbytes(self) -> int:
        """Bytes allocated after the last event: what stays between steps."""
        return sum(line[-1] for line in self.timeline().values() if line)

    def phase(self, name: str) -> Peak:
        """The peak of one phase. KeyError when the step has no such phase."""
        for peak in self.peaks:
            if peak.phase == name:
                return peak
        raise KeyError(name)

    def timeline(self) -> dict[Category, list[int]]:
        """Bytes allocated after each event, by category."""
        lines: dict[Category, list[int]] = {category: [] for category in Category}
        current = dict.fromkeys(Category, 0)
        granule = self.granule_nbytes
        for event in self.events:
            nbytes = -(-event.nbytes // granule) * granule
            if event.kind is Kind.MALLOC:
                current[event.category] += nbytes
            elif event.kind is not Kind.FREE_COMPLETED:
                current[event.category] -= nbytes
            for category, line in lines.items():
                line.append(current[category])
        return lines

    def replay(self, settings: AllocatorSettings | None = None) -> Replay:
        """The events through a model of the CUDA caching allocator."""
        return replay(self.events, settings)
