"""Overspill: training state that does not fit in memory, forecast first and then run.

The public surface is the names in ``__all__``. Attributes load on first use (PEP 562): importing the
package needs no torch, no pydantic and no numpy, so ``overspill --help`` stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME_BY_NAME = {
    "OverspillError": "overspill.errors",
    "Job": "overspill.job",
    "Machine": "overspill.machine",
    "Plan": "overspill.plan",
    "DeviceForecast": "overspill.forecast.device.result",
    "Forecast": "overspill.forecast",
    "StepReport": "overspill.report",
    "forecast": "overspill.forecast",
    "attach": "overspill.train",
    "Session": "overspill.train",
    "TieredOptimizer": "overspill.train",
}

__all__ = ["__version__", *sorted(_HOME_BY_NAME)]

if TYPE_CHECKING:
    from overspill.errors import OverspillError as OverspillError
    from overspill.forecast import Forecast as Forecast
    from overspill.forecast.device.result import DeviceForecast as DeviceForecast
    from overspill.forecast.entry import forecast as forecast
    from overspill.job import Job as Job
    from overspill.machine import Machine as Machine
    from overspill.plan import Plan as Plan
    from overspill.report import StepReport as StepReport
    from overspill.train import Session as Session
    from overspill.train import TieredOptimizer as TieredOptimizer
    from overspill.train import attach as attach


def __getattr__(name: str) -> Any:
    home = _HOME_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module 'overspill' has no attribute {name!r}")
    module = importlib.import_module(home)
    # overspill.forecast is a package that can be called: see the note in it.
    value = module if name == "forecast" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
