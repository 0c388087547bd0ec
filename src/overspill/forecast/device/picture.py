"""The same picture as plot.py's with matplotlib, for a .png."""

from __future__ import annotations

from pathlib import Path

from overspill.forecast.device.plot import COLOURS
from overspill.forecast.device.result import DeviceForecast
from overspill.units import GiB

__all__ = ["save_picture"]


def save_picture(forecast: DeviceForecast, file: Path) -> None:
    """Writes it in the format that the file's name asks for. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [phase.phase for phase in forecast.phases]
    base = [0.0] * len(names)
    for category, colour in COLOURS.items():
        heights = [phase.by_category.get(category, 0) / GiB for phase in forecast.phases]
        axes.bar(names, heights, bottom=base, color=colour, label=category)
        base = [low + high for low, high in zip(base, heights, strict=True)]
    if forecast.usable_nbytes:
        axes.axhline(forecast.usable_nbytes / GiB, color="black", linestyle="--", label=forecast.gpu)
    axes.set_ylabel("GiB allocated")
    axes.set_title(forecast.model)
    axes.tick_params(axis="x", rotation=20)
    axes.legend(fontsize="small")
    figure.savefig(file)
