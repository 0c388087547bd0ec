"""Running totals of a session, and what a step added to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Counters", "differences"]

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Counters:
    """Totals since attach: seconds by cause of a stall, bytes by tier."""

    stall_seconds: Mapping[str, float]
    read_nbytes: Mapping[str, int]
    written_nbytes: Mapping[str, int]


def differences(now: Mapping[str, Number], base: Mapping[str, Number]) -> dict[str, Number]:
    """What came on top of ``base``, key by key."""
    return {key: value - base[key] if key in base else value for key, value in now.items()}
