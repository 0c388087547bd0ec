"""Decoder layers as Python over the tape: one function a part, in the order in which the frameworks' code runs."""

from overspill.forecast.layers.figures import LayerFigures, layer_figures
from overspill.forecast.layers.style import Adapter, Style

__all__ = ["Adapter", "LayerFigures", "Style", "layer_figures"]
