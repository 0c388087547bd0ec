"""Statistics of a scoreboard: errors, intervals, the best constant ratio, verdicts. Pure: rows in, figures out.

Every figure is computed for each source file and then averaged over source files without weights, so that a file with
two hundred rows says as much as one with five. Definitions: docs/reference/truth-format.md. Interval score: Gneiting
and Raftery, Strictly proper scoring rules (2007), 6.2, here relative to the measured value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

__all__ = [
    "ALPHA", "Baseline", "Judged", "Point", "Span", "Verdicts", "baseline", "by_source", "coverage", "interval_score",
    "median", "over_sources", "quantile", "verdicts",
]  # fmt: skip

T = TypeVar("T")
#: Intervals hold 1 - ALPHA.
ALPHA = 0.1


@dataclass(frozen=True, slots=True)
class Span:
    """A figure in GiB with its 90 % interval."""

    low: float
    likely: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def relative_width(self) -> float:
        return (self.high - self.low) / self.likely if self.likely else math.inf


@dataclass(frozen=True, slots=True)
class Point:
    """One measured figure beside its forecast. allocated: what the forecast says is allocated, for the baseline."""

    source: str
    measured: float
    span: Span
    allocated: float

    @property
    def error(self) -> float:
        return self.span.likely / self.measured - 1


def quantile(values: Iterable[float], share: float) -> float:
    """Linear between order statistics (numpy's default). Raises ValueError for no values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median(values: Iterable[float]) -> float:
    return quantile(values, 0.5)


def by_source(items: Iterable[T], source: Callable[[T], str]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for one in items:
        groups.setdefault(source(one), []).append(one)
    return groups


def over_sources(points: Sequence[Point], figure: Callable[[list[Point]], float]) -> float | None:
    """The figure of each source file, averaged without weights. None: no points."""
    values = [figure(group) for group in by_source(points, lambda one: one.source).values()]
    return sum(values) / len(values) if values else None


def coverage(points: Sequence[Point]) -> float:
    return sum(one.span.holds(one.measured) for one in points) / len(points)


def interval_score(low: float, high: float, value: float) -> float:
    """Of a 90 % interval, relative to the value: its width and 2/ALPHA times what it misses. Less is better."""
    missed = max(0.0, low - value) + max(0.0, value - high)
    return (high - low + 2 / ALPHA * missed) / value


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the best constant multiple of the forecast's allocated reaches, fitted on the other source files."""

    median_error: float
    interval_score: float
    ratios: Mapping[str, float]


def baseline(points: Sequence[Point]) -> Baseline | None:
    """Leaves out one source file after the other. None: fewer than two source files, so there is nothing to fit on."""
    groups = by_source(points, lambda one: one.source)
    if len(groups) < 2:
        return None
    errors, scores, ratios = [], [], {}
    for left_out, rows in groups.items():
        rest = {source: group for source, group in groups.items() if source != left_out}
        ratio = _best_ratio(rest)
        low, high = _best_band(rest)
        ratios[left_out] = ratio
        errors.append(median(abs(ratio * one.allocated / one.measured - 1) for one in rows))
        scores.append(
            sum(interval_score(low * one.allocated, high * one.allocated, one.measured) for one in rows) / len(rows)
        )
    return Baseline(sum(errors) / len(errors), sum(scores) / len(scores), ratios)


def _best_ratio(groups: Mapping[str, list[Point]]) -> float:
    """The multiple with the smallest mean, over source files, of the median |error|.

    As a function of the multiple, that is linear between the points where a row's error is zero or two rows of a file
    have the same |error|: the best is one of these.
    """
    slopes = [np.array([one.allocated / one.measured for one in rows]) for rows in groups.values()]
    found: tuple[float, float] | None = None
    for rows in slopes:
        first, second = np.triu_indices(len(rows))
        candidates = np.unique(2 / (rows[first] + rows[second]))
        for part in np.array_split(candidates, -(-len(candidates) // 4096)):
            losses = sum(np.median(np.abs(part[:, None] * group - 1), axis=1) for group in slopes)
            place = int(np.argmin(losses))
            best = float(losses[place]), float(part[place])
            found = best if found is None else min(found, best)
    assert found is not None
    return found[1]


def _best_band(groups: Mapping[str, list[Point]]) -> tuple[float, float]:
    """The two multiples with the smallest mean interval score: the 5th and 95th percentile of the rows' ratios, each
    row weighted by 1 / (rows of its source file × its ratio), the second since the score is relative."""
    weighted = sorted(
        (ratio := one.measured / one.allocated, 1 / (len(rows) * ratio)) for rows in groups.values() for one in rows
    )
    total = sum(weight for _, weight in weighted)

    def at(share: float) -> float:
        seen = 0.0
        for ratio, weight in weighted:
            seen += weight
            if seen >= share * total:
                return ratio
        return weighted[-1][0]

    return at(ALPHA / 2), at(1 - ALPHA / 2)


@dataclass(frozen=True, slots=True)
class Judged:
    """One question of whether a run fits: what happened and what was said."""

    source: str
    ran: bool
    verdict: str
    probability: float

    @property
    def right(self) -> bool:
        return (self.verdict != "does not fit") == self.ran

    @property
    def confidently_wrong(self) -> bool:
        """It said fits, with less than 5 % of running out, and it did run out."""
        return not self.ran and self.verdict == "fits" and self.probability < 0.05


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Shares are means over source files; the rest are counts of questions."""

    count: int
    sources: int
    right: float
    tight: float
    wrong: int
    confidently_wrong: int


def verdicts(judged: Sequence[Judged]) -> Verdicts | None:
    groups = by_source(judged, lambda one: one.source)
    if not groups:
        return None
    right = [sum(one.right for one in rows) / len(rows) for rows in groups.values()]
    tight = [sum(one.verdict == "tight" for one in rows) / len(rows) for rows in groups.values()]
    return Verdicts(
        len(judged), len(groups), sum(right) / len(right), sum(tight) / len(tight),
        sum(not one.right for one in judged), sum(one.confidently_wrong for one in judged),
    )  # fmt: skip
