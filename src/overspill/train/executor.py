"""The executor: runs a schedule's operations on threads, one lane each, and says what waited for what.

It knows no tensors and no files: ``run(op)`` does the work. Lanes take operations in the order of the schedule; an
operation starts when everything it comes after is done. The compute lane is the user's own thread, which tells the
executor what it has reached. Threads are made once and joined at close.

States and what moves between them (docs/theory/architecture.md):

    RUNNING --first error of a lane--> FAILED(cause) --close()--> CLOSED
    RUNNING --------------close()------------------------------> CLOSED

[Note: Stalls] When the user's thread waits for an update, the time in which the update lane itself waited for the
disk is the disk's (``disk_read``; ``disk_write`` when no buffer was free to read into), the rest is the kernel's
(``update``). So the causes of a step add up to the time that the user's thread stood still.

After a failure every wait raises OVS501 with the first cause; operations that have not started never do.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from overspill.errors import OverspillError
from overspill.schedule import Key, Kind, Lane, Op, StepSchedule

__all__ = ["Executor", "ExecutorState", "SubmittedStep"]


W = TypeVar("W")

_CAUSES = {Kind.READ: "disk_read", Kind.WRITE: "disk_write", Kind.COMMIT: "commit"}


class ExecutorState(Enum):
    RUNNING = "running"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(eq=False)
class _Task(Generic[W]):
    """An operation of one submitted step. ``done`` is set after it ran, or when the executor failed or closed."""

    op: Op
    step: SubmittedStep[W]
    after: list[_Task[W]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    started_at: float | None = None


class SubmittedStep(Generic[W]):
    """One step's operations on their way through the lanes, and ``work``: what ``run`` needs to know of the step."""

    def __init__(self, number: int, schedule: StepSchedule, work: W) -> None:
        self.number = number
        self.schedule = schedule
        self.work = work
        self.tasks: dict[Key, _Task[W]] = {}


class Executor(Generic[W]):
    """Runs submitted steps.

    Args:
        run: does one operation of a step; called on a lane's thread.
        threads: how many threads each lane has; the compute lane has none.
        wait_limit_seconds: longest that one operation may run while something waits; OVS505 then says what for. A lane
            that waits for the user's thread may wait for ever: a pause between two steps is no fault.
    """

    def __init__(
        self,
        run: Callable[[SubmittedStep[W], Op], None],
        *,
        threads: Mapping[Lane, int],
        wait_limit_seconds: float = 600.0,
    ) -> None:
        self._run = run
        self._wait_limit_seconds = wait_limit_seconds
        self._look_seconds = min(1.0, wait_limit_seconds / 4)
        self._lock = threading.Lock()
        self._state = ExecutorState.RUNNING
        self._cause: BaseException | None = None
        self._last: SubmittedStep[W] | None = None
        self._open: list[SubmittedStep[W]] = []
        self._queues: dict[Lane, queue.SimpleQueue[_Task[W] | None]] = {}
        self._threads: list[threading.Thread] = []
        self.stall_seconds: dict[str, float] = {}
        self._update_wait_seconds = dict.fromkeys(_CAUSES.values(), 0.0)
        for lane, count in threads.items():
            self._queues[lane] = queue.SimpleQueue()
            for i in range(count):
                thread = threading.Thread(
                    target=self._lane_loop, args=(lane,), name=f"overspill-{lane}-{i}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    # -- submitting ----------------------------------------------------------------------------------------

    def submit(self, number: int, schedule: StepSchedule, work: W) -> SubmittedStep[W]:
        """Hand over a step. Its reads start as soon as buffers are free; updates wait for its NORM."""
        step = SubmittedStep(number, schedule, work)
        for op in schedule.ops:
            step.tasks[op.key] = _Task(op, step)
        previous = self._last
        for task in step.tasks.values():
            task.after = [step.tasks[key] for key in task.op.after]
            if previous is not None:
                met = (previous.tasks.get(key) for key in task.op.after_previous)
                task.after += [t for t in met if t is not None and not t.done.is_set()]
        self._last = step
        with self._lock:
            if (
                self._state is ExecutorState.RUNNING
            ):  # else nothing starts, and what is not in _open is never waited for
                self._open = [s for s in self._open if not all(t.done.is_set() for t in s.tasks.values())] + [step]
        self.raise_if_failed()
        for task in step.tasks.values():
            if task.op.lane in self._queues:
                self._queues[task.op.lane].put(task)
        return step

    # -- the compute lane --------------------------------------------------------------------------------------

    def reach(self, step: SubmittedStep[W], key: Key, *, cause: str) -> None:
        """Wait for what ``key`` of the compute lane comes after, then mark it and what it follows there done.

        The user's thread says only where it waits, not each forward and backward that it passes.
        """
        self._wait([t for t in step.tasks[key].after if t.op.lane is not Lane.COMPUTE], cause)
        for task in step.tasks.values():
            if task.op.lane is Lane.COMPUTE:
                task.after = []  # as on the lanes: a step must not keep the steps before it alive
                task.done.set()
            if task.op.key == key:
                break

    def pass_by(self, step: SubmittedStep[W], key: Key) -> None:
        """Mark one operation of the compute lane done, if the step has it; what it comes after is done already."""
        task = step.tasks.get(key)
        if task is not None:
            task.after = []
            task.done.set()

    def wait(self, step: SubmittedStep[W], keys: Iterable[Key], *, cause: str) -> None:
        """Wait for operations of ``step``; keys that it does not have are done."""
        self._wait([step.tasks[key] for key in keys if key in step.tasks], cause)

    def wait_all(self, step: SubmittedStep[W], *kinds: Kind, cause: str) -> None:
        self._wait([task for task in step.tasks.values() if task.op.key.kind in kinds], cause)

    # -- state ------------------------------------------------------------------------------------------------

    @property
    def cause(self) -> BaseException | None:
        return self._cause

    def fail(self, cause: BaseException) -> None:
        """Stop: the first cause is kept, all waits raise, nothing that has not started starts."""
        with self._lock:
            if self._state is not ExecutorState.RUNNING:
                return
            self._state, self._cause = ExecutorState.FAILED, cause
            tasks = [task for step in self._open for task in step.tasks.values()]
        for task in tasks:
            task.done.set()

    def raise_if_failed(self) -> None:
        """Raises the first error of a lane: an OverspillError as itself, anything else as the cause of OVS501."""
        if self._state is ExecutorState.RUNNING:
            return
        if isinstance(self._cause, OverspillError):
            raise self._cause
        text = "The session is closed." if self._cause is None else f"The session has failed: {self._cause!r}."
        raise OverspillError("OVS501", text) from self._cause

    def close(self, *, join_seconds: float = 30.0) -> None:
        """Stop the threads and join them; operations that have not started never do."""
        with self._lock:
            if self._state is ExecutorState.RUNNING:
                self._state = ExecutorState.CLOSED
            tasks = [task for step in self._open for task in step.tasks.values()]
        for task in tasks:
            task.done.set()
        for thread in self._threads:
            lane = Lane(thread.name.split("-")[1])
            self._queues[lane].put(None)
        end = time.monotonic() + join_seconds
        for thread in self._threads:
            if thread is not threading.current_thread():  # a lane may be the one in which a session is collected
                thread.join(max(0.0, end - time.monotonic()))

    # -- inside ----------------------------------------------------------------------------------------------

    def _lane_loop(self, lane: Lane) -> None:
        tasks = self._queues[lane]
        while (task := tasks.get()) is not None:
            try:
                for needed in task.after:
                    if not needed.done.is_set():
                        self._lane_wait(task, needed)
                if self._state is not ExecutorState.RUNNING:
                    return
                task.started_at = time.monotonic()
                self._run(task.step, task.op)
            except BaseException as error:  # noqa: BLE001 - whatever it is, waiting threads must be told
                self.fail(error)
                return
            finally:
                task.after = []  # a chain of steps must not keep every step before it alive
                task.done.set()

    def _lane_wait(self, task: _Task[W], needed: _Task[W]) -> None:
        """A lane waits; for the update lane it is noted for what, see [Note: Stalls]."""
        # A read that has not started has no buffer yet: what is waited for is the write that empties one.
        cause = _CAUSES.get(needed.op.key.kind)
        if needed.op.key.kind is Kind.READ and needed.started_at is None:
            cause = "disk_write"
        start = time.perf_counter()
        while not needed.done.wait(self._look_seconds):
            if (stuck := self._stuck()) is not None:
                raise self._too_long(f"{task.op.key} of step {task.step.number}", stuck)
        if task.op.lane is Lane.UPDATE and cause is not None:
            self._update_wait_seconds[cause] += time.perf_counter() - start

    def _wait(self, tasks: list[_Task[W]], cause: str) -> None:
        open_tasks = [task for task in tasks if not task.done.is_set()]
        if open_tasks:
            before = dict(self._update_wait_seconds)
            start = time.perf_counter()
            for task in open_tasks:
                while not task.done.wait(self._look_seconds):
                    if (stuck := self._stuck()) is not None:
                        self.fail(self._too_long(f"The wait for {cause}", stuck))
            self._attribute(time.perf_counter() - start, before, cause)
        if self._state is not ExecutorState.RUNNING:
            self.raise_if_failed()

    def _attribute(self, seconds: float, before: dict[str, float], cause: str) -> None:
        """Divide a wait of the user's thread by what the update lane waited for meanwhile, see [Note: Stalls]."""
        left = seconds
        for why, total in self._update_wait_seconds.items():
            part = min(left, total - before[why])
            if part > 0:
                self.stall_seconds[why] = self.stall_seconds.get(why, 0.0) + part
                left -= part
        self.stall_seconds[cause] = self.stall_seconds.get(cause, 0.0) + left

    def _stuck(self) -> _Task[W] | None:
        """An operation that has been running for longer than the limit."""
        now = time.monotonic()
        with self._lock:
            for step in self._open:
                for task in step.tasks.values():
                    began = task.started_at
                    if began is not None and not task.done.is_set() and now - began > self._wait_limit_seconds:
                        return task
        return None

    def _too_long(self, who: str, stuck: _Task[W]) -> OverspillError:
        with self._lock:
            waiting = [
                f"{task.op.key} of step {task.step.number}"
                for step in self._open
                for task in step.tasks.values()
                if not task.done.is_set() and task.started_at is None and task.op.lane is not Lane.COMPUTE
            ]
        return OverspillError(
            "OVS505",
            f"{who} waits for {stuck.op.key} of step {stuck.step.number}, which has been running for more than "
            f"{self._wait_limit_seconds:.0f} s. {len(waiting)} operations wait, the first: {', '.join(waiting[:4])}.",
        )
