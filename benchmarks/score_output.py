"""The scoreboard as JSON: for each row id the forecast, the measurement and the error; and the summary."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from components import Kernel
from score_rows import FIGURES, Row
from score_summary import Summary, group_figures
from scoring import Span

__all__ = ["compact", "report"]

_ROW = ("kind", "measured_gib", "low_gib", "likely_gib", "high_gib", "error", "probability", "verdict", "reason")


def report(
    rows: Sequence[Row],
    summary: Summary,
    without: Summary,
    *,
    kernels: list[Kernel] | None,
    others: dict[str, Any] | None,
) -> dict[str, Any]:
    """Sizes in GiB; errors are forecast / measured - 1. without: the empirical terms."""
    return {
        "format": "overspill-scoreboard-1",
        "date": datetime.date.today().isoformat(),
        "versions": {"overspill": _version(), "python": platform.python_version()},
        "counts": summary.counts,
        "targets": [asdict(one) for one in summary.targets],
        "targets_without_empirical": [asdict(one) for one in without.targets],
        "summary": {
            **group_figures(rows),
            "cells": [asdict(one) for one in summary.cells],
            "unpredictable": [asdict(one) for one in summary.unpredictable],
            "verdicts": {name: asdict(one) if one else None for name, one in summary.verdict_lines.items()},
            "constant_ratios": summary.ratios,
        },
        "rows": {row.id: _row(row) for row in rows},
        "not_mapped": {row.id: row.reason for row in rows if not row.mapped},
        "components": None if kernels is None else [asdict(one) | {"error": one.error} for one in kernels],
        "competitors": None
        if others is None
        else {name: tool.get("note", "") for name, tool in others["tools"].items()},
    }


def _version() -> str:
    try:
        return metadata.version("overspill")
    except metadata.PackageNotFoundError:
        return "unknown"


def _span(one: Span) -> dict[str, float]:
    return {"low_gib": round(one.low, 4), "likely_gib": round(one.likely, 4), "high_gib": round(one.high, 4)}


def _row(row: Row) -> dict[str, Any]:
    point = row.point
    return {
        "source": row.source,
        "framework": row.framework,
        "method": row.method,
        "kind": row.kind,
        "quality": row.quality,
        "scored": row.scored,
        "repeats": row.repeats or None,
        "unpredictable": row.unpredictable or None,
        "reason": row.reason or None,
        "compiled": row.compiled,
        "card": row.card or None,
        **{name: _span(row.figures[name]) if row.mapped else None for name in FIGURES},
        "interval": _span(row.spanned) if row.spanned else None,
        "probability": None if row.probability is None else round(row.probability, 6),
        "verdict": row.verdict,
        "no_verdict": row.no_verdict or None,
        "peak_phase": row.peak_phase or None,
        "measured_gib": row.measured,
        "error": None if row.error is None else round(row.error, 6),
        "in_interval": None if point is None else point.span.holds(point.measured),
        "verdict_right": None if row.judged is None else row.judged.right,
        "virtual": [asdict(one) | {"probability": round(one.probability, 6)} for one in row.virtual],
    }


def compact(full: dict[str, Any]) -> str:
    """The same report, with each row's figure of its own kind as a list: small enough to keep in a repository."""
    rows = {}
    for name, row in full["rows"].items():
        span = row["interval"] or {"low_gib": None, "likely_gib": None, "high_gib": None}
        rows[name] = [
            row["kind"], row["measured_gib"], span["low_gib"], span["likely_gib"], span["high_gib"], row["error"],
            row["probability"], row["verdict"], row["reason"] or (row["repeats"] and f"repeats {row['repeats']}"),
        ]  # fmt: skip
    small = _rounded({**full, "row_columns": _ROW, "rows": rows})
    lines = [f"{json.dumps(key)}: {_block(value)}" for key, value in small.items()]
    return "{" + ",\n".join(lines) + "}\n"


def _rounded(value: Any) -> Any:
    """Six decimals are more than any figure here has."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def _block(value: Any) -> str:
    """One line for each entry of a top-level list or table: diffs stay readable."""
    if isinstance(value, dict) and len(value) > 6:
        return "{\n" + ",\n".join(f"{json.dumps(key)}:{_dense(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list) and len(value) > 6:
        return "[\n" + ",\n".join(_dense(one) for one in value) + "]"
    return _dense(value)


def _dense(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
