"""The stepper: hands each step to the executor's lanes, and waits for what the training thread needs of them.

One step, seen from the training thread (the lanes do the rest):

    forward      before a module that owns a parameter of block k: its pending update is finished
    backward     each fresh gradient moves into the pool; optimizer state is read ahead meanwhile
    take()       norm, clip factor and learning rates are fixed, updates are released; with ``overlap = step`` they
                 are waited for, with ``forward`` they run on behind the next forward
    boundary     RNG, schedule and data position of this step are taken; a commit of the step may go on

[Note: One step ahead] Step t+1 is handed to the executor when step t is taken, so that its reads begin as soon as
buffers are free; its updates wait until a step is taken again.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from overspill import _native
from overspill.errors import OverspillError
from overspill.plan import Overlap
from overspill.schedule import Key, Kind, Lane, Op, StepPlan, StepSchedule, build_step
from overspill.train.commit import Committer
from overspill.train.executor import Executor, SubmittedStep
from overspill.train.governor import MemoryGovernor
from overspill.train.gradients import GradientNorm, collect, install_hook, measure_norm
from overspill.train.hooks import HookSet
from overspill.train.live import LiveBlock, LiveParameter, StagingBuffer
from overspill.train.optimizer import Groups
from overspill.train.parts import SessionParts
from overspill.train.work import ChunkWorker, StepWork
from overspill.units import MiB

__all__ = ["Stepper"]


class Stepper:
    """The steps of one session.

    Args:
        parts: of attach().
        committer: takes the boundaries and the commits.
        flush: what a hook calls before the model is saved, copied or moved: the session's.

    Attributes:
        step: optimizer steps taken.
        blocks, staging, step_plan, worker: what the steps work on; `install` replaces them.
        norm, clip_factor, skipped: of the last step.
        measure_norm: take the norm even where nothing else asks for it.
    """

    def __init__(self, parts: SessionParts, committer: Committer, flush: Callable[[], None]) -> None:
        self.step = 0
        self.measure_norm = False
        self.norm: GradientNorm | None = None
        self.clip_factor: float | None = None
        self.skipped = False
        self._plan, self._model, self._kernel = parts.plan, parts.model, parts.kernel
        self._store, self._link = parts.store, parts.link
        self._committer = committer
        self._flush = flush
        margin = max(64 * MiB, parts.plan.memory_nbytes // 10)
        self._governor = MemoryGovernor(parts.base_nbytes + parts.plan.memory_nbytes, margin)
        self._threads = _native.ThreadPool(parts.plan.kernel_threads)
        self._hooks: HookSet | None = None
        self._owner_pid = os.getpid()
        self._entered = -1
        self._previous: SubmittedStep[StepWork] | None = None
        self._current: SubmittedStep[StepWork] | None = None
        self._executor: Executor[StepWork] = Executor(
            _weakly(self._run),  # lane threads must not keep a session alive that its user has let go of
            threads={
                Lane.READ: parts.plan.read_threads if parts.store else 0,
                Lane.UPDATE: 1,
                Lane.WRITE: parts.plan.write_threads if parts.store else 0,
                Lane.COMMIT: 1 if parts.store else 0,
            },
        )
        self.install(parts.blocks, parts.staging, parts.step_plan)

    def install(self, blocks: list[LiveBlock], staging: list[StagingBuffer], step_plan: StepPlan) -> None:
        """Take these blocks and buffers into use; the lanes are idle."""
        self.blocks, self.staging, self.step_plan = blocks, staging, step_plan
        self._live: dict[int, LiveParameter] = {id(p.parameter): p for block in blocks for p in block.parameters}
        self.worker = ChunkWorker(
            blocks=blocks,
            kernel=self._kernel,
            staging=staging,
            store=self._store,
            link=self._link,
            pool=self._threads,
        )
        self._schedules: dict[bool, StepSchedule] = {
            commits: build_step(step_plan, commits=commits) for commits in (False, True)
        }
        old = self._hooks
        if old is not None:
            old.close()
        blocks_by_id = {key: live.block.index for key, live in self._live.items()}
        self._hooks = HookSet(self._model, blocks_by_id, wait=self._settle, flush=self._flush, before=old)
        before_gradient = _weakly(self._before_gradient)
        self._hooks.handles += [
            install_hook(live, before_gradient)
            for live in self._live.values()
            # One that is frozen at the time takes no hook; its gradient, if one comes, is collected by step().
            if not live.on_device and live.parameter.requires_grad
        ]

    # -- the step -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Hand the first step to the executor: what is in the pool now is the state of step ``step``."""
        for live in self._live.values():
            live.version = live.parameter._version
        self._submit_next()

    def settle_previous(self) -> None:
        """Before a step is taken: the one before it is done with updates and commit. Raises its first error."""
        self.refuse_child()
        self._executor.raise_if_failed()
        self._committer.note_unclaimed()
        previous = self._previous
        if previous is not None:
            self._close_boundary(previous)
            self._executor.wait_all(previous, Kind.UPDATE, cause="update")
            self._executor.wait_all(previous, Kind.COMMIT, cause="commit")

    def take(self, groups: Groups) -> None:
        """Fix what this step does with the gradients that are there, and release its updates."""
        present = self._collect(groups)
        assert self._hooks is not None
        self._hooks.settle(live.parameter for live in present)
        current = self._current
        assert current is not None
        work = current.work
        scale = self._decide_scale()
        if self.skipped:
            present = []
        work.fill(self.blocks, present, groups, self._kernel, scale)
        self.step = current.number
        for block in self.blocks:
            if block.index in work.touched:
                block.weights_dirty = block.resident_dirty = True
        self._executor.reach(current, Key(Kind.NORM), cause="update")
        self._previous = current
        self._submit_next()
        self._finish(current, present)

    def _close_boundary(self, step: SubmittedStep[StepWork]) -> None:
        """Nobody has taken the step's boundary, and now it is late for it."""
        if step.work.complete is None:
            self._committer.close_boundary(step.work)
        self._executor.pass_by(step, Key(Kind.BOUNDARY))

    def _finish(self, current: SubmittedStep[StepWork], present: list[LiveParameter]) -> None:
        """Wait as the plan's overlap says, and let torch's version counters see the update."""
        if self._plan.overlap is Overlap.STEP:
            self._executor.wait_all(current, Kind.UPDATE, cause="update")
            if current.work.commits:
                # step() has returned, so weights may be edited: what a commit writes of them has to be written.
                self._executor.wait_all(current, Kind.WRITE, cause="disk_write")
            if self._link is not None:
                for block in self.blocks:
                    self._link.order_before_compute(block.index)
        for live in present:
            # A graph that saved this weight before the step must raise in backward, as after torch's own step.
            torch.autograd.graph.increment_version(live.parameter)
            live.version = live.parameter._version
            if self._plan.overlap is Overlap.FORWARD:
                live.parameter.grad = None

    def _collect(self, groups: Groups) -> list[LiveParameter]:
        grouped = {id(p) for group in groups for p in group["params"]}
        for block in self.blocks:
            block.touched = False
        if self._link is not None:
            self._link.begin()
        collect(self._live.values(), self._link)
        return [
            live for live in self._live.values() if live.parameter.grad is not None and id(live.parameter) in grouped
        ]

    def _decide_scale(self) -> float:
        """The norm, where somebody asks for it; the factor that gradients are scaled by; whether to skip."""
        self.norm, self.clip_factor, self.skipped = None, None, False
        limit = self._plan.max_grad_norm
        if limit is None and self._plan.nonfinite == "allow" and not self.measure_norm:
            return 1.0
        if self._link is not None:
            self._link.wait_all_fetched()
        self.norm = measure_norm(self.blocks, self._threads)
        if not self.norm.finite and self._plan.nonfinite == "skip":
            self.skipped = True
            return 1.0
        if not self.norm.finite and self._plan.nonfinite == "raise":
            raise OverspillError(
                "OVS502",
                f"The gradient of step {self.step + 1} has {self.norm.nonfinite} elements that are NaN or infinite.",
                field="plan.nonfinite",
                value=f"norm {self.norm.value}",
            )
        if limit is None:
            return 1.0
        # torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
        self.clip_factor = min(1.0, limit / (self.norm.value + 1e-6))
        return self.clip_factor

    def _submit_next(self) -> None:
        number = self.step + 1
        commits = self._committer.is_commit_step(number)
        work = StepWork(number=number, commits=commits)
        self._current = self._executor.submit(number, self._schedules[commits], work)

    def _run(self, step: SubmittedStep[StepWork], op: Op) -> None:
        work = step.work
        if op.key.kind is Kind.READ:
            self.worker.read(op)
        elif op.key.kind is Kind.UPDATE:
            self.worker.update(op, work)
        elif op.key.kind is Kind.WRITE:
            self.worker.write(op, work)
        elif op.key.kind is Kind.COMMIT and not work.void:
            self._committer.commit(work)

    def _wait_for_update(self, block: int) -> None:
        previous = self._previous
        if previous is None:
            return
        chunks = self.blocks[block].chunks
        self._executor.wait(previous, [Key(Kind.UPDATE, block, chunks[-1].index)], cause="update")

    def _before_gradient(self, block: int) -> None:
        """Before a fresh gradient goes into the pool: a stale graph may run while the memory is still in use."""
        self._enter(block)
        self._wait_for_update(block)

    def _enter(self, block: int) -> None:
        """The training thread comes to another block: a place to look at memory."""
        if block != self._entered:
            self._entered = block
            self._governor.check()

    def _settle(self, block: int) -> None:
        """Before a module that owns a parameter of ``block`` runs."""
        self._enter(block)
        self._wait_for_update(block)
        if self._link is not None:
            self._link.order_before_compute(block)

    # -- around the step ----------------------------------------------------------------------------------------

    @property
    def last_work(self) -> StepWork | None:
        """Of the step that was taken last."""
        return None if self._previous is None else self._previous.work

    def pass_boundary(self) -> None:
        """The last step's boundary is taken: its commit may go on."""
        if self._previous is not None:
            self._executor.pass_by(self._previous, Key(Kind.BOUNDARY))

    def flush(self) -> None:
        """Finish all pending updates, writes and commits. Raises the first error of a lane."""
        self.refuse_child()
        if self._previous is not None:
            self._close_boundary(self._previous)
            self._executor.wait_all(self._previous, Kind.UPDATE, Kind.WRITE, Kind.COMMIT, cause="flush")
            if self._link is not None:
                for block in self.blocks:
                    self._link.order_before_compute(block.index)
        self._executor.raise_if_failed()

    @contextlib.contextmanager
    def lanes_idle(self) -> Iterator[None]:
        """Within it no lane touches state: the step that is read ahead is voided, and handed over anew at the end."""
        self.flush()
        current = self._current
        assert current is not None
        current.work.void = True
        self._executor.reach(current, Key(Kind.NORM), cause="flush")
        self._executor.pass_by(current, Key(Kind.BOUNDARY))
        self._executor.wait_all(current, Kind.READ, Kind.UPDATE, Kind.WRITE, Kind.COMMIT, cause="flush")
        try:
            yield
        finally:
            self._submit_next()

    @property
    def live_parameters(self) -> Iterable[LiveParameter]:
        return self._live.values()

    def live_of(self, parameter: torch.nn.Parameter) -> LiveParameter | None:
        return self._live.get(id(parameter))

    @property
    def waits_before_the_model(self) -> tuple[int, ...]:
        return () if self._hooks is None else self._hooks.early

    @property
    def stall_seconds(self) -> dict[str, float]:
        return dict(self._executor.stall_seconds)

    @property
    def failed(self) -> bool:
        return self._executor.cause is not None

    @property
    def in_child(self) -> bool:
        return os.getpid() != self._owner_pid

    def refuse_child(self) -> None:
        """Raises OverspillError OVS503 in a forked child."""
        if self.in_child:
            raise OverspillError("OVS503", "The session was used in a forked child.")

    def close(self) -> None:
        """Remove the hooks and join the lanes' threads, within their time limit."""
        if self._hooks is not None:
            self._hooks.close()
        self._executor.close()
        self._governor.close()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The bound method, without keeping its object alive; nothing happens once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return call
