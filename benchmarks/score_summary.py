"""The figures of a scoreboard beside their targets, as data: what the JSON holds and score_tables.py prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from score_rows import FIGURES, Row
from scoring import (
    Judged,
    Point,
    Verdicts,
    baseline,
    coverage,
    interval_score,
    median,
    over_sources,
    quantile,
    verdicts,
)

__all__ = ["CELL_ROWS", "Cell", "Summary", "Target", "group_figures", "summarise"]

#: Distinct rows from which a framework × method cell is shown.
CELL_ROWS = 5


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the scoreboard. figure: as text; met: None where there is nothing to score."""

    name: str
    limit: str
    figure: str
    met: bool | None
    rows: int
    sources: int


@dataclass(frozen=True, slots=True)
class Cell:
    """Rows of one framework, method and kind. Each figure is the mean over source files."""

    kind: str
    framework: str
    method: str
    rows: int
    sources: int
    median_error: float
    percentile_90: float
    bias: float
    coverage: float
    relative_width: float


@dataclass(frozen=True, slots=True)
class Summary:
    targets: tuple[Target, ...]
    cells: tuple[Cell, ...]
    counts: dict[str, int]
    unpredictable: tuple[Cell, ...]
    verdict_lines: dict[str, Verdicts | None]
    ratios: dict[str, dict[str, float]]


def summarise(rows: Sequence[Row]) -> Summary:
    """The scoreboard of some rows."""
    scored = [row for row in rows if row.scored]
    targets: list[Target] = []
    cells: list[Cell] = []
    ratios: dict[str, dict[str, float]] = {}
    for kind in FIGURES:
        of_kind = [row for row in scored if row.kind == kind and row.point is not None]
        points = _points(of_kind)
        found = _cells(kind, of_kind)
        cells += found
        if kind == "allocated":
            targets += _allocated(points, found)
        else:
            lines, ratios[kind] = _shown(kind, points)
            targets += lines
    lines_of_verdicts = _verdict_lines(scored)
    targets += _verdict_targets(lines_of_verdicts)
    apart = [row for row in rows if row.mapped and row.unpredictable and row.point and not row.repeats]
    unpredictable = _cells_of(
        apart, lambda row: (row.kind, row.framework, row.unpredictable), fewest=1
    )  # fmt: skip
    return Summary(
        tuple(targets), tuple(cells), _counts(rows), tuple(unpredictable), lines_of_verdicts, ratios
    )  # fmt: skip


def _points(rows: Iterable[Row]) -> list[Point]:
    return [point for row in rows if (point := row.point) is not None]


def _abs_median(points: list[Point]) -> float:
    return median(abs(one.error) for one in points)


def _abs_90th(points: list[Point]) -> float:
    return quantile((abs(one.error) for one in points), 0.9)


def _interval_scores(points: list[Point]) -> float:
    return sum(interval_score(one.span.low, one.span.high, one.measured) for one in points) / len(points)


def _width(points: list[Point]) -> float:
    return median(one.span.relative_width for one in points)


def _sources(points: Sequence[Point]) -> int:
    return len({one.source for one in points})


def _cells(kind: str, rows: Sequence[Row]) -> list[Cell]:
    return _cells_of(rows, lambda row: (kind, *row.cell), fewest=CELL_ROWS)


def _cells_of(rows: Sequence[Row], key: Callable[[Row], tuple[str, str, str]], *, fewest: int) -> list[Cell]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    cells = [Cell(*name, **_figures(_points(group))) for name, group in groups.items() if len(group) >= fewest]
    return sorted(cells, key=lambda one: -one.median_error)


def _figures(points: list[Point]) -> dict[str, Any]:
    def mean(figure: Callable[[list[Point]], float]) -> float:
        value = over_sources(points, figure)
        assert value is not None
        return value

    return {
        "rows": len(points), "sources": _sources(points), "median_error": mean(_abs_median),
        "percentile_90": mean(_abs_90th), "bias": mean(lambda some: median(one.error for one in some)),
        "coverage": mean(coverage), "relative_width": mean(_width),
    }  # fmt: skip


def _at_most(name: str, points: list[Point], figure: Callable[[list[Point]], float], limit: float) -> Target:
    value = over_sources(points, figure)
    return Target(
        name, f"at most {limit:.0%}", "nothing to score" if value is None else f"{value:.2%}",
        None if value is None else value <= limit, len(points), _sources(points),
    )  # fmt: skip


def _allocated(points: list[Point], cells: list[Cell]) -> list[Target]:
    count, sources = len(points), _sources(points)
    worst = max(cells, key=lambda one: one.median_error, default=None)
    above = sum(one.median_error > 0.05 for one in cells)
    return [
        _at_most("allocated: median |error|", points, _abs_median, 0.02),
        _at_most("allocated: 90th percentile of |error|", points, _abs_90th, 0.08),
        Target(
            "allocated: median |error| of each cell", "each at most 5%",
            "no cell" if worst is None
            else f"worst {worst.median_error:.2%} ({worst.framework}, {worst.method}); {above} of {len(cells)} above",
            None if worst is None else above == 0, count, sources,
        ),
    ]  # fmt: skip


def _shown(kind: str, points: list[Point]) -> tuple[list[Target], dict[str, float]]:
    """reserved and smi: better than the best constant ratio, and honest intervals."""
    count, sources = len(points), _sources(points)
    best = baseline(points)
    ours = over_sources(points, _abs_median), over_sources(points, _interval_scores)
    targets = []
    for name, mine, theirs in (
        ("median |error|", ours[0], best.median_error if best else None),
        ("interval score", ours[1], best.interval_score if best else None),
    ):
        if mine is None or theirs is None:
            figure, met = "no second source file to fit the ratio on" if points else "nothing to score", None
        else:
            gain = 1 - mine / theirs if theirs else 0.0
            figure, met = f"{mine:.2%} against {theirs:.2%}: {gain:+.0%}", gain >= 0.25
        targets.append(
            Target(f"{kind}: {name} against the best constant ratio", "at least 25% less", figure, met, count, sources)
        )
    covered, width = over_sources(points, coverage), over_sources(points, _width)
    nothing = "nothing to score"
    targets.append(
        Target(
            f"{kind}: coverage of the 90% interval", "85% to 95%", nothing if covered is None else f"{covered:.1%}",
            None if covered is None else 0.85 <= covered <= 0.95, count, sources,
        )
    )  # fmt: skip
    targets.append(
        Target(
            f"{kind}: median width of the interval", "at most 35% of the figure",
            nothing if width is None else f"{width:.1%}", None if width is None else width <= 0.35, count, sources,
        )
    )  # fmt: skip
    return targets, dict(best.ratios) if best else {}


def _verdict_lines(scored: Sequence[Row]) -> dict[str, Verdicts | None]:
    judged = [(row, one) for row in scored if (one := row.judged) is not None]
    lines = {
        "published": verdicts([one for row, one in judged if not row.inferred]),
        "of these: it ran": verdicts([one for row, one in judged if not row.inferred and one.ran]),
        "of these: out of memory": verdicts([one for row, one in judged if not row.inferred and not one.ran]),
        "inferred out of memory": verdicts([one for row, one in judged if row.inferred]),
    }
    imagined = [
        (one, Judged(row.source, one.ran, one.verdict, one.probability)) for row in scored for one in row.virtual
    ]
    lines["virtual cards"] = verdicts([judged for _, judged in imagined])
    for share, ran in sorted({(one.share, one.ran) for one, _ in imagined}):
        name = f"virtual: {share:g} × {'shown, fits' if ran else 'allocated, out of memory'}"
        lines[name] = verdicts([two for one, two in imagined if (one.share, one.ran) == (share, ran)])
    return lines


def _verdict_targets(lines: dict[str, Verdicts | None]) -> list[Target]:
    targets = []
    for name, line in (("published verdicts", lines["published"]), ("virtual cards", lines["virtual cards"])):
        if line is None:
            targets.append(Target(name, "at least 97% right", "nothing to score", None, 0, 0))
            continue
        targets += [
            Target(f"{name}: right", "at least 97%", f"{line.right:.1%}", line.right >= 0.97, line.count, line.sources),
            Target(f"{name}: tight", "at most 15%", f"{line.tight:.1%}", line.tight <= 0.15, line.count, line.sources),
        ]
    all_lines = [lines[name] for name in ("published", "inferred out of memory", "virtual cards")]
    known = [one for one in all_lines if one is not None]
    wrong = sum(one.confidently_wrong for one in known)
    targets.append(
        Target(
            "runs that failed and were said to fit with less than 5% of running out", "none",
            f"{wrong}" if known else "nothing to score", wrong == 0 if known else None,
            sum(one.count for one in known), sum(one.sources for one in known),
        )
    )  # fmt: skip
    return targets


def _counts(rows: Sequence[Row]) -> dict[str, int]:
    return {
        "rows": len(rows),
        "not mapped": sum(not row.mapped for row in rows),
        "repeat another row": sum(row.mapped and bool(row.repeats) for row in rows),
        "unpredictable as published": sum(row.mapped and bool(row.unpredictable) for row in rows),
        "quality C": sum(row.mapped and row.quality not in ("A", "B") for row in rows),
        "scored": sum(row.scored for row in rows),
        **{f"scored {kind}": count for kind, count in sorted(Counter(row.kind for row in rows if row.scored).items())},
    }


def group_figures(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """For the JSON: figures of every mapped row that is predictable and counted once, by kind, source, method and
    quality, each within one kind of figure."""
    usable = [row for row in rows if row.mapped and row.point and not row.repeats and not row.unpredictable]
    keys: dict[str, Callable[[Row], str]] = {
        "kind": lambda row: "", "source": lambda row: row.source, "method": lambda row: row.method,
        "framework": lambda row: row.framework, "quality": lambda row: row.quality,
    }  # fmt: skip
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for name, key in keys.items():
        groups = _cells_of(usable, lambda row, key=key: (row.kind, key(row), ""), fewest=1)  # type: ignore[misc]
        result[name] = {}
        for one in groups:
            figures = {
                what: value for what, value in asdict(one).items() if what not in ("kind", "framework", "method")
            }
            result[name][f"{one.kind} {one.framework}".strip()] = figures
    return result
