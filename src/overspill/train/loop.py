"""The training loop of `overspill train`: micro-batches, accumulation, the schedule, evaluation, checkpoints.

It is a plain PyTorch loop over a session and could stand in a user's script; it knows no terminal, no job file
and no Hugging Face class. Progress leaves through ``on_step``. What happens to the state when ``optimizer.step()``
is called is the session's affair.

[Note: Loss of a step] The loss is the mean over all target tokens of the optimizer step: each micro-batch's summed
loss is divided by the step's count of targets before backward. So G micro-batches of b sequences equal one of G·b
however the targets are spread, as in transformers.Trainer since 4.46 (``num_items_in_batch``).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from overspill.report import StepReport
from overspill.train.data.dataset import IGNORED

if TYPE_CHECKING:
    from overspill.train.session import Session

__all__ = ["Batch", "LoopResult", "LoopSettings", "StopFlag", "TrainingLoop", "checkpoint_name", "seed_all"]

Batch = Mapping[str, torch.Tensor]


def seed_all(seed: int) -> None:
    """Seed torch, Python and numpy: everything that a model, a loader or a dropout draws from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


class StopFlag:
    """Set from a signal handler; the loop looks at it between steps, where the state is whole."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        self.requested = True


@dataclass(frozen=True)
class LoopSettings:
    """What the loop needs of a job. 0 in ``eval_every`` and ``save_every`` means: only at the end."""

    total_steps: int
    accumulation: int = 1
    eval_every: int = 0
    save_every: int = 0

    def __post_init__(self) -> None:
        assert self.total_steps >= 1 and self.accumulation >= 1 and self.eval_every >= 0 and self.save_every >= 0


@dataclass(frozen=True)
class LoopResult:
    """How the loop ended. ``checkpoint`` is the name of the pin that holds the last step; ``eval_loss_before`` the
    held-out loss before the first step, where this loop began there.
    """

    step: int
    finished: bool
    loss: float | None
    eval_loss: float | None
    tokens: int
    seconds: float
    checkpoint: str | None
    eval_loss_before: float | None = None


def model_loss(model: torch.nn.Module, batch: Batch, targets: int) -> torch.Tensor:
    """The model's own loss summed over the batch and divided by ``targets`` (transformers' convention)."""
    loss = model(**batch, num_items_in_batch=targets).loss
    assert isinstance(loss, torch.Tensor)
    return loss


def count_targets(batch: Batch) -> int:
    """Labels that count: a causal model predicts positions 1… from 0…, so the first one has no prediction."""
    return int((batch["labels"][..., 1:] != IGNORED).sum())


def count_tokens(batch: Batch) -> int:
    """Tokens that pass through the model, padding left out."""
    mask = batch.get("attention_mask")
    return int((mask != 0).sum()) if mask is not None and mask.dim() == 2 else batch["input_ids"].numel()


class TrainingLoop:
    """Runs optimizer steps from ``session.step`` to ``settings.total_steps``, or until ``stop`` is requested.

    Args:
        batches: micro-batches without end (the loader goes from epoch to epoch); mappings of tensors with
            ``input_ids`` and ``labels``, handed to the model as keywords.
        eval_batches: called for each evaluation; gives the held-out micro-batches, the same each time.
        compute_loss: (model, batch, targets of the whole step) → scalar; see [Note: Loss of a step].
        on_step: gets each step's report before the step is committed, so that no committed step lacks its row.
        on_first_eval: gets the held-out loss before the first step, which later ones are measured against.
        before_commit: called before a commit of the newest step can become durable: the place to make durable what
            on_step has written.
        extra: more that belongs into each commit, asked anew each step.
    """

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        batches: Iterable[Batch],
        *,
        settings: LoopSettings,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        eval_batches: Callable[[], Iterable[Batch]] | None = None,
        compute_loss: Callable[[torch.nn.Module, Batch, int], torch.Tensor] = model_loss,
        on_step: Callable[[StepReport], None] = lambda report: None,
        on_first_eval: Callable[[float], None] = lambda loss: None,
        before_commit: Callable[[], None] = lambda: None,
        extra: Callable[[], dict[str, Any]] = dict,
        stop: StopFlag | None = None,
    ) -> None:
        self._session = session
        self._model = model
        self._batches = batches
        self._settings = settings
        self._scheduler = scheduler
        self._eval_batches = eval_batches
        self._compute_loss = compute_loss
        self._on_step = on_step
        self._on_first_eval = on_first_eval
        self._before_commit = before_commit
        self._extra = extra
        self._stop = stop or StopFlag()

    def run(self) -> LoopResult:
        session, settings = self._session, self._settings
        loss_before = None
        if self._eval_batches is not None and session.step == 0:
            loss_before = self.evaluate()
            if loss_before is not None:
                self._on_first_eval(loss_before)
        first = begun = time.perf_counter()
        tokens = 0
        report: StepReport | None = None
        saved: str | None = None
        eval_loss: float | None = None
        batches = iter(self._batches)
        self._model.train()
        if session.restored is not None and self._is_checkpoint_due():
            saved = self._checkpoint()  # a crash may have come between this step's commit and its checkpoint
        while session.step < settings.total_steps and not self._stop.requested:
            report, begun = self._one_step(batches, begun)
            tokens += report.tokens
            eval_loss = report.eval_loss if report.eval_loss is not None else eval_loss
            self._on_step(report)
            if self._is_commit_due():
                self._before_commit()
            session.step_boundary(extra=self._extra())
            if self._is_checkpoint_due() or self._stop.requested:
                saved = self._checkpoint()
        return LoopResult(
            step=session.step,
            finished=session.step >= settings.total_steps,
            loss=report.loss if report else None,
            eval_loss=eval_loss,
            eval_loss_before=loss_before,
            tokens=tokens,
            seconds=time.perf_counter() - first,
            checkpoint=saved,
        )

    def _is_checkpoint_due(self) -> bool:
        step, settings = self._session.step, self._settings
        return step >= settings.total_steps or (bool(settings.save_every) and step % settings.save_every == 0)

    def _is_commit_due(self) -> bool:
        """The session commits this step by itself, behind what comes next; it waits for step_boundary() only."""
        every = self._session.plan.durability.every_steps
        return self._is_checkpoint_due() or (bool(every) and self._session.step % every == 0)

    def _checkpoint(self) -> str:
        self._before_commit()  # a stop asks for a checkpoint at a step of its own, after its boundary
        name = checkpoint_name(self._session.step)
        self._session.checkpoint(name)
        return name

    def _one_step(self, batches: Iterator[Batch], begun: float) -> tuple[StepReport, float]:
        """One optimizer step. ``begun`` is when the step before it was reported, so that seconds add up to the run."""
        session, settings = self._session, self._settings
        optimizer = session.optimizer
        micro_batches = [next(batches) for _ in range(settings.accumulation)]
        targets = sum(count_targets(batch) for batch in micro_batches)
        optimizer.zero_grad()
        total: torch.Tensor | None = None
        for batch in micro_batches:
            # max(…, 1): a step whose labels are all masked has loss 0 and gradient 0, not 0/0.
            loss = self._compute_loss(self._model, batch, max(targets, 1))
            loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        lr = float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        at_end = session.step >= settings.total_steps
        due = settings.eval_every > 0 and session.step % settings.eval_every == 0
        # Before step_boundary, so that what evaluation draws from the RNG belongs to this step on a resume too.
        eval_loss = self.evaluate() if self._eval_batches is not None and (due or at_end) else None
        facts = session.step_facts()
        now = time.perf_counter()
        report = StepReport(
            step=session.step,
            loss=total.item() if targets else None,
            lr=lr,
            tokens=sum(count_tokens(batch) for batch in micro_batches),
            seconds=now - begun,
            committed_step=session.committed_step,
            eval_loss=eval_loss,
            **{name: facts[name] for name in _FACTS if name in facts},
        )
        return report, now

    def evaluate(self) -> float | None:
        """Mean loss per target token over the held-out batches; None when they hold no target."""
        assert self._eval_batches is not None
        self._model.eval()
        total, targets = 0.0, 0
        with torch.no_grad():
            for batch in self._eval_batches():
                count = count_targets(batch)
                if count:
                    total += self._compute_loss(self._model, batch, count).item() * count
                    targets += count
        self._model.train()
        return total / targets if targets else None


_FACTS = (
    "grad_norm",
    "clip_factor",
    "skipped",
    "stall_seconds",
    "read_nbytes",
    "written_nbytes",
    "held_nbytes",
)
