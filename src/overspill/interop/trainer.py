"""TieredCallback: tells a session what only the Trainer knows. An unmodified Trainer trains without it.

With it each step's commit holds the random generators and the schedule too, each save of the Trainer is also a pin of
the store that copies no state, and a Trainer that goes on from another step than its session is refused.

[Note: Generators] The Trainer restores generators at two places: in the middle of an epoch after it has skipped the
batches seen, and at an epoch's start before the sampler draws its seed. A restored session follows it in both. A step
ends for the snapshot when its evaluation has run, since that draws from the generators as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from overspill.errors import OverspillError

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from overspill.train import Session

__all__ = ["TieredCallback"]

_KEY = "trainer_step"


class TieredCallback(TrainerCallback):  # type: ignore[misc]
    """Give this to ``Trainer(callbacks=[TieredCallback(session)], optimizers=(session.optimizer, None))``.

    With ``save_only_model=True`` the Trainer writes no copy of the optimizer's state. To go on:
    ``attach(…, resume="checkpoint-20")`` and ``trainer.train(resume_from_checkpoint=".../checkpoint-20")``.

    Args:
        session: from attach(), over the Trainer's model.
        pin: make a checkpoint of the session, of the same name, at each save of the Trainer. Default: whether the
            session has a store.
    """

    def __init__(self, session: Session, *, pin: bool | None = None) -> None:
        self._session = session
        self._pin = session.store is not None if pin is None else pin
        self._open_step: int | None = None
        self._restore_generators = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The first moment at which the schedule and the Trainer's step are known."""
        session = self._session
        if session.plan.max_grad_norm is not None and args.max_grad_norm:
            raise OverspillError(
                "OVS504",
                "Both the Trainer and the plan would clip the gradient.",
                field="max_grad_norm",
                value=f"{args.max_grad_norm} in the Trainer, {session.plan.max_grad_norm} in the plan",
                next_step="Leave plan.max_grad_norm out; the Trainer clips and logs grad_norm as always.",
            )
        self._check_step(state)
        session.track(scheduler=kwargs["lr_scheduler"])
        self._restore_generators = session.restored is not None and state.global_step > 0
        offset = session.step - state.global_step
        if self._pin and args.save_strategy == IntervalStrategy.STEPS and offset % state.save_steps == 0:
            session.expect_checkpoint(state.save_steps)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._end_step()
        if self._restore_generators and _at_epoch_end(state):
            self._restore_generators = False
            self._session.restore_rng()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._end_step()
        if self._restore_generators:
            self._restore_generators = False
            self._session.restore_rng()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._open_step = state.global_step
        evaluates = args.eval_strategy == IntervalStrategy.EPOCH and _at_epoch_end(state)
        if not (evaluates or control.should_evaluate):
            self._end_step()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._end_step()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._end_step()
        if self._pin:
            self._session.checkpoint(f"checkpoint-{state.global_step}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._end_step()
        self._session.flush()

    def _end_step(self) -> None:
        if self._open_step is not None:
            self._session.step_boundary({_KEY: self._open_step})
            self._open_step = None

    def _check_step(self, state: TrainerState) -> None:
        session = self._session
        if session.restored is not None:
            theirs = session.restored.extra.get(_KEY, session.restored.step)
            if session.step == session.restored.step and theirs != state.global_step:
                raise OverspillError(
                    "OVS602",
                    "The session and the Trainer go on from different steps.",
                    field="resume_from_checkpoint",
                    value=f"step {state.global_step}",
                    limit=f"step {theirs}",
                    next_step=f'Attach with resume="checkpoint-{state.global_step}", or start the Trainer there.',
                )
        elif state.global_step and not any(live.steps for live in session.live_parameters):
            raise OverspillError(
                "OVS602",
                "The Trainer goes on from a checkpoint without optimizer state, and the session has none either.",
                field="resume_from_checkpoint",
                value=f"step {state.global_step}",
                next_step=f'Attach with resume="checkpoint-{state.global_step}".',
            )


def _at_epoch_end(state: TrainerState) -> bool:
    return state.epoch is not None and float(state.epoch).is_integer()
