"""From a trace of a few layers to that of the whole depth, event by event, with no number estimated.

A model of one kind of layer in a pattern is traced with PERIODS periods. The middle period's events are repeated for
the periods that were left out, at their place in each forward and each backward. Every block keeps its role: what a
period frees of its neighbour's, its copy frees of the copy's neighbour; what is freed outside of the layers (gradients
in zero_grad, cast weights at autocast's end) is freed for the copies too. So the peak of each phase point is the full
depth's own, wherever it moves to. Periods that are not alike raise `Irregular`, and the caller traces every layer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

from overspill.forecast.events import Kind
from overspill.trace.layers import PERIODS, Repetition
from overspill.trace.recorder import Mark, Record, Segment

__all__ = ["Irregular", "spliced"]

_MIDDLE = PERIODS // 2
_INNER = range(1, PERIODS - 1)


class Irregular(Exception):
    """The traced periods differ from each other, so the others cannot be told from them."""


@dataclass(frozen=True, slots=True)
class _Birth:
    """Where a block of the layers was allocated: pass, period and the how-manieth of them there."""

    visit: int
    period: int
    ordinal: int


def spliced(
    records: list[Record], marks: dict[int, Mark], number: int, name: str, repetition: Repetition
) -> tuple[list[Record], dict[int, Mark]]:
    """Records and marks with list ``number`` (called ``name``) brought to full depth. Inputs stay as they are."""
    if repetition.copies == 0:
        return records, marks
    return _Splice(records, marks, number, name, repetition).run()


class _Splice:
    def __init__(
        self, records: list[Record], marks: dict[int, Mark], number: int, name: str, repetition: Repetition
    ) -> None:
        self.records, self.marks = records, dict(marks)
        self.number, self.name, self.repetition = number, name, repetition
        self.births: dict[int, _Birth] = {}
        self.families: dict[tuple[int, int], list[int]] = defaultdict(list)
        for record in records:
            period = self.period(record.segment)
            if period is not None and record.kind is Kind.MALLOC:
                family = self.families[record.segment.visit, period]
                self.births[record.block] = _Birth(record.segment.visit, period, len(family))
                family.append(record.block)
        self.descending = self._descending()
        self.copied: dict[tuple[int, int], int] = {}
        self._next = max(self.marks, default=-1) + 1

    def _descending(self) -> set[int]:
        """Passes in which blocks of later periods are freed before those of earlier ones, outside of the layers."""
        first: dict[tuple[int, int], int] = {}
        for index, record in enumerate(self.records):
            birth = self.births.get(record.block)
            if record.kind is Kind.FREE and birth is not None and self.period(record.segment) is None:
                first.setdefault((record.segment.visit, birth.period), index)
        last = len(self.records)
        return {visit for visit, _ in first if first.get((visit, _MIDDLE + 1), last) < first.get((visit, _MIDDLE), -1)}

    def period(self, segment: Segment) -> int | None:
        """The period in which a segment lies; None outside of the list and in layers before or after the pattern."""
        if segment.layers != self.number or segment.layer < self.repetition.first:
            return None
        period = (segment.layer - self.repetition.first) // self.repetition.period
        return period if period < PERIODS else None

    def run(self) -> tuple[list[Record], dict[int, Mark]]:
        starts, ends = self.check()
        result: list[Record] = []
        together: list[Record] = []
        for index, record in enumerate(self.records):
            if self.frees_middle_from_elsewhere(record):
                together.append(record)
                continue
            self.free_everywhere(together, result)
            start = starts.get(index)
            if start is not None:  # of a backward: later periods come first
                for copy in range(self.repetition.copies, 0, -1):
                    self.repeat(start, copy, result)
            self.original(record, result)
            end = ends.get(index)
            if end is not None:
                for copy in range(1, self.repetition.copies + 1):
                    self.repeat(end, copy, result)
        self.free_everywhere(together, result)
        return result, self.marks

    # ---- are the periods alike? ----

    def check(self) -> tuple[dict[int, list[Record]], dict[int, list[Record]]]:
        """The middle period's records in each pass: by the index of their start in backwards, of their end in forwards.

        Raises Irregular when periods differ.
        """
        by_visit: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, record in enumerate(self.records):
            period = self.period(record.segment)
            if period is not None:
                by_visit[record.segment.visit][period].append(index)
        starts: dict[int, list[Record]] = {}
        ends: dict[int, list[Record]] = {}
        for visit, periods in by_visit.items():
            if any(not periods[p] for p in range(PERIODS)):
                raise Irregular(f"pass {visit} does not visit every period of {self.name}")
            for indices in periods.values():
                if indices[-1] - indices[0] != len(indices) - 1:
                    raise Irregular(f"pass {visit} goes back and forth between layers of {self.name}")
            for other in _INNER:
                if not _alike(
                    self.signature(visit, periods[other], other), self.signature(visit, periods[_MIDDLE], _MIDDLE)
                ):
                    raise Irregular(f"layers of {self.name} take different memory in pass {visit}")
            middle = periods[_MIDDLE]
            backward = periods[0][0] > middle[0]
            run = [self.records[i] for i in middle]
            if backward:
                starts[middle[0]] = run
            else:
                ends[middle[-1]] = run
        return starts, ends

    def signature(self, visit: int, indices: list[int], period: int) -> list[tuple[object, int]]:
        """A period's events with every block named relative to the period; the ordinal apart, see `_alike`."""
        found: list[tuple[object, int]] = []
        for index in indices:
            record = self.records[index]
            birth = self.births.get(record.block)
            if birth is None:
                raise Irregular(f"a layer of {self.name} frees what was allocated outside of the layers")
            ordinal = birth.ordinal if birth.period in _INNER else -1
            mark = self.marks[record.block]
            layer = (record.segment.layer - self.repetition.first) % self.repetition.period
            place = (birth.visit - visit, birth.period - period)
            found.append(((record.kind, place, mark.nbytes, mark.category, layer), ordinal))
        return found

    # ---- writing ----

    def original(self, record: Record, result: list[Record]) -> None:
        """A traced record at its place in the full depth."""
        copies = self.repetition.copies
        period = self.period(record.segment)
        moved = self.moved(record)
        birth = self.births.get(record.block)
        block = record.block
        if record.kind is Kind.FREE and birth is not None and period in _INNER and birth.period in _INNER:
            assert period is not None
            place = (period if period <= _MIDDLE else period + copies) + birth.period - period
            block = self.at(birth, place)
        if record.kind is Kind.MALLOC and moved:
            self.rename(block, moved)
        result.append(self.shifted(record, block, moved))

    def frees_middle_from_elsewhere(self, record: Record) -> bool:
        """Whether a block of the middle period is freed outside of the three periods that are alike."""
        birth = self.births.get(record.block)
        return (
            record.kind is Kind.FREE
            and birth is not None
            and birth.period == _MIDDLE
            and self.period(record.segment) not in _INNER
        )

    def free_everywhere(self, together: list[Record], result: list[Record]) -> None:
        """Frees a run of the middle period's blocks and the same of each inserted period, in the order of the pass."""
        if not together:
            return
        order = range(self.repetition.copies + 1)
        for copy in reversed(order) if together[0].segment.visit in self.descending else order:
            for record in together:
                result.append(
                    self.shifted(record, self.at(self.births[record.block], _MIDDLE + copy), self.moved(record))
                )
        together.clear()

    def moved(self, record: Record) -> int:
        """By how many layers a traced record's own layer moves in the full depth."""
        segment, period = record.segment, self.period(record.segment)
        if segment.layers != self.number or segment.layer < self.repetition.first:
            return 0
        return self.repetition.copies * self.repetition.period if period is None or period > _MIDDLE else 0

    def repeat(self, run: list[Record], copy: int, result: list[Record]) -> None:
        """The middle period's records for one inserted period."""
        step = self.repetition.period
        for record in run:
            birth = self.births[record.block]
            block = self.at(birth, birth.period + copy)
            result.append(self.shifted(record, block, copy * step))

    def at(self, birth: _Birth, place: int) -> int:
        """The block of the same role in the period at ``place`` of the full depth."""
        copies = self.repetition.copies
        if place <= _MIDDLE:
            return self.families[birth.visit, place][birth.ordinal]
        if place > _MIDDLE + copies:
            return self.families[birth.visit, place - copies][birth.ordinal]
        source = self.families[birth.visit, _MIDDLE][birth.ordinal]
        found = self.copied.get((source, place))
        if found is None:
            found = self.copied[source, place] = self._next
            self._next += 1
            self.marks[found] = self.marks[source]
            self.rename(found, (place - _MIDDLE) * self.repetition.period)
        return found

    def shifted(self, record: Record, block: int, layers: int) -> Record:
        if not layers:
            return record if block == record.block else Record(record.kind, block, record.phase, record.segment)
        old = record.segment
        segment = Segment(old.visit, old.layers, old.layer + layers)
        return Record(record.kind, block, _renumbered(record.phase, self.name, layers), segment)

    def rename(self, block: int, layers: int) -> None:
        mark = self.marks[block]
        self.marks[block] = replace(
            mark,
            module=_renumbered(mark.module, self.name, layers),
        )


def _alike(some: list[tuple[object, int]], others: list[tuple[object, int]]) -> bool:
    """Equal, but for ordinals in the first and the last period: those may allocate in another order (-1)."""
    return len(some) == len(others) and all(
        a == b and (m == n or -1 in (m, n)) for (a, m), (b, n) in zip(some, others, strict=True)
    )


@lru_cache(maxsize=1 << 16)
def _renumbered(text: str, name: str, layers: int) -> str:
    """``… name.7 …`` with 7 + layers."""
    return re.sub(
        rf"(\b{re.escape(name)}\.)(\d+)\b", lambda found: f"{found[1]}{int(found[2]) + layers}", text, count=1
    )
