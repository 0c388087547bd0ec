"""Operations, lanes and dependencies: the vocabulary of a schedule.

A lane does its operations in the listed order; an operation starts when it is at the head of its lane and
everything it comes after is done. That is all an executor or a simulation needs to know.

    lane      does                                      one at a time?
    compute   FORWARD, BACKWARD, NORM, BOUNDARY          yes (the user's loop)
    read      READ: disk -> staging buffer               plan.read_threads at once
    update    UPDATE: the optimizer kernel on a chunk    yes
    write     WRITE: staging buffer or pool -> disk      plan.write_threads at once
    commit    COMMIT: sync, decide, flip                 yes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

__all__ = ["Key", "Kind", "Lane", "Op", "StepSchedule"]


class Lane(StrEnum):
    COMPUTE = "compute"
    READ = "read"
    UPDATE = "update"
    WRITE = "write"
    COMMIT = "commit"


class Kind(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    NORM = "norm"  # gradients are complete: norm, clip factor, learning rates are known
    BOUNDARY = "boundary"  # RNG, schedules and data position of the step are taken
    READ = "read"
    UPDATE = "update"
    WRITE = "write"
    COMMIT = "commit"


LANE_OF: Mapping[Kind, Lane] = {
    Kind.FORWARD: Lane.COMPUTE,
    Kind.BACKWARD: Lane.COMPUTE,
    Kind.NORM: Lane.COMPUTE,
    Kind.BOUNDARY: Lane.COMPUTE,
    Kind.READ: Lane.READ,
    Kind.UPDATE: Lane.UPDATE,
    Kind.WRITE: Lane.WRITE,
    Kind.COMMIT: Lane.COMMIT,
}


class Key(NamedTuple):
    """Names an operation within a step. ``block`` and ``chunk`` are -1 where they mean nothing."""

    kind: Kind
    block: int = -1
    chunk: int = -1

    def __str__(self) -> str:
        where = [str(part) for part in (self.block, self.chunk) if part >= 0]
        return f"{self.kind}({', '.join(where)})"


@dataclass(frozen=True)
class Op:
    """One operation.

    nbytes: what it moves: over the disk link for READ and WRITE, through DRAM for UPDATE, 0 otherwise.
    buffer: the staging buffer it fills, uses or empties; None for chunks that stay in memory.
    after: operations of the same step that must be done before it starts.
    after_previous: operations of the step before, likewise. Keys that the step before does not have are met.
    """

    key: Key
    nbytes: int = 0
    buffer: int | None = None
    after: tuple[Key, ...] = ()
    after_previous: tuple[Key, ...] = ()

    @property
    def lane(self) -> Lane:
        return LANE_OF[self.key.kind]


@dataclass(frozen=True)
class StepSchedule:
    """All operations of one optimizer step, each lane in its order."""

    ops: tuple[Op, ...]
    buffers: int
    commits: bool
    by_key: Mapping[Key, Op] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_key = {op.key: op for op in self.ops}
        assert len(by_key) == len(self.ops), "an operation is listed twice"
        object.__setattr__(self, "by_key", by_key)

    def lane(self, lane: Lane) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if op.lane is lane)
