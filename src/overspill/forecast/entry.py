"""The public ``overspill.forecast(job, machine)``: for a card where there is one, else for this machine's own tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overspill.job import Job
from overspill.machine import Machine
from overspill.model import ModelShape

if TYPE_CHECKING:
    from overspill.forecast.core import Forecast
    from overspill.forecast.device.result import DeviceForecast

__all__ = ["forecast_job"]


def forecast_job(
    job: Job, machine: Machine | None = None, shape: ModelShape | None = None, **keywords: Any
) -> Forecast | DeviceForecast:
    """What a job needs, before it starts.

    For a job that names a card (``job.device.gpu``), or a machine that has one, or no machine at all: a
    `DeviceForecast` of the rank that needs most. Else a `Forecast` of the run on this machine, its memory and its disk;
    ``keywords`` are those of forecast.core.forecast.

    Raises OverspillError: OVS201 for a model that cannot be found, OVS110 for a card, OVS101 for a layout.
    """
    cards = machine.accelerators if machine is not None else ()
    if job.device.gpu is None and not cards and machine is not None:
        from overspill.forecast.core import forecast as forecast_run

        return forecast_run(job, machine, shape, **keywords)
    from overspill.catalog.user import find_accelerator, read_user_catalogue
    from overspill.forecast.device.result import forecast_device
    from overspill.model import read_model

    card = None
    if job.device.gpu is not None:
        card = find_accelerator(job.device.gpu, read_user_catalogue())
    elif cards:
        card = find_accelerator(cards[0].name, read_user_catalogue(), memory_nbytes=cards[0].memory_nbytes or None)
    name = job.model.path
    if shape is None:
        found = read_model(job.model.path)
        shape, name = found.shape, found.name
    return forecast_device(job, shape, card, name=name)


#: The public name, for type checkers: see the note in the package.
forecast = forecast_job
