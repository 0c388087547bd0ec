"""What a framework's function fills in while a job is resolved, and the optimizer's part of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from overspill.forecast.device.optimizers import optimizer_facts
from overspill.forecast.device.settings import Assumed
from overspill.forecast.device.versions import Versions
from overspill.job import Job
from overspill.model.facts import ModelFacts

__all__ = ["ITEMSIZE", "Draft", "set_optimizer"]

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


@dataclass
class Draft:
    """What a framework's function fills in; names as in `Resolved`."""

    job: Job
    facts: ModelFacts
    versions: Versions
    values: dict[str, Any] = field(default_factory=dict)
    assumed: list[Assumed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def assume(self, name: str, value: object, why: str) -> None:
        self.assumed.append(Assumed(name, str(value), why))


def set_optimizer(draft: Draft, *, state_itemsize: int, fused: bool = False, master: int = 0) -> None:
    draft.values["optimizer"] = optimizer_facts(
        draft.job.optimizer, draft.job.offload, state_itemsize=state_itemsize,
        parameter_itemsize=draft.values["trained_itemsize"], fused=fused, master=master,
    )  # fmt: skip
