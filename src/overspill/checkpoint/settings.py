"""Which settings a run was made with, and what a changed one means for a resume.

Each commit holds the job's settings that change numbers. On a resume they are compared with the job file: those that
the commit itself carries (model, data order, the optimizer's groups) cannot change within a run, so an edit is
refused instead of being ignored; the others take effect from the next step on, and each is said. Settings of the
machine's side (memory, placement, overlap, durability, what is saved and when) change no number and are free.
"""

from __future__ import annotations

from typing import Any

from overspill.errors import OverspillError
from overspill.job import Job, unread_options

__all__ = ["applied_settings", "number_settings", "refuse_fixed_settings"]

FIXED = (
    "model.dtype",
    "model.freeze",
    "data.format",
    "data.seq_len",
    "data.packing",
    "data.train_on_prompt",
    "data.eval_fraction",
    "data.shuffle",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.momentum",
    "optimizer.dampening",
    "optimizer.nesterov",
    "optimizer.no_decay",
    "train.micro_batch",
    "train.seed",
    "plan.master",
    "plan.moments",
)
"""What the commit carries: another value in the job file would do nothing, or mean another run."""

APPLIED = (
    "model.gradient_checkpointing",
    "optimizer.max_grad_norm",
    "schedule.kind",
    "schedule.warmup_steps",
    "schedule.min_lr_ratio",
    "train.steps",
    "train.epochs",
    "train.accumulation",
    "plan.nonfinite",
    "plan.grad_dtype",
)
"""What may change within a run; train.threads is said with the build, where it is compared in effect."""


def number_settings(job: Job) -> dict[str, Any]:
    """The settings that change numbers, by dotted key, as plain JSON."""
    data = job.model_dump(mode="json")
    return {key: data[key.split(".")[0]][key.split(".")[1]] for key in (*FIXED, *APPLIED)}


def refuse_fixed_settings(then: dict[str, Any], now: dict[str, Any], *, job_file: str) -> None:
    """Raises OverspillError OVS602 that names the first key that cannot change within a run, with both values."""
    # What the optimizer never read may be taken out of the job file.
    unread = {f"optimizer.{option}" for option in unread_options(now["optimizer.name"])}
    changed = [key for key in FIXED if key in then and then[key] != now[key] and key not in unread]
    if changed:
        key = changed[0]
        others = f" So have {', '.join(changed[1:])}." if changed[1:] else ""
        raise OverspillError(
            "OVS602",
            f"The setting has changed since the run began, and a run keeps it to its end.{others}",
            field=key,
            value=now[key],
            limit=f"{then[key]} in the run",
            next_step=f"Put the old value back in {job_file}, or start a new run from an export of this one.",
        )


def applied_settings(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What has changed and takes effect from the next step on, in words."""
    changed = [key for key in APPLIED if key in then and then[key] != now[key]]
    return [f"{key} {_word(then[key])} until now, {_word(now[key])} from here on" for key in changed]


def _word(value: Any) -> str:
    return "not set" if value is None else str(value)
