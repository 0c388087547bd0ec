"""What goes into the emulated accelerator and what comes out: delays, finished operations, counters. No device."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "DELAYED",
    "LANES",
    "Delayed",
    "Delays",
    "Direction",
    "Failing",
    "Lane",
    "Operation",
    "Stats",
    "idle_seconds",
]

Direction = Literal["h2d", "d2h"]
Lane = Literal["compute", "h2d", "d2h"]
Delayed = Literal["compute", "h2d", "d2h", "event"]
Failing = Literal["compute", "h2d", "d2h", "allocation", "pinning"]

LANES: tuple[Lane, ...] = ("compute", "h2d", "d2h")
DELAYED: tuple[Delayed, ...] = ("compute", "h2d", "d2h", "event")


@dataclass(frozen=True, kw_only=True)
class Delays:
    """By how many seconds the operations to come start later, in the order in which the host launches them.

    ``event`` is for the records of events. Each list is gone through again and again; an empty one delays nothing.
    With one launching thread a schedule means the same in every run.
    """

    compute: tuple[float, ...] = ()
    h2d: tuple[float, ...] = ()
    d2h: tuple[float, ...] = ()
    event: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for kind in DELAYED:
            if any(seconds < 0 for seconds in getattr(self, kind)):
                raise ValueError(f"a delay of {kind} is negative: {getattr(self, kind)}")

    @classmethod
    def seeded(cls, seed: int, *, most_seconds: float, share: float = 0.25, length: int = 61) -> Delays:
        """A schedule drawn from ``seed``: a ``share`` of each kind is delayed, each by up to ``most_seconds``.

        ``length`` is best a prime, so that the schedule does not fall into step with the loop that it disturbs.
        """
        draw = random.Random(seed)

        def some() -> tuple[float, ...]:
            return tuple(draw.random() * most_seconds if draw.random() < share else 0.0 for _ in range(length))

        return cls(compute=some(), h2d=some(), d2h=some(), event=some())


class Operation(NamedTuple):
    """One operation that the device has done.

    Ticks count its starts and ends; they are no time. ``began_seconds`` and ``finished_seconds`` are its stream's
    clock, in modelled time where computing or the link is made slow.
    """

    name: str
    lane: Lane
    stream: int
    nbytes: int
    started: int
    ended: int
    began_seconds: float
    finished_seconds: float

    def overlaps(self, other: Operation) -> bool:
        """Whether both were under way at some moment."""
        return self.started < other.ended and other.started < self.ended


def idle_seconds(operations: Iterable[Operation], lane: Lane) -> float:
    """For how long no operation ran on the lane, between its first and its last: its stalls, by their sum."""
    spans = sorted((o.began_seconds, o.finished_seconds) for o in operations if o.lane == lane)
    idle = 0.0
    busy_until = spans[0][0] if spans else 0.0
    for began, finished in spans:
        idle += max(0.0, began - busy_until)
        busy_until = max(busy_until, finished)
    return idle


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What the device has done since the last ``reset()``, by lane, and what it is doing (``…_running``).

    ``…_seconds`` is for how long the lane was taken: by modelled lengths where it is made slow, else as measured.
    """

    compute_operations: int
    compute_nbytes: int
    compute_running: int
    compute_most_at_once: int
    compute_seconds: float
    h2d_operations: int
    h2d_nbytes: int
    h2d_running: int
    h2d_most_at_once: int
    h2d_seconds: float
    d2h_operations: int
    d2h_nbytes: int
    d2h_running: int
    d2h_most_at_once: int
    d2h_seconds: float
    late_seconds: float
    """By how much the host's threads fell behind the modelled time, in all; the streams' clocks were put right then."""
    copies_while_computing: int
    """How often an operation started that made a copy and a computation run side by side."""
    synchronous_copies: int
    """Copies for which the host waited: asked to be blocking, or from or to memory that is not pinned."""
    planted_failures_left: int
    """Failures asked for by ``fail`` that nothing has met yet."""
    events_alive: int
    error_pending: bool
    """A stream has met an error that no synchronisation has raised yet, or the device is lost."""
    host_synchronous_operators: tuple[str, ...]
    """Operators that ran with the host waiting since their result's shape depends on data (ever, in this process)."""
