"""The scoreboard as text: a short form for the terminal, and the page docs/scoreboard.md."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from components import INFERRED, Kernel
from score_rows import FIGURES, ONE_SIDED, Row
from score_summary import CELL_ROWS, Cell, Summary, Target
from scoring import by_source, median

__all__ = ["page", "terminal"]

#: Rows named on the page as those with the largest error.
WORST = 15
_CAUSES = Path(__file__).resolve().parent / "known_errors.toml"


def terminal(rows: Sequence[Row], summary: Summary) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in summary.counts.items())
    lines = [counts, ""]
    for one in summary.targets:
        lines.append(f"{_met(one):7} {one.name}: {one.figure} ({one.limit}; {one.rows} rows, {one.sources} sources)")
    lines += ["", f"allocated, cells of {CELL_ROWS} rows and more, worst first:"]
    for cell in summary.cells:
        if cell.kind == "allocated":
            lines.append(f"  {cell.median_error:7.2%} {cell.framework}, {cell.method} ({cell.rows} rows)")
    missing = [row for row in rows if not row.mapped]
    lines += ["", f"not mapped: {len(missing)}"]
    lines += [
        f"  {len(ids)}: {reason} ({', '.join(ids[:6])}{', …' if len(ids) > 6 else ''})"
        for reason, ids in _reasons(missing)
    ]
    return "\n".join(lines)


def page(
    rows: Sequence[Row], summary: Summary, without: Summary, report: dict[str, Any], *,
    kernels: list[Kernel] | None, others: dict[str, Any] | None,
) -> str:  # fmt: skip
    """Markdown. Paths outside the repository do not appear: sources are named as the table names them."""
    parts = [
        _head(summary, report),
        _targets(summary),
        _empirical(rows, summary, without),
        _cells(summary),
        _verdicts(summary),
        _apart(rows, summary),
    ]
    parts += [_worst(rows), _unmapped(rows)]
    parts += [_components(kernels), _competitors(rows, others)]
    return "\n\n".join(parts) + "\n"


def _met(one: Target) -> str:
    return {True: "met", False: "MISSED", None: "-"}[one.met]


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(_escaped(one) for one in row) + " |" for row in body)])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _head(summary: Summary, report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    met = sum(one.met is True for one in summary.targets)
    missed = sum(one.met is False for one in summary.targets)
    return f"""# Scoreboard

How right the forecast is on memory that others measured and published. Made by `make scoreboard` on {report["date"]}
with {versions}; do not edit. Rules and columns: [the form of the table](reference/truth-format.md). The forecast of
every row: `benchmarks/results/`.

{met} targets are met and {missed} missed. Of {summary.counts["rows"]} rows {summary.counts["not mapped"]} could not be
mapped to a job, {summary.counts["repeat another row"]} repeat another, {summary.counts["unpredictable as published"]}
are not predictable as published, {summary.counts["quality C"]} are of quality C; {summary.counts["scored"]} are scored.
A figure is computed for each source file and averaged over source files without weights."""


def _targets(summary: Summary) -> str:
    body = [(_met(one), one.name, one.figure, one.limit, str(one.rows), str(one.sources)) for one in summary.targets]
    return "## Targets\n\n" + _table(("", "what", "figure", "target", "rows", "sources"), body)


def _empirical(rows: Sequence[Row], summary: Summary, without: Summary) -> str:
    """The terms that nobody can explain yet, and every target that they move."""
    counts = Counter(term for row in rows for term in row.empirical)
    parts = [
        "## Empirical terms",
        "Seen in published figures, with no mechanism that derives them yet; at most three. Everything else in the "
        "forecast is derived. The targets that they move:",
    ]
    if not counts:
        return "\n\n".join([parts[0], "None applies to a row."])
    moved = [
        (one.name, one.figure, _met(one), other.figure, _met(other))
        for one, other in zip(summary.targets, without.targets, strict=True)
        if one.figure != other.figure
    ]
    parts.append(_table(("term", "rows"), ((term, str(count)) for term, count in sorted(counts.items()))))
    parts.append(_table(("what", "with", "", "without", ""), moved) if moved else "None.")
    return "\n\n".join([parts[0], parts[2], parts[1], parts[3]])


def _cells(summary: Summary) -> str:
    text = [
        f"## By framework and method\n\nCells of at least {CELL_ROWS} distinct rows, worst first; torch.compile apart."
    ]
    for kind in FIGURES:
        cells = [one for one in summary.cells if one.kind == kind]
        body = [_cell(one) for one in cells] or [("none",) + ("",) * 7]
        text.append(f"### {kind}\n\n" + _table(_CELL_HEAD, body))
    return "\n\n".join(text)


_CELL_HEAD = (
    "framework",
    "method",
    "rows",
    "sources",
    "median error",
    "90th percentile",
    "bias",
    "interval holds",
    "width",
)


def _cell(one: Cell) -> tuple[str, ...]:
    return (
        one.framework, one.method, str(one.rows), str(one.sources), f"{one.median_error:.2%}",
        f"{one.percentile_90:.2%}", f"{one.bias:+.2%}", f"{one.coverage:.0%}", f"{one.relative_width:.0%}",
    )  # fmt: skip


def _verdicts(summary: Summary) -> str:
    body = []
    for name, one in summary.verdict_lines.items():
        if one is None:
            body.append((name, "0", "", "", "", ""))
        else:
            body.append(
                (
                    name,
                    str(one.count),
                    f"{one.right:.1%}",
                    f"{one.tight:.1%}",
                    str(one.wrong),
                    str(one.confidently_wrong),
                )
            )
    note = (
        "Tight counts as fits. The last column: it did not fit, and was said to fit with less than 5 % of running out."
    )
    return f"## Verdicts\n\n{note}\n\n" + _table(("", "questions", "right", "tight", "wrong", "sure and wrong"), body)


def _apart(rows: Sequence[Row], summary: Summary) -> str:
    body = [
        (one.kind, one.framework, one.method, str(one.rows), f"{one.coverage:.0%}", f"{one.relative_width:.0%}")
        for one in summary.unpredictable
    ]
    note = "Rows whose source leaves out what the figure depends on: scored on whether the interval holds it."
    table = _table(("figure", "framework", "why", "rows", "interval holds", "width"), body or [("none",) + ("",) * 5])
    return f"## Not predictable as published\n\n{note}\n\n{table}"


def _worst(rows: Sequence[Row]) -> str:
    text = [f"## Largest errors\n\nThe {WORST} rows with the largest |error|, with the reason where it is known."]
    causes = tomllib.loads(_CAUSES.read_text(encoding="utf-8"))["cause"] if _CAUSES.is_file() else []
    scored = [row for row in rows if row.scored and row.error is not None]
    scored.sort(key=lambda row: -abs(row.error or 0.0))
    body = [_worst_row(row, causes) for row in scored[:WORST]]
    text.append(
        _table(("row", "figure", "framework, method", "model", "measured", "forecast", "error", "reason"), body)
    )
    wrong = [row for row in rows if row.scored and row.judged is not None and not row.judged.right]
    if wrong:
        body = [
            (
                row.id, ("inferred " if row.inferred else "") + row.kind, ", ".join(row.cell), row.model, row.card,
                f"{row.verdict}, {row.probability:.0%}", f"{row.figures['allocated'].likely:.1f} GiB",
            )
            for row in wrong
        ]  # fmt: skip
        text.append(
            "Verdicts that were wrong:\n\n"
            + _table(("row", "published", "framework, method", "model", "card", "said", "allocated"), body)
        )
    return "\n\n".join(text)


def _worst_row(row: Row, causes: Sequence[dict[str, str]]) -> tuple[str, ...]:
    assert row.error is not None and row.measured is not None
    return (
        row.id, row.kind, ", ".join(row.cell), row.model, f"{row.measured:.2f} GiB",
        f"{row.figures[row.kind].likely:.2f} GiB", f"{row.error:+.1%}", _reason(row, causes),
    )  # fmt: skip


def _reason(row: Row, causes: Sequence[dict[str, str]]) -> str:
    """Of known_errors.toml, the first cause whose every condition is in the row; else what the row leaves open."""
    for one in causes:
        conditions = {key: value for key, value in one.items() if key != "reason"}
        seen = {
            "framework": row.framework,
            "method": ", ".join(row.cell),
            "kind": row.kind,
            "notes": row.notes,
            "model": row.model,
        }
        if all(value in seen[key] for key, value in conditions.items()):
            return one["reason"]
    if not row.versions:
        return "not known; versions are not published"
    return "not known"


def _unmapped(rows: Sequence[Row]) -> str:
    missing = [row for row in rows if not row.mapped]
    body = [(str(len(ids)), reason, ", ".join(ids)) for reason, ids in _reasons(missing)]
    no_card = [row for row in rows if row.mapped and row.kind in ONE_SIDED and row.verdict is None]
    body += [("1", row.no_verdict, row.id) for row in no_card]
    table = _table(("rows", "reason", "ids"), body or [("0", "every row is mapped", "")])
    return f"## Not mapped\n\nRows without a forecast; none is dropped.\n\n{table}"


def _reasons(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    groups = by_source(rows, lambda row: row.reason)
    return sorted(
        ((reason, [row.id for row in group]) for reason, group in groups.items()), key=lambda one: -len(one[1])
    )


def _components(kernels: list[Kernel] | None) -> str:
    if kernels is None:
        return "## Kernels\n\nNo table of kernel-level measurements was given (`COMPONENTS=`)."
    known = [one for one in kernels if one.error is not None]
    groups = by_source(known, lambda one: f"{one.kernel}\n{one.provider}\n{one.version}")
    body = []
    for name, group in groups.items():
        errors = [one.error or 0.0 for one in group]
        kernel, provider, version = name.split("\n")
        shown = (f"{median(abs(one) for one in errors):.2%}", f"{min(errors):+.2%}", f"{max(errors):+.2%}")
        body.append((kernel, provider, version, str(len(group)), *shown))
    body.sort(key=lambda one: -float(one[4].rstrip("%")))
    unknown = [one for one in kernels if one.error is None]
    note = f"{len(known)} figures of single kernels on the forecast's tape; {len(unknown)} without a composition.\n\n"
    note += (
        "Inferred from these figures, for want of the code of that release, so that their small errors prove little: "
    )
    note += "; ".join(INFERRED) + "."
    return f"## Kernels\n\n{note}\n\n" + _table(
        ("kernel", "provider", "Liger", "rows", "median error", "least", "largest"), body
    )


def _competitors(rows: Sequence[Row], others: dict[str, Any] | None) -> str:
    title = "## Beside other estimators"
    if others is None:
        return f"{title}\n\nNot run: `benchmarks/competitors.py` writes what `--competitors` reads."
    by_id = {row.id: row for row in rows}
    body = []
    for name, tool in others["tools"].items():
        values, said = tool.get("rows", {}), (tool.get("version", ""), tool.get("note", ""))
        compared = [(kind, _pairs(by_id, values, kind)) for kind in FIGURES]
        for kind, pairs in compared:
            if pairs:
                body.append(_compared(name, kind, said, pairs))
        if not any(pairs for _, pairs in compared):
            body.append((name, said[0], "", "0", "", "", "", said[1]))
    head = (
        "estimator",
        "version",
        "figure",
        "rows",
        "its median error",
        "ours on these rows",
        "too low",
        "what it takes",
    )
    note = "On the scored rows that each can take; medians of |error|, averaged over source files."
    return f"{title}\n\n{note}\n\n" + _table(head, body)


def _compared(name: str, kind: str, said: tuple[str, str], pairs: list[tuple[Row, float]]) -> tuple[str, ...]:
    theirs = _mean_over_sources([(row.source, abs(value / row.measured - 1)) for row, value in pairs if row.measured])
    ours = _mean_over_sources([(row.source, abs(row.error)) for row, _ in pairs if row.error is not None])
    low = sum(value < row.measured for row, value in pairs if row.measured) / len(pairs)
    return name, said[0], kind, str(len(pairs)), f"{theirs:.1%}", f"{ours:.1%}", f"{low:.0%}", said[1]


def _pairs(by_id: dict[str, Row], values: dict[str, float], kind: str) -> list[tuple[Row, float]]:
    rows = [(by_id[name], value) for name, value in values.items() if name in by_id]
    return [(row, value) for row, value in rows if row.scored and row.kind == kind and row.measured]


def _mean_over_sources(values: Sequence[tuple[str, float]]) -> float:
    groups = by_source(values, lambda one: one[0])
    return sum(median(value for _, value in group) for group in groups.values()) / len(groups)
