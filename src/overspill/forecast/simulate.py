"""A small discrete-event simulation of the schedule: the predicted time of a step.

It runs the same operations that a session executes (schedule/), each lane in its order, and no other model of the
step. Disk requests in flight share the drive's measured rate; the update lane is bound by DRAM. It does not model
caches, seeks or other processes. The idea is that of an operation-level roofline simulator: bytes over a link,
FLOPs over a unit, and who waits for whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overspill.plan import Overlap
from overspill.schedule import Key, Kind, Lane, Op, StepPlan, build_step

__all__ = ["Rates", "simulate_step_seconds"]

_STEPS = 5  # the first fills the ring; the steps after it repeat

Task = tuple[int, Key]


@dataclass(frozen=True, slots=True)
class Rates:
    """What the simulated machine does. forward_seconds, backward_seconds: by block, of one whole optimizer step."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    memory_bytes_per_s: float
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]


def simulate_step_seconds(
    plan: StepPlan, rates: Rates, *, read_threads: int, write_threads: int, every_steps: int
) -> float:
    """Seconds of a step in the steady state, commits spread over ``every_steps`` (0: none)."""
    plain = _steady_seconds(plan, rates, read_threads, write_threads, commits=False)
    if every_steps == 0:
        return plain
    committing = _steady_seconds(plan, rates, read_threads, write_threads, commits=True)
    return plain + max(0.0, committing - plain) / every_steps


def _steady_seconds(plan: StepPlan, rates: Rates, read_threads: int, write_threads: int, *, commits: bool) -> float:
    steps = [build_step(plan, commits=commits).ops] * _STEPS
    done_at = _run(steps, plan, rates, {Lane.READ: read_threads, Lane.WRITE: write_threads})
    norm = Key(Kind.NORM)
    return (done_at[_STEPS - 1, norm] - done_at[0, norm]) / (_STEPS - 1)


def _run(steps: Sequence[Sequence[Op]], plan: StepPlan, rates: Rates, width: dict[Lane, int]) -> dict[Task, float]:
    """When each operation of each step is done."""
    queue: dict[Lane, list[tuple[int, Op]]] = {lane: [] for lane in Lane}
    for number, ops in enumerate(steps):
        for op in ops:
            queue[op.lane].append((number, op))
    head = dict.fromkeys(Lane, 0)
    running: dict[Lane, dict[Task, float]] = {lane: {} for lane in Lane}  # what is left: bytes on disk lanes, seconds
    done_at: dict[Task, float] = {}
    known = [{op.key for op in ops} for ops in steps]
    updates = [[op.key for op in ops if op.key.kind is Kind.UPDATE] for ops in steps]
    now = 0.0

    def ready(number: int, op: Op) -> bool:
        if any((number, key) not in done_at for key in op.after):
            return False
        if number == 0:
            return True
        before = number - 1
        if any(key in known[before] and (before, key) not in done_at for key in op.after_previous):
            return False
        # overlap = step: step() returns when all updates are done, and the next forward comes after it.
        first = op.key == (Kind.FORWARD, 0, -1)
        return not (first and plan.overlap is Overlap.STEP) or all((before, key) in done_at for key in updates[before])

    def amount(op: Op) -> float:
        if op.lane in (Lane.READ, Lane.WRITE):
            return float(op.nbytes)
        if op.key.kind is Kind.UPDATE:
            return op.nbytes / rates.memory_bytes_per_s
        if op.key.kind is Kind.FORWARD:
            return rates.forward_seconds[op.key.block]
        return rates.backward_seconds[op.key.block] if op.key.kind is Kind.BACKWARD else 0.0

    while True:
        started = True
        while started:
            started = False
            for lane in Lane:
                while head[lane] < len(queue[lane]) and len(running[lane]) < width.get(lane, 1):
                    number, op = queue[lane][head[lane]]
                    if not ready(number, op):
                        break
                    running[lane][number, op.key] = amount(op)
                    head[lane] += 1
                    started = True
        speed = _speeds(rates, len(running[Lane.READ]), len(running[Lane.WRITE]))
        waits = [left / speed[lane] for lane, tasks in running.items() for left in tasks.values()]
        if not waits:
            assert all(head[lane] == len(queue[lane]) for lane in Lane), "the schedule has a circle"
            return done_at
        elapsed = min(waits)
        now += elapsed
        for lane, tasks in running.items():
            for task in list(tasks):
                tasks[task] -= elapsed * speed[lane]
                if tasks[task] <= 1e-9 * max(1.0, speed[lane]):
                    del tasks[task]
                    done_at[task] = now


def _speeds(rates: Rates, reads: int, writes: int) -> dict[Lane, float]:
    """Per running operation: bytes per second on the disk lanes, seconds per second on the others."""
    speed = dict.fromkeys(Lane, 1.0)
    if reads and writes:
        speed[Lane.READ] = speed[Lane.WRITE] = rates.mixed_bytes_per_s / (reads + writes)
    elif reads:
        speed[Lane.READ] = rates.read_bytes_per_s / reads
    elif writes:
        speed[Lane.WRITE] = rates.write_bytes_per_s / writes
    return speed
