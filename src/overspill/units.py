"""Quantities as people write them: bytes, rates and seconds.

GB (1000³) and GiB (1024³) are different units and never mixed: parsing keeps them apart, printing
says which. Everything inside Overspill is a plain number whose name carries the unit (``nbytes``,
``seconds``, ``bytes_per_s``). Only what a job file or a report needs is here; this is no unit library.
"""

from __future__ import annotations

import math
import re
from typing import Final

from overspill.errors import OverspillError

KiB: Final = 1024
MiB: Final = 1024**2
GiB: Final = 1024**3
TiB: Final = 1024**4

_FACTOR_BY_UNIT: Final[dict[str, int]] = {
    "B": 1,
    "kB": 1000,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": KiB,
    "MiB": MiB,
    "GiB": GiB,
    "TiB": TiB,
}
_SECONDS_BY_UNIT: Final[dict[str, float]] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY: Final = re.compile(r"^\s*(?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*(?P<unit>[A-Za-z/]*)\s*$")


def _split(text: str, field: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.match(text)
    if match is None:
        raise OverspillError(
            "OVS102", f"{text!r} is not a quantity.", field=field, value=text, next_step=f"Write it as in {example}."
        )
    return float(match["number"]), match["unit"]


def parse_nbytes(value: str | int | float, field: str = "nbytes") -> int:
    """Bytes from ``"24GiB"``, ``"7.5 GB"`` or a number, which counts bytes.

    Raises OverspillError OVS102 for a text without a unit, an unknown unit (with the nearest known one), a negative or
    a fractional count.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise OverspillError("OVS102", "Bytes are a number or a text.", field=field, value=value)
    if not isinstance(value, str):
        if not 0 <= value < math.inf or value != int(value):
            raise OverspillError(
                "OVS102", "Bytes are a whole number, 0 or more.", field=field, value=value, next_step='Write "24GiB".'
            )
        return int(value)
    number, unit = _split(value, field, '"24GiB" or "24GB"')
    if unit == "":
        raise OverspillError(
            "OVS102",
            "A size in a text needs a unit.",
            field=field,
            value=value,
            next_step=f'Write "{value.strip()}GiB", or "{value.strip()}B" if bytes are meant.',
        )
    factor = _FACTOR_BY_UNIT.get(unit)
    if factor is None:
        known = {name.lower(): name for name in _FACTOR_BY_UNIT}
        near = known.get(unit.lower()) or known.get(unit.lower() + "b") or known.get(unit.lower() + "ib")
        hint = f"Did you mean {near}?" if near else f"Known units: {', '.join(_FACTOR_BY_UNIT)}."
        raise OverspillError("OVS102", f"{unit!r} is not a unit of bytes.", field=field, value=value, next_step=hint)
    if not math.isfinite(number * factor):
        raise OverspillError("OVS102", "That is more than any machine holds.", field=field, value=value)
    return round(number * factor)


_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(value: str | int | float, field: str = "count") -> int:
    """A number of things as people write it: ``7B``, ``135M``, ``7_000_000_000``. Raises OverspillError OVS102."""
    text = str(value).strip().replace("_", "").replace(",", "")
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    try:
        number = float(text[: len(text) - len(unit)])
    except ValueError:
        number = -1.0
    if unit not in _COUNTS or not 0 <= number < float("inf"):
        raise OverspillError(
            "OVS102",
            "This is no number of things.",
            field=field,
            value=value,
            next_step="Write it as 7B, 135M or 7000000000.",
        )
    return round(number * _COUNTS[unit])


def parse_bytes_per_s(value: str | int | float, field: str = "bytes_per_s") -> float:
    """Bytes per second from ``"7GB/s"`` or a plain number. Raises OverspillError OVS102."""
    if isinstance(value, str):
        text = value.strip()
        if not text.endswith("/s"):
            raise OverspillError(
                "OVS102", "A rate ends in /s.", field=field, value=value, next_step='Write it as in "7GB/s".'
            )
        return float(parse_nbytes(text[:-2], field))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise OverspillError("OVS102", "A rate is a number, 0 or more, or a text.", field=field, value=value)
    return float(value)


def parse_seconds(value: str | int | float, field: str = "seconds") -> float:
    """Seconds from ``"10min"``, ``"2h"``, ``"250ms"`` or a plain number. Raises OverspillError OVS102."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise OverspillError("OVS102", "A duration is a number or a text.", field=field, value=value)
    if not isinstance(value, str):
        if not 0 <= value < math.inf:
            raise OverspillError("OVS102", "A duration is 0 or more, and finite.", field=field, value=value)
        return float(value)
    number, unit = _split(value, field, '"10min"')
    factor = _SECONDS_BY_UNIT.get(unit or "s")
    if factor is None:
        known = ", ".join(_SECONDS_BY_UNIT)
        raise OverspillError(
            "OVS102", f"{unit!r} is not a unit of time.", field=field, value=value, next_step=f"Known units: {known}."
        )
    if not math.isfinite(number * factor):
        raise OverspillError("OVS102", "That is longer than anything lasts.", field=field, value=value)
    return number * factor


def count(number: int, noun: str) -> str:
    """A number of things in words: "1 step", "12 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_nbytes(nbytes: float) -> str:
    """Bytes for people, in binary units: ``format_nbytes(1536 * MiB) == "1.50 GiB"``."""
    sign, left = ("-", -nbytes) if nbytes < 0 else ("", nbytes)
    for unit, factor in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if left >= factor:
            digits = 2 if factor >= GiB else 1 if left < 100 * factor else 0
            return f"{sign}{left / factor:.{digits}f} {unit}"
    return f"{sign}{left:.0f} B"


def format_bytes_per_s(bytes_per_s: float) -> str:
    """A rate for people, in decimal units, as drives are sold: ``"1.35 GB/s"``."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"


def format_seconds(seconds: float) -> str:
    """A duration for people: ``"850 ms"``, ``"12.3 s"``, ``"4 min 10 s"``, ``"3 h 05 min"``, ``"2 d 4 h"``."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"
