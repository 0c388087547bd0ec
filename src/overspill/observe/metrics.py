"""``RUN/metrics.jsonl``: one StepReport a row, written as it happens, cut back to the committed step on resume.

JSON has no NaN, and a diverged loss must not look like one that was not measured: non-finite numbers are
written as the texts "NaN", "Infinity" and "-Infinity", which the reader turns back. A line that a crash cut
short is no row. Losses are written with all digits, so that two runs can be compared bit by bit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from overspill.errors import OverspillError
from overspill.files import disk_errors, parse_json, replace_text, sync_directory
from overspill.report import StepReport

__all__ = ["Cut", "MetricsWriter", "last_row", "read_metrics", "row_text", "truncate_metrics"]


def _json_ready(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_ready(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def row_text(report: StepReport) -> str:
    """One row, without the line end."""
    return json.dumps(_json_ready(report.model_dump(mode="python")), separators=(",", ":"), allow_nan=False)


class MetricsWriter:
    """Appends rows; each is handed to the operating system at once, so that a killed process loses none.

    A power cut loses those since the last `sync`: call it before a commit, so that no committed step lacks its row.
    All methods raise OverspillError OVS401, OVS402 or OVS403 for what the disk refuses.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with self._disk_errors():
            self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            sync_directory(file.parent)

    def append(self, report: StepReport) -> None:
        row = memoryview((row_text(report) + "\n").encode())
        with self._disk_errors():
            while row:
                row = row[os.write(self._descriptor, row) :]

    def sync(self) -> None:
        """On return every row is on the disk."""
        with self._disk_errors():
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors(self._file, "Cannot write the metrics")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _rows(file: Path) -> Iterator[tuple[int, StepReport | Exception]]:
    """Each whole line with its number, as a row or as what is wrong with it."""
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last line end is empty, or a torn row
        if line:
            try:
                yield number, StepReport.read(parse_json(line), source=f"{file}, line {number}")
            except (ValueError, OverspillError) as error:
                yield number, error


def read_metrics(file: Path) -> list[StepReport]:
    """All whole rows. A last line without its end is left out; a damaged row before that raises OVS404."""
    if not file.exists():
        return []
    reports = []
    for number, row in _rows(file):
        if isinstance(row, Exception):
            raise OverspillError(
                "OVS404",
                f"Line {number} of the metrics is damaged: {row}.",
                field=str(file),
                next_step="Remove the line; the training state does not depend on it.",
            )
        reports.append(row)
    return reports


def last_row(file: Path) -> StepReport | None:
    """The newest whole row, read from the end: a long run's file is large."""
    try:
        with file.open("rb") as source:
            source.seek(0, os.SEEK_END)
            source.seek(max(0, source.tell() - 64 * 1024))
            lines = source.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            return StepReport.read(parse_json(line), source=str(file))
        except (ValueError, OverspillError):
            continue  # the first line of the window is usually cut; a damaged one says nothing either
    return None


class Cut(NamedTuple):
    """What `truncate_metrics` found: rows dropped, how many of these were damaged, steps that have no row."""

    dropped: int
    damaged: int
    missing: int


def truncate_metrics(file: Path, step: int) -> Cut:
    """Drop the rows after ``step``.

    Rows are not synced one by one, so a power loss may leave zeros or half a row where the newest ones were: a
    damaged row is dropped as well and counted, and the state, which is checked on its own, goes on.
    The new file replaces the old one in one rename: a crash here leaves the one or the other, whole.
    """
    if not file.exists():
        return Cut(0, 0, step)
    rows = [row for _, row in _rows(file)]
    kept = [row for row in rows if isinstance(row, StepReport) and row.step <= step]
    with disk_errors(file, "Cannot cut the metrics back"):
        replace_text(file, "".join(row_text(row) + "\n" for row in kept))
    damaged = sum(isinstance(row, Exception) for row in rows)
    return Cut(len(rows) - len(kept), damaged, step - len({row.step for row in kept}))
