"""What attach() hands to a session: memory, blocks and store, built, checked and within the budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from overspill.optim.kernels import OptimizerKernel
from overspill.plan import Plan
from overspill.schedule import StepPlan
from overspill.tiers.disk import DiskStore
from overspill.tiers.host import HostPool
from overspill.train.live import LiveBlock, StagingBuffer
from overspill.train.optimizer import Groups
from overspill.train.transfer import DeviceLink

__all__ = ["SessionParts"]


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
