"""What a job needs before it starts: memory by phase and tier, disk space, bytes moved, time of a step.

The closed form: named formulas over the model's shape, written up in docs/theory/memory.md. Pure Python, no torch.

[Note: A package that can be called] ``overspill.forecast`` is this subpackage and also the public function. Python
sets the attribute ``forecast`` of ``overspill`` to the subpackage whenever it is imported, whatever the order, so the
module itself is made callable: ``overspill.forecast(job, machine)`` calls entry.forecast_job.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from overspill.forecast.activations import Batch, Phase, activation_phases
from overspill.forecast.core import BASE_NBYTES, Forecast, PhasePeak, forecast
from overspill.forecast.entry import forecast_job

__all__ = ["BASE_NBYTES", "Batch", "Forecast", "Phase", "PhasePeak", "activation_phases", "forecast", "forecast_job"]


class _CallablePackage(ModuleType):
    """See [Note: A package that can be called]."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return forecast_job(*arguments, **keywords)


sys.modules[__name__].__class__ = _CallablePackage
