"""The forecast beside what was measured: the loop that keeps forecasts honest.

`Measured` gathers from the step reports and the memory sampler; `compare` lays it beside a forecast's figures, which
come as plain rows so that this file need not know how a forecast is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overspill.report import Compared, StepReport
from overspill.units import format_nbytes, format_seconds

__all__ = ["Measured", "comparison_table"]

WARM_UP_STEPS = 2  # the first steps fault pages in, trace the order and write state for the first time


class Measured:
    """What a run really held, moved and took. Figures per step are medians after the first steps.

    Args:
        base_nbytes: what interpreter and libraries held before the first parameter.
    """

    def __init__(self, *, base_nbytes: int) -> None:
        self.base_nbytes = base_nbytes
        self.peak_nbytes = 0
        self._reports: list[tuple[int, int, float]] = []
        self._held: dict[str, dict[str, int]] = {}

    def add(self, report: StepReport) -> None:
        read, written = report.read_nbytes.get("disk", 0), report.written_nbytes.get("disk", 0)
        if report.eval_loss is None:  # an evaluation is no part of a step
            self._reports.append((read, written, report.seconds))
        for tier, classes in report.held_nbytes.items():
            highest = self._held.setdefault(tier, {})
            for name, nbytes in classes.items():
                highest[name] = max(highest.get(name, 0), nbytes)

    def finish(self, peak_nbytes: int) -> None:
        """The highest memory above the base, from the sampler."""
        self.peak_nbytes = peak_nbytes

    def held_nbytes(self, tier: str) -> Mapping[str, int]:
        return self._held.get(tier, {})

    @property
    def activations_nbytes(self) -> int:
        """What torch and the rest took beside the session's pool: the peak less what the pool held."""
        pool = sum(n for name, n in self.held_nbytes("host").items() if name != "activations")
        return max(0, self.peak_nbytes - pool)

    def per_step(self) -> tuple[float, float, float] | None:
        """Disk bytes read, bytes written, seconds: medians. None before the first step."""
        rows = self._reports[WARM_UP_STEPS:] or self._reports
        if not rows:
            return None
        return _median([r[0] for r in rows]), _median([r[1] for r in rows]), _median([r[2] for r in rows])


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def comparison_table(rows: Sequence[Compared]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and cells for people."""

    def text(row: Compared, value: float | None) -> str:
        if value is None:
            return "-"
        return format_nbytes(value) if row.unit == "bytes" else format_seconds(value)

    def difference(row: Compared) -> str:
        return "" if row.difference is None else f"{row.difference:+.1%}"

    cells: list[tuple[str, ...]] = [
        (row.what, text(row, row.forecast), text(row, row.measured), difference(row)) for row in rows
    ]
    return ("", "forecast", "measured", "difference"), cells
