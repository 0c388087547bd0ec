"""The learning rate over the steps: linear warm-up, then cosine, linear or no decay.

A plain function of the step, so that a plot or a forecast can call it without torch; `lr_scheduler` hands it
to torch's LambdaLR, which multiplies each parameter group's own lr. The cosine is that of Loshchilov and
Hutter (SGDR, 2017) without restarts, down to ``min_lr_ratio`` instead of zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from overspill.job import ScheduleConfig

if TYPE_CHECKING:
    import torch

__all__ = ["lr_factor", "lr_scheduler"]


def lr_factor(schedule: ScheduleConfig, *, step: int, total_steps: int) -> float:
    """The share of the base lr that optimizer step ``step`` (0 is the first) runs with.

    Warm-up rises from 1/n to 1 over the first n steps: the first step already learns. The last step
    (``total_steps - 1``) of a decay runs at ``min_lr_ratio``; steps after it stay there.
    """
    warmup = min(schedule.warmup_steps, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    length = max(1, total_steps - 1 - warmup)
    done = min(1.0, (step - warmup) / length)
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule.kind == "cosine" else 1.0 - done
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * left


def lr_scheduler(
    optimizer: torch.optim.Optimizer, schedule: ScheduleConfig, *, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """``lr_factor`` as a torch scheduler: call its ``step()`` after each optimizer step."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda step: lr_factor(schedule, step=step, total_steps=total_steps))
