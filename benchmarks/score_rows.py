"""A CSV of published measurements becomes rows with a forecast each: what scoring.py and score_tables.py work on.

A row that cannot be mapped keeps its place, with the reason. Rows that repeat another's configuration and value are
marked and count once. Columns and rules: docs/reference/truth-format.md.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from scoring import Judged, Point, Span
from truth import Unmapped, job_of, shape_of
from truth_cards import card_of, with_capacity
from truth_spread import readings, spanned_kinds

from overspill.errors import OverspillError
from overspill.forecast.device.result import forecast_device
from overspill.units import GiB

__all__ = ["COLUMNS", "BadTable", "Row", "read_rows", "score_row", "score_rows"]

#: What a row must have a column for; those of _OPTIONAL may be missing and are then empty.
COLUMNS = (
    "id", "source_ref", "model", "method", "lora_rank", "lora_targets", "optimizer", "weight_dtype", "micro_batch",
    "seq_len", "grad_ckpt", "attention", "n_gpus", "parallelism", "offload", "framework", "gpu", "measured_gib",
    "measure_kind", "notes", "quality",
)  # fmt: skip
_OPTIONAL = (
    "source_title", "n_params", "master_dtype", "published_value", "published_unit", "versions", "unpredictable",
    "inferred_oom",
)  # fmt: skip
#: Two rows that agree in these say one thing. Notes and versions are left out: what they change would change the value.
_IDENTITY = (
    "model", "method", "lora_rank", "lora_targets", "optimizer", "weight_dtype", "master_dtype", "micro_batch",
    "seq_len", "grad_ckpt", "attention", "n_gpus", "parallelism", "offload", "framework", "gpu", "measure_kind",
    "measured_gib", "published_value", "published_unit", "inferred_oom",
)  # fmt: skip
FIGURES = ("allocated", "reserved", "smi")
ONE_SIDED = ("fits", "oom")
#: Virtual cards, as shares of the measured figure: an allocated one does not fit below itself, a shown one does above.
_BELOW_ALLOCATED = (0.9, 0.97)
_FROM_SHOWN = (1.0, 1.1)


class BadTable(Exception):
    """Why a file is no table of measurements, in one sentence."""


@dataclass(frozen=True, slots=True)
class Virtual:
    """A verdict on a card that is share × the measured figure large. ran: whether the run fits there."""

    share: float
    ran: bool
    verdict: str
    probability: float


@dataclass(frozen=True, slots=True)
class Row:
    """One row and its forecast; GiB. reason: why there is no forecast. repeats: the id of the row that it repeats."""

    id: str
    source: str
    framework: str
    method: str
    model: str
    kind: str
    quality: str
    unpredictable: str = ""
    inferred: bool = False
    compiled: bool = False
    repeats: str = ""
    reason: str = ""
    no_verdict: str = ""
    measured: float | None = None
    figures: dict[str, Span] = field(default_factory=dict)
    spanned: Span | None = None
    card: str = ""
    probability: float | None = None
    verdict: str | None = None
    peak_phase: str = ""
    virtual: tuple[Virtual, ...] = ()
    notes: str = ""
    versions: str = ""
    empirical: tuple[str, ...] = ()

    @property
    def mapped(self) -> bool:
        return not self.reason

    @property
    def scored(self) -> bool:
        """Counts towards the targets: quality A or B, predictable, once."""
        return self.mapped and not self.unpredictable and not self.repeats and self.quality in ("A", "B")

    @property
    def error(self) -> float | None:
        if self.measured is None or self.kind not in self.figures:
            return None
        return self.figures[self.kind].likely / self.measured - 1

    @property
    def point(self) -> Point | None:
        if self.measured is None or self.spanned is None:
            return None
        return Point(self.source, self.measured, self.spanned, self.figures["allocated"].likely)

    @property
    def judged(self) -> Judged | None:
        if self.kind not in ONE_SIDED or self.verdict is None or self.probability is None:
            return None
        return Judged(self.source, self.kind == "fits", self.verdict, self.probability)

    @property
    def cell(self) -> tuple[str, str]:
        return self.framework, self.method + (", torch.compile" if self.compiled else "")


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """The table's rows as text. Raises BadTable."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            rows = [{key: value or "" for key, value in row.items() if key is not None} for row in reader]
    except OSError as error:
        raise BadTable(f"{path} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadTable(f"{path} is not a CSV file in UTF-8: {error}.") from None
    if missing := [name for name in COLUMNS if name not in names]:
        raise BadTable(f"{path} lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}.")
    if not rows:
        raise BadTable(f"{path} has a header and no rows.")
    seen: set[str] = set()
    for number, row in enumerate(rows, 2):
        if not row["id"] or row["id"] in seen:
            raise BadTable(f"{path}, row {number}: the id {row['id']!r} is {'used twice' if row['id'] else 'empty'}.")
        seen.add(row["id"])
    return [{**dict.fromkeys(_OPTIONAL, ""), **row} for row in rows]


def score_rows(table: Sequence[dict[str, str]], *, workers: int | None = None) -> list[Row]:
    """A forecast for each row, in the table's order. workers: processes; None: one for each processor."""
    first: dict[tuple[str, ...], str] = {}
    marked = [(row, _repeated(row, first)) for row in table]
    count = min(workers or os.cpu_count() or 1, len(marked))
    if count == 1:
        return [score_row(row, repeats) for row, repeats in marked]
    with ProcessPoolExecutor(count) as pool:
        return list(pool.map(score_row, *zip(*marked, strict=True), chunksize=8))


def without_empirical(table: Sequence[dict[str, str]], rows: Sequence[Row]) -> list[Row]:
    """The rows again, those forecast anew to which a term applied that nobody can explain yet."""
    return [
        score_row(row, scored.repeats, empirical=False) if scored.empirical else scored
        for row, scored in zip(table, rows, strict=True)
    ]


def _repeated(row: dict[str, str], first: dict[tuple[str, ...], str]) -> str:
    """The id of the first row that says the same, or nothing. Rows without any value are compared as well: two runs of
    one configuration that both fitted, or both did not, are one fact."""
    key = tuple(row[name].strip() for name in _IDENTITY)
    known = first.setdefault(key, row["id"])
    return "" if known == row["id"] else known


def score_row(row: dict[str, str], repeats: str = "", *, empirical: bool = True) -> Row:
    """Never raises for what stands in a row: a row without a forecast carries the reason."""
    base = {
        "id": row["id"], "source": row["source_ref"], "framework": row["framework"], "method": row["method"],
        "model": row["model"], "kind": row["measure_kind"], "quality": row["quality"],
        "unpredictable": row["unpredictable"], "inferred": row["inferred_oom"].strip().lower() == "yes",
        "repeats": repeats, "notes": row["notes"], "versions": row["versions"],
    }  # fmt: skip
    try:
        return Row(**{**base, **_forecast(row, empirical=empirical)})  # type: ignore[arg-type]
    except Unmapped as error:
        reason = str(error)
    except OverspillError as error:
        reason = f"{error.message} ({error.code})"
    except Exception as error:  # noqa: BLE001  one broken row is named, the others count
        reason = f"the mapping or the forecast broke: {type(error).__name__}: {error}"
    return Row(**base, reason=reason)  # type: ignore[arg-type]


def _forecast(row: dict[str, str], *, empirical: bool) -> dict[str, object]:
    kind = row["measure_kind"]
    if kind not in (*FIGURES, *ONE_SIDED):
        raise Unmapped(f"the kind {kind!r} is none of {', '.join((*FIGURES, *ONE_SIDED))}")
    measured = _measured(row)
    jobs = [job_of(one) for one in readings(row)]
    shape = shape_of(row["model"])
    card, no_card = card_of(row["gpu"])
    forecasts = [forecast_device(job, shape, card, name=row["model"], empirical=empirical) for job in jobs]
    likely = forecasts[0]
    figures = {name: _span([getattr(one, name) for one in forecasts]) for name in FIGURES}
    spanned = None
    if kind in FIGURES:
        spans = [figures[name] for name in spanned_kinds(row)]
        spanned = Span(min(one.low for one in spans), figures[kind].likely, max(one.high for one in spans))
    virtual: list[Virtual] = []
    if card is not None and measured is not None and not row["unpredictable"]:
        shares = {"allocated": _BELOW_ALLOCATED, "smi": _FROM_SHOWN}.get(kind, ())
        for share in shares:
            there = forecast_device(
                jobs[0], shape, with_capacity(card, round(share * measured * GiB)), empirical=empirical
            )
            assert there.verdict is not None and there.probability is not None
            virtual.append(Virtual(share, kind == "smi", there.verdict, there.probability))
    return {
        "framework": jobs[0].framework.name, "compiled": jobs[0].kernels.compile, "measured": measured,
        "figures": figures, "spanned": spanned, "card": card.name if card else "", "no_verdict": no_card,
        "probability": likely.probability, "verdict": likely.verdict, "peak_phase": likely.peak_phase,
        "virtual": tuple(virtual), "empirical": tuple(sorted({term for one in forecasts for term in one.empirical})),
    }  # fmt: skip


def _measured(row: dict[str, str]) -> float | None:
    text = row["measured_gib"].strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise Unmapped(f"measured_gib is no number: {text!r}") from None
    if not 0 < value < 2**40:
        raise Unmapped(f"measured_gib is no size: {text}")
    return value


def _span(figures: Sequence[object]) -> Span:
    low = min(one.low_nbytes for one in figures)  # type: ignore[attr-defined]
    high = max(one.high_nbytes for one in figures)  # type: ignore[attr-defined]
    return Span(low / GiB, figures[0].likely_nbytes / GiB, high / GiB)  # type: ignore[attr-defined]
