"""Accelerators: what a card holds, how fast it is, and what it was seen to offer; looked up by what people type.

The rows are in accelerators.csv, made by tools/make_accelerator_catalog.py, each with its source. Cards that state no
usable memory get one by the rules of docs/theory/accelerators.md, computed here from the rows that do, and say so.
"""

from __future__ import annotations

import csv
import difflib
import functools
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

from overspill.catalog.names import forms, squeeze
from overspill.errors import OverspillError
from overspill.units import GiB, MiB

__all__ = ["Accelerator", "Price", "accelerator", "accelerators", "best_matches", "usable_of"]

#: Cards of data centres with GDDR: their ECC lies in the memory itself and is on by default (nvidia-smi -q, ECC mode).
_INLINE_ECC: Final = ("P40", "T4", "A2", "A10", "A10G", "A16", "A40", "L4", "L40", "L40S")

#: What people, or a driver, call a card by a name that is not its own.
_MEANT: Final = {
    "h100": "H100 SXM 80GB",
    "h800": "H800 SXM 80GB",
    "h200": "H200 SXM 141GB",
    "gh200480gb": "GH200 96GB (HBM3)",  # the driver counts the processor's memory in the name
    "dgxspark": "GB10 (DGX Spark) 128GB",
    "spark": "GB10 (DGX Spark) 128GB",
    "strixhalo": "Ryzen AI Max+ 395 / Radeon 8060S (Strix Halo)",
    "8060s": "Ryzen AI Max+ 395 / Radeon 8060S (Strix Halo)",
    "ryzenaimax395": "Ryzen AI Max+ 395 / Radeon 8060S (Strix Halo)",
    "trillium": "TPU v6e (Trillium)",
    "ironwood": "TPU v7x (Ironwood)",
}

#: Of cards that differ in the form alone, the one that most are: SXM modules in servers.
_FORMS: Final = ("SXM", "SXM2", "PCIe")


@dataclass(frozen=True)
class Price:
    """US dollars, to buy or for one hour, and where and when that was read."""

    usd: float
    source: str


@dataclass(frozen=True)
class Accelerator:
    """One card, or one device of a board.

    Attributes:
        memory_nbytes: what the name says, GiB taken as 2**30 bytes.
        seen_nbytes: what the driver's tool (nvidia-smi) calls the total.
        usable_nbytes: what the runtime offers (torch's total_memory): seen_nbytes less what the driver keeps.
        usable_low_nbytes, usable_high_nbytes: the interval of usable_nbytes; equal where it was stated.
        usable_rule: "stated", or the rule that gave it.
        bandwidth_bytes_per_s: of its memory.
        flops_per_s: dense peak by dtype (fp32, tf32, fp16, bf16, fp8), with fp32 accumulation.
        measured_bf16_flops_per_s: the best matrix product that was measured, where one was.
        host_bytes_per_s, gpu_bytes_per_s: of the link to the host and to other cards, in one direction, in theory.
        recalled: fields that the source of the table recalled and did not look up.
    """

    name: str
    vendor: str
    arch: str
    memory_nbytes: int
    seen_nbytes: int
    usable_nbytes: int
    usable_low_nbytes: int
    usable_high_nbytes: int
    usable_rule: str
    memory_kind: str
    bandwidth_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    measured_bf16_flops_per_s: float | None
    compute_capability: str | None
    tdp_watts: float | None
    host_link: str
    host_bytes_per_s: float | None
    gpu_link: str
    gpu_bytes_per_s: float | None
    year: int
    price: Price | None
    cloud_per_hour: Price | None
    source: str
    confidence: str
    recalled: str
    notes: str
    aliases: tuple[str, ...]

    @property
    def unified(self) -> bool:
        """Its memory is the host's: what other programs hold comes off, and there is no second tier in DRAM."""
        return "unified" in self.memory_kind


def _rows() -> list[dict[str, str]]:
    text = resources.files("overspill.catalog").joinpath("accelerators.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _number(text: str, scale: float = 1.0) -> float | None:
    return float(text) * scale if text else None


def _seen_share(rows: list[dict[str, str]]) -> dict[str, list[float]]:
    """For each kind of memory, what nvidia-smi showed as a share of what the name says, over the rows that state it."""
    shares: dict[str, list[float]] = {}
    for row in rows:
        if row["smi_mib"]:
            share = int(row["smi_mib"]) / (float(row["memory_gib"]) * 1024)
            shares.setdefault(_kind(row), []).append(share)
    return shares


def _kind(row: dict[str, str]) -> str:
    """Cards of one kind show about the same share of what their name says: ECC inside GDDR takes a sixteenth, say."""
    if "unified" in row["memory_kind"]:
        return "unified"
    if row["memory_kind"].startswith("HBM"):
        return "HBM of Blackwell Ultra" if row["arch"].startswith("Blackwell Ultra") else "HBM"
    if row["name"].startswith("RTX PRO"):
        return "GDDR7 of RTX PRO"
    inline = row["vendor"] == "NVIDIA" and row["name"].split()[0] in _INLINE_ECC
    return "GDDR with ECC" if inline else "GDDR"


@dataclass(frozen=True)
class _Reserve:
    """What the driver keeps of the total it shows: base + slope × total (GiB), and the largest misses below and above.

    Least squares over the rows that state both figures; docs/theory/accelerators.md says why it is about affine.
    """

    base: float
    slope: float
    below: float
    above: float

    def gib(self, total: float) -> float:
        return max(0.0, self.base + self.slope * total)


def _reserve(rows: list[dict[str, str]], shares: dict[str, list[float]]) -> _Reserve:
    points = []
    for row in rows:
        if row["runtime_gib"]:
            total = int(row["smi_mib"]) / 1024 if row["smi_mib"] else _shown_gib(row, shares)
            points.append((total, total - float(row["runtime_gib"])))
    fit = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    misses = [y - (fit.intercept + fit.slope * x) for x, y in points]
    return _Reserve(fit.intercept, fit.slope, -min(misses), max(misses))


def _shown_gib(row: dict[str, str], shares: dict[str, list[float]]) -> float:
    return float(row["memory_gib"]) * statistics.median(shares.get(_kind(row), [1.0]))


def _usable(row: dict[str, str], shares: dict[str, list[float]], reserve: _Reserve) -> tuple[int, int, int, int, str]:
    """seen, usable, its interval, and the rule."""
    total = int(row["smi_mib"]) / 1024 if row["smi_mib"] else _shown_gib(row, shares)
    seen = round(total * GiB)
    if row["runtime_gib"]:
        stated = round(float(row["runtime_gib"]) * GiB)
        return seen, stated, stated, stated, "stated"
    if "75% by default" in row["usable_source"]:
        part = round(0.75 * total * GiB)
        return seen, part, part, seen, "the share that the system lets a GPU wire by default"
    kept = reserve.gib(total)
    spread = [1.0] if row["smi_mib"] else shares.get(_kind(row), [1.0])
    middle = statistics.median(spread)
    low = total * min(spread) / middle - kept - reserve.above
    high = total * max(spread) / middle - kept + reserve.below
    rule = "what nvidia-smi shows" if row["smi_mib"] else f"the share that cards with {_kind(row)} show"
    low_nbytes, high_nbytes = round(max(0.0, low) * GiB), round(min(high, total) * GiB)
    return seen, round((total - kept) * GiB), low_nbytes, max(low_nbytes, high_nbytes), f"{rule}, less the driver's"


def usable_of(seen_nbytes: int) -> tuple[int, int, int]:
    """What the runtime offers of a total that the driver shows, with its interval (low, high), in bytes."""
    rows = _rows()
    reserve = _reserve(rows, _seen_share(rows))
    total = seen_nbytes / GiB
    kept = reserve.gib(total)
    usable, low, high = (total - kept, total - kept - reserve.above, min(total, total - kept + reserve.below))
    return round(max(0.0, usable) * GiB), round(max(0.0, low) * GiB), round(max(0.0, high) * GiB)


@functools.cache
def accelerators() -> tuple[Accelerator, ...]:
    """Every accelerator of the catalogue."""
    rows = _rows()
    shares = _seen_share(rows)
    reserve = _reserve(rows, shares)
    return tuple(_accelerator(row, shares, reserve) for row in rows)


def _accelerator(row: dict[str, str], shares: dict[str, list[float]], reserve: _Reserve) -> Accelerator:
    seen, usable, low, high, rule = _usable(row, shares, reserve)
    flops = {dtype: _number(row[f"{dtype}_tflops"], 1e12) for dtype in ("fp32", "tf32", "fp16", "bf16", "fp8")}
    price, cloud = _number(row["price_usd"]), _number(row["cloud_usd_per_hour"])
    return Accelerator(
        name=row["name"],
        vendor=row["vendor"],
        arch=row["arch"],
        memory_nbytes=round(float(row["memory_gib"]) * GiB),
        seen_nbytes=seen,
        usable_nbytes=usable,
        usable_low_nbytes=low,
        usable_high_nbytes=high,
        usable_rule=rule,
        memory_kind=row["memory_kind"],
        bandwidth_bytes_per_s=float(row["bandwidth_gb_s"]) * 1e9,
        flops_per_s={dtype: value for dtype, value in flops.items() if value is not None},
        measured_bf16_flops_per_s=_number(row["measured_bf16_tflops"], 1e12),
        compute_capability=row["compute_capability"] or None,
        tdp_watts=_number(row["tdp_w"]),
        host_link=row["host_link"],
        host_bytes_per_s=_number(row["host_gb_s"], 1e9),
        gpu_link=row["gpu_link"],
        gpu_bytes_per_s=_number(row["gpu_gb_s"], 1e9),
        year=int(row["year"]),
        price=Price(price, row["price_source"]) if price is not None else None,
        cloud_per_hour=Price(cloud, row["cloud_source"]) if cloud is not None else None,
        source=row["source"],
        confidence=row["confidence"],
        recalled=row["recalled"],
        notes=row["notes"],
        aliases=tuple(sorted(forms(row["name"], float(row["memory_gib"])))),
    )


@functools.cache
def _index() -> dict[str, list[tuple[int, Accelerator]]]:
    """Squeezed form -> the cards that it may mean, each with the number of words that it leaves out."""
    index: dict[str, list[tuple[int, Accelerator]]] = {}
    for one in accelerators():
        for form, left_out in forms(one.name, one.memory_nbytes / GiB).items():
            index.setdefault(form, []).append((left_out, one))
    return index


def best_matches(name: str) -> list[Accelerator]:
    """The cards that a name may mean: those that it leaves the fewest words out of. Empty for an unknown name."""
    meant = _MEANT.get(squeeze(name))
    if meant is not None:
        return [one for one in accelerators() if one.name == meant]
    found = _index().get(squeeze(name), [])
    fewest = min((left_out for left_out, _ in found), default=0)
    return [one for left_out, one in found if left_out == fewest]


def accelerator(name: str, *, memory_nbytes: int | None = None) -> Accelerator:
    """The accelerator that people mean by ``rtx4090``, ``A100-80GB`` or ``NVIDIA GeForce RTX 3090``.

    Where a name leaves the form open (SXM or PCIe) and nothing else, the module in servers is taken. ``memory_nbytes``
    (as a driver reports it) decides between sizes.

    Raises OverspillError OVS110 for a name that is unknown or stands for cards of several sizes, with their names.
    """
    found = best_matches(name)
    if memory_nbytes is not None and len(found) > 1:
        nearest = min(abs(one.seen_nbytes - memory_nbytes) for one in found)
        found = [one for one in found if abs(one.seen_nbytes - memory_nbytes) <= nearest + 512 * MiB]
    if len(found) > 1 and len({one.memory_nbytes for one in found}) == 1:
        found = sorted(found, key=_form_rank)[:1]
    if len(found) == 1:
        return found[0]
    if found:
        raise OverspillError(
            "OVS110",
            "This name stands for several accelerators.",
            field="device.gpu",
            value=name,
            next_step=f"Say which: {', '.join(one.name for one in found)}.",
        )
    near = _nearest(name)
    raise OverspillError(
        "OVS110",
        "This accelerator is not in the catalogue.",
        field="device.gpu",
        value=name,
        next_step=f"Nearest: {', '.join(near)}. A card of your own goes into overspill.toml.",
    )


def _form_rank(one: Accelerator) -> int:
    words = one.name.split()
    return next((rank for rank, form in enumerate(_FORMS) if form in words), len(_FORMS))


def _nearest(name: str) -> list[str]:
    """Names that look like it; the number in it counts most."""
    squeezed = squeeze(name)
    digits = re.findall(r"\d{2,}", squeezed)
    same = [one.name for one in accelerators() if digits and digits[0] in squeeze(one.name)]
    close = difflib.get_close_matches(squeezed, list(_index()), n=6, cutoff=0.5)
    named = [_index()[form][0][1].name for form in close]
    return list(dict.fromkeys([*same, *named]))[:4] or ["RTX 4090", "RTX 3090", "A100 SXM 80GB", "H100 SXM 80GB"]
