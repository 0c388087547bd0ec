"""The session: executes a plan on a real model, step by step.

One step, seen from the user's thread (the lanes of the executor do the rest):

    forward      before a module that owns a parameter of block k: its pending update is finished
    backward     each fresh gradient moves into the pool; optimizer state is read ahead meanwhile
    step()       norm, clip factor and learning rates are fixed, updates are released; with ``overlap = step`` they
                 are waited for, with ``forward`` they run on behind the next forward
    boundary     RNG, schedule and data position of this step are taken; a commit of the step may go on

[Note: One step ahead] Step t+1 is handed to the executor when step t is taken, so that its reads begin as soon as
buffers are free; its updates wait until step() is called again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overspill import _native
from overspill.errors import OverspillError
from overspill.optim.kernels import OptimizerKernel
from overspill.plan import Overlap, Plan
from overspill.schedule import Key, Kind, Lane, Op, StepPlan, StepSchedule, build_step
from overspill.tiers.disk import DiskStore
from overspill.tiers.host import HostPool
from overspill.train.adopt import adopt_edits
from overspill.train.commit import Committer, Restored
from overspill.train.counters import Counters, differences
from overspill.train.executor import Executor, SubmittedStep
from overspill.train.extend import extend
from overspill.train.governor import MemoryGovernor
from overspill.train.gradients import GradientNorm, collect, install_hook, measure_norm
from overspill.train.hooks import HookSet
from overspill.train.live import LiveBlock, LiveParameter, StagingBuffer
from overspill.train.optimizer import Groups, TieredOptimizer
from overspill.train.snapshot import Tracked
from overspill.train.transfer import DeviceLink
from overspill.train.work import ChunkWorker, StepWork
from overspill.units import MiB

__all__ = ["Session", "SessionParts"]


@dataclass(frozen=True, eq=False)
class SessionParts:
    """What attach() has built: memory, blocks and store, checked and within the budget."""

    model: nn.Module
    plan: Plan
    pool: HostPool
    kernel: OptimizerKernel
    kind: str
    groups: Groups
    defaults: dict[str, Any]
    blocks: list[LiveBlock]
    staging: list[StagingBuffer]
    step_plan: StepPlan
    store: DiskStore | None
    frozen: dict[str, torch.Tensor]
    frozen_parameters: dict[str, nn.Parameter]
    link: DeviceLink | None
    base_nbytes: int
    notes: list[str]


class Session:
    """A model whose training state lives where the plan puts it. Made by attach().

    Attributes:
        optimizer: a true torch.optim.Optimizer over the model's parameters.
        pool: the host memory that the session owns, against its budget.
        step: optimizer steps done.
        notes: fallbacks that were taken, one sentence each; they stand in the run's report.
    """

    def __init__(self, parts: SessionParts) -> None:
        self.plan = parts.plan
        self.pool = parts.pool
        self.notes = parts.notes
        self.model = parts.model
        self._frozen_parameters = parts.frozen_parameters
        self.measure_norm = False
        self._kernel = parts.kernel
        self._store = parts.store
        self._link = parts.link
        margin = max(64 * MiB, parts.plan.memory_nbytes // 10)
        self._governor = MemoryGovernor(parts.base_nbytes + parts.plan.memory_nbytes, margin)
        self._threads = _native.ThreadPool(parts.plan.kernel_threads)
        self._hooks: HookSet | None = None
        self._committer = Committer(self, parts.store, parts.frozen)
        self.step = 0
        self.restored: Restored | None = None
        self._norm: GradientNorm | None = None
        self._clip_factor: float | None = None
        self._skipped = False
        self._owner_pid = os.getpid()
        self._closed = False
        self._entered = -1
        self._previous: SubmittedStep[StepWork] | None = None
        self.optimizer = TieredOptimizer(parts.groups, parts.defaults, parts.kind, self)
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
        self._facts_base = self._counters()
        self._current: SubmittedStep[StepWork] | None = None
        atexit.register(_close_quietly, weakref.ref(self))

    def install(self, blocks: list[LiveBlock], staging: list[StagingBuffer], step_plan: StepPlan) -> None:
        """Take these blocks and buffers into use; the lanes are idle."""
        self._blocks, self._staging, self.step_plan = blocks, staging, step_plan
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
        self._hooks = HookSet(self.model, blocks_by_id, wait=self._settle, flush=self.flush, before=old)
        before_gradient = _weakly(self._before_gradient)
        self._hooks.handles += [
            install_hook(live, before_gradient)
            for live in self._live.values()
            # One that is frozen at the time takes no hook; its gradient, if one comes, is collected by step().
            if not live.on_device and live.parameter.requires_grad
        ]

    # -- the step -----------------------------------------------------------------------------------------------

    def start(self, *, resume: bool) -> None:
        """Come back to the committed step if asked to, and hand the next step to the executor; attach() calls this."""
        if resume:
            self.restored = self._committer.restore()
        for live in self._live.values():
            live.version = live.parameter._version
        self._submit_next()

    def take_step(self) -> None:
        """The work behind optimizer.step(); see the head of this file."""
        self._refuse_child()
        self._executor.raise_if_failed()
        self._committer.note_unclaimed()
        previous = self._previous
        if previous is not None:
            self._close_boundary(previous)
            self._executor.wait_all(previous, Kind.UPDATE, cause="update")
            self._executor.wait_all(previous, Kind.COMMIT, cause="commit")
        adopt_edits(self._live.values(), self._committer.holds_weights)
        self._adopt_unfrozen()
        present = self._collect()
        assert self._hooks is not None
        self._hooks.settle(live.parameter for live in present)
        current = self._current
        assert current is not None
        work = current.work
        scale = self._decide_scale()
        if self._skipped:
            present = []
        work.fill(self._blocks, present, self.optimizer.param_groups, self._kernel, scale)
        self.step = current.number
        for block in self._blocks:
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
        if self.plan.overlap is Overlap.STEP:
            self._executor.wait_all(current, Kind.UPDATE, cause="update")
            if current.work.commits:
                # step() has returned, so weights may be edited: what a commit writes of them has to be written.
                self._executor.wait_all(current, Kind.WRITE, cause="disk_write")
            if self._link is not None:
                for block in self._blocks:
                    self._link.order_before_compute(block.index)
        for live in present:
            # A graph that saved this weight before the step must raise in backward, as after torch's own step.
            torch.autograd.graph.increment_version(live.parameter)
            live.version = live.parameter._version
            if self.plan.overlap is Overlap.FORWARD:
                live.parameter.grad = None

    def _collect(self) -> list[LiveParameter]:
        grouped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for block in self._blocks:
            block.touched = False
        if self._link is not None:
            self._link.begin()
        collect(self._live.values(), self._link)
        return [
            live for live in self._live.values() if live.parameter.grad is not None and id(live.parameter) in grouped
        ]

    def _decide_scale(self) -> float:
        """The norm, where somebody asks for it; the factor that gradients are scaled by; whether to skip."""
        self._norm, self._clip_factor, self._skipped = None, None, False
        limit = self.plan.max_grad_norm
        if limit is None and self.plan.nonfinite == "allow" and not self.measure_norm:
            return 1.0
        if self._link is not None:
            self._link.wait_all_fetched()
        self._norm = measure_norm(self._blocks, self._threads)
        if not self._norm.finite and self.plan.nonfinite == "skip":
            self._skipped = True
            return 1.0
        if not self._norm.finite and self.plan.nonfinite == "raise":
            raise OverspillError(
                "OVS502",
                f"The gradient of step {self.step + 1} has {self._norm.nonfinite} elements that are NaN or infinite.",
                field="plan.nonfinite",
                value=f"norm {self._norm.value}",
            )
        if limit is None:
            return 1.0
        # torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
        self._clip_factor = min(1.0, limit / (self._norm.value + 1e-6))
        return self._clip_factor

    def _adopt_unfrozen(self) -> None:
        """Parameters of the groups that were frozen at attach, and have a gradient now."""
        late = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and p.numel() > 0 and id(p) not in self._live
        ]
        if late:
            extend(self, late)

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
        chunks = self._blocks[block].chunks
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

    # -- what the user calls ------------------------------------------------------------------------------------

    def track(self, **objects: Tracked) -> None:
        """Give schedulers, loaders, scalers an owner: their state is part of every commit, and restored on resume."""
        self._committer.track(objects)

    def step_boundary(self, extra: dict[str, Any] | None = None) -> None:
        """After optimizer.step() and scheduler.step(): what belongs to this step is taken now."""
        previous = self._previous
        if previous is None:
            return
        late = previous.work.complete is False
        self._committer.take_boundary(previous.work, extra or {})
        if late and self.committed_step == self.step:
            self.flush()
            self._committer.commit_now()
        else:
            self._executor.pass_by(previous, Key(Kind.BOUNDARY))

    def flush(self) -> None:
        """Finish all pending updates and writes; on return every parameter and the store are of step ``step``."""
        self._refuse_child()
        if self._previous is not None:
            self._close_boundary(self._previous)
            self._executor.wait_all(self._previous, Kind.UPDATE, Kind.WRITE, Kind.COMMIT, cause="flush")
            if self._link is not None:
                for block in self._blocks:
                    self._link.order_before_compute(block.index)
        self._executor.raise_if_failed()

    def checkpoint(self, name: str) -> Path:
        """Commit the current step, if it is not yet, and pin it under ``checkpoints/<name>``.

        The oldest pins beyond plan.keep_last are dropped. Raises OverspillError OVS504 without a store.
        """
        self.flush()
        adopt_edits(self._live.values(), self._committer.holds_weights)
        return self._committer.checkpoint(name)

    def expect_checkpoint(self, every_steps: int = 0, *, at: Iterable[int] = ()) -> None:
        """Say after which steps checkpoint() will be called: every so many, or these. They are then written, hashed
        and committed while training goes on; a checkpoint that comes unannounced is written when it is asked for.
        """
        self._committer.expect(every_steps, frozenset(at))

    def restore_rng(self) -> None:
        """Put the random generators back to the restored step, after what drew from them since attach()."""
        self._committer.restore_rng()

    @property
    def committed_step(self) -> int | None:
        """Newest step that a crash cannot lose; None before the first commit."""
        return self._committer.committed_step

    def step_facts(self) -> dict[str, Any]:
        """What the last step did since the last call: norm, stalls by cause, bytes by tier, bytes held."""
        now = self._counters()
        base, self._facts_base = self._facts_base, now
        held: dict[str, dict[str, int]] = {"host": self.pool.held_nbytes_by_class()}
        disk = self._committer.disk_nbytes_by_class()
        if disk:
            held["disk"] = disk
        return {
            "grad_norm": None if self._norm is None else self._norm.value,
            "clip_factor": self._clip_factor,
            "skipped": self._skipped,
            "stall_seconds": differences(now.stall_seconds, base.stall_seconds),
            "read_nbytes": differences(now.read_nbytes, base.read_nbytes),
            "written_nbytes": differences(now.written_nbytes, base.written_nbytes),
            "held_nbytes": held,
            "committed_step": self.committed_step,
        }

    def optimizer_state_dict(self) -> dict[str, Any]:
        self.flush()
        adopt_edits(self._live.values(), self._committer.holds_weights)
        return self._committer.state_dict()

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.flush()
        # Weights loaded before their optimizer state are the ones that its master belongs to.
        adopt_edits(self._live.values(), self._committer.holds_weights)
        self._committer.load_state_dict(state_dict)

    def adopt_group(self, group: dict[str, Any]) -> None:
        """A param group was added after attach."""
        extend(self, [p for p in group["params"] if p.requires_grad and id(p) not in self._live])

    def close(self) -> None:
        """Finish what is pending, end the threads, release the store. The model keeps its weights.

        Where the plan asks for durability, the last steps are committed too; with ``every_steps = 0`` only a
        checkpoint keeps them.
        """
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        try:
            if self._executor.cause is None:
                self.flush()
                if self.plan.durability.every_steps:
                    adopt_edits(self._live.values(), self._committer.holds_weights)
                    self._committer.commit_if_behind()
        finally:
            if self._hooks is not None:
                self._hooks.close()
            self._executor.close()
            self._committer.close()
            self._governor.close()

    def __del__(self) -> None:
        """Let go of without close(): when neither session nor model is held any more."""
        if hasattr(self, "_executor"):
            with contextlib.suppress(Exception):  # there is nobody to tell; the last commit is valid
                self.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- for the session's own parts ----------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waits_before_the_model(self) -> tuple[int, ...]:
        """Blocks whose update is waited for before the whole model, since a weight is used outside its own module."""
        return () if self._hooks is None else self._hooks.early

    @property
    def blocks(self) -> list[LiveBlock]:
        return self._blocks

    @property
    def kernel(self) -> OptimizerKernel:
        return self._kernel

    @property
    def store(self) -> DiskStore | None:
        return self._store

    @property
    def staging(self) -> list[StagingBuffer]:
        return self._staging

    @property
    def live_parameters(self) -> Iterable[LiveParameter]:
        return self._live.values()

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

    def scratch(self, array: str, numel: int) -> torch.Tensor:
        """Part of a staging buffer, while the lanes are idle."""
        return self._staging[0].arrays[array][:numel]

    def follow_frozen(self, name: str, storage: torch.Tensor) -> None:
        """A parameter that was frozen lives in ``storage`` now; a name that was not is passed over."""
        self._committer.follow_frozen(name, storage)

    def frozen_version(self, name: str) -> int:
        """Changes when a frozen parameter is edited in place."""
        return self._frozen_parameters[name]._version

    def live_of(self, parameter: nn.Parameter) -> LiveParameter | None:
        return self._live.get(id(parameter))

    def _counters(self) -> Counters:
        read, written = self._committer.moved_nbytes()
        tiers_read, tiers_written = {"disk": read}, {"disk": written}
        if self._link is not None:
            tiers_read["device"], tiers_written["device"] = self._link.down_nbytes, self._link.up_nbytes
        return Counters(dict(self._executor.stall_seconds), tiers_read, tiers_written)

    def _refuse_child(self) -> None:
        if os.getpid() != self._owner_pid:
            raise OverspillError("OVS503", "The session was used in a forked child.")


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The bound method, without keeping its object alive; nothing happens once that is gone."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return call


def _close_quietly(reference: weakref.ref[Session]) -> None:
    """At exit: pending updates are finished, so that a script that ends without flush() loses nothing."""
    session = reference()
    if session is not None:
        session.close()
