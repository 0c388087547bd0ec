"""The session: what the user holds of a model whose training state lives where a plan puts it.

It answers for the user's calls; the stepper runs the steps, the committer makes them durable.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overspill.schedule import StepPlan
from overspill.train.adopt import adopt_edits
from overspill.train.commit import Committer, Restored
from overspill.train.counters import Counters, differences
from overspill.train.extend import extend
from overspill.train.live import LiveBlock, LiveParameter, StagingBuffer
from overspill.train.optimizer import TieredOptimizer
from overspill.train.parts import SessionParts
from overspill.train.snapshot import Tracked
from overspill.train.stepper import Stepper
from overspill.train.work import ChunkWorker

__all__ = ["Session"]


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
        self.kernel = parts.kernel
        self.store = parts.store
        self.restored: Restored | None = None
        self._frozen_parameters = parts.frozen_parameters
        self._link = parts.link
        self._closed = False
        self._committer = Committer(self, parts.store, parts.frozen)
        self.optimizer = TieredOptimizer(parts.groups, parts.defaults, parts.kind, self)
        self._stepper = Stepper(parts, self._committer, self.flush)
        self._facts_base = self._counters()
        atexit.register(_close_quietly, weakref.ref(self))

    # -- the step -----------------------------------------------------------------------------------------------

    def start(self, *, resume: bool) -> None:
        """Come back to the committed step if asked to, and hand the next step to the executor; attach() calls this."""
        if resume:
            self.restored = self._committer.restore()
        self._stepper.begin()

    def take_step(self) -> None:
        """The work behind optimizer.step(): what the user changed since the last one is taken over, then the step."""
        self._stepper.settle_previous()
        adopt_edits(self.live_parameters, self._committer.holds_weights)
        self._adopt_unfrozen()
        self._stepper.take(self.optimizer.param_groups)

    def _adopt_unfrozen(self) -> None:
        """Parameters of the groups that were frozen at attach, and have a gradient now."""
        late = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None and p.numel() > 0 and self.live_of(p) is None
        ]
        if late:
            extend(self, late)

    # -- what the user calls ------------------------------------------------------------------------------------

    def track(self, **objects: Tracked) -> None:
        """Give schedulers, loaders, scalers an owner: their state is part of every commit, and restored on resume."""
        self._committer.track(objects)

    def step_boundary(self, extra: dict[str, Any] | None = None) -> None:
        """After optimizer.step() and scheduler.step(): what belongs to this step is taken now."""
        work = self._stepper.last_work
        if work is None:
            return
        late = work.complete is False
        self._committer.take_boundary(work, extra or {})
        if late and self.committed_step == self.step:
            self.flush()
            self._committer.commit_now()
        else:
            self._stepper.pass_boundary()

    def flush(self) -> None:
        """Finish all pending updates and writes; on return every parameter and the store are of step ``step``."""
        self._stepper.flush()

    def checkpoint(self, name: str) -> Path:
        """Commit the current step, if it is not yet, and pin it under ``checkpoints/<name>``.

        The oldest pins beyond plan.keep_last are dropped. Raises OverspillError OVS504 without a store.
        """
        self.flush()
        adopt_edits(self.live_parameters, self._committer.holds_weights)
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
        now, stepper = self._counters(), self._stepper
        base, self._facts_base = self._facts_base, now
        held: dict[str, dict[str, int]] = {"host": self.pool.held_nbytes_by_class()}
        disk = self._committer.disk_nbytes_by_class()
        if disk:
            held["disk"] = disk
        return {
            "grad_norm": None if stepper.norm is None else stepper.norm.value,
            "clip_factor": stepper.clip_factor,
            "skipped": stepper.skipped,
            "stall_seconds": differences(now.stall_seconds, base.stall_seconds),
            "read_nbytes": differences(now.read_nbytes, base.read_nbytes),
            "written_nbytes": differences(now.written_nbytes, base.written_nbytes),
            "held_nbytes": held,
            "committed_step": self.committed_step,
        }

    def optimizer_state_dict(self) -> dict[str, Any]:
        self.flush()
        adopt_edits(self.live_parameters, self._committer.holds_weights)
        return self._committer.state_dict()

    def load_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.flush()
        # Weights loaded before their optimizer state are the ones that its master belongs to.
        adopt_edits(self.live_parameters, self._committer.holds_weights)
        self._committer.load_state_dict(state_dict)

    def adopt_group(self, group: dict[str, Any]) -> None:
        """A param group was added after attach."""
        extend(self, [p for p in group["params"] if p.requires_grad and self.live_of(p) is None])

    def close(self) -> None:
        """Finish what is pending, end the threads, release the store. The model keeps its weights.

        Where the plan asks for durability, the last steps are committed too; with ``every_steps = 0`` only a
        checkpoint keeps them.
        """
        if self._closed or self._stepper.in_child:
            return
        self._closed = True
        try:
            if not self._stepper.failed:
                self.flush()
                if self.plan.durability.every_steps:
                    adopt_edits(self.live_parameters, self._committer.holds_weights)
                    self._committer.commit_if_behind()
        finally:
            self._stepper.close()
            self._committer.close()

    def __del__(self) -> None:
        """Let go of without close(): when neither session nor model is held any more."""
        if hasattr(self, "_stepper"):
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
    def step(self) -> int:
        return self._stepper.step

    @step.setter
    def step(self, number: int) -> None:
        self._stepper.step = number

    @property
    def measure_norm(self) -> bool:
        """Whether each step takes the gradient's norm even where nothing else asks for it."""
        return self._stepper.measure_norm

    @measure_norm.setter
    def measure_norm(self, wanted: bool) -> None:
        self._stepper.measure_norm = wanted

    @property
    def waits_before_the_model(self) -> tuple[int, ...]:
        """Blocks whose update is waited for before the whole model, since a weight is used outside its own module."""
        return self._stepper.waits_before_the_model

    @property
    def blocks(self) -> list[LiveBlock]:
        return self._stepper.blocks

    @property
    def staging(self) -> list[StagingBuffer]:
        return self._stepper.staging

    @property
    def step_plan(self) -> StepPlan:
        return self._stepper.step_plan

    @property
    def worker(self) -> ChunkWorker:
        return self._stepper.worker

    @property
    def live_parameters(self) -> Iterable[LiveParameter]:
        return self._stepper.live_parameters

    def live_of(self, parameter: nn.Parameter) -> LiveParameter | None:
        return self._stepper.live_of(parameter)

    def install(self, blocks: list[LiveBlock], staging: list[StagingBuffer], step_plan: StepPlan) -> None:
        """Take these blocks and buffers into use; the lanes are idle."""
        self._stepper.install(blocks, staging, step_plan)

    def lanes_idle(self) -> AbstractContextManager[None]:
        """Within it no lane touches state: the step that is read ahead is voided, and handed over anew at the end."""
        return self._stepper.lanes_idle()

    def scratch(self, array: str, numel: int) -> torch.Tensor:
        """Part of a staging buffer, while the lanes are idle."""
        return self.staging[0].arrays[array][:numel]

    def follow_frozen(self, name: str, storage: torch.Tensor) -> None:
        """A parameter that was frozen lives in ``storage`` now; a name that was not is passed over."""
        self._committer.follow_frozen(name, storage)

    def frozen_version(self, name: str) -> int:
        """Changes when a frozen parameter is edited in place."""
        return self._frozen_parameters[name]._version

    def _counters(self) -> Counters:
        read, written = self._committer.moved_nbytes()
        tiers_read, tiers_written = {"disk": read}, {"disk": written}
        if self._link is not None:
            tiers_read["device"], tiers_written["device"] = self._link.down_nbytes, self._link.up_nbytes
        return Counters(self._stepper.stall_seconds, tiers_read, tiers_written)


def _close_quietly(reference: weakref.ref[Session]) -> None:
    """At exit: pending updates are finished, so that a script that ends without flush() loses nothing."""
    session = reference()
    if session is not None:
        session.close()
