"""A layer as torchtune and torchtitan write it: torch's own modules, rotary embedding through fp32."""

from __future__ import annotations

from overspill.forecast.layers import transformers
from overspill.forecast.layers.parts import Layer
from overspill.forecast.layers.run import Run
from overspill.forecast.tape import Tensor
from overspill.model.facts import LayerKind

__all__ = ["forward"]


def forward(layer: Layer, kind: LayerKind, x: Tensor, run: Run) -> Tensor:
    """The order of operations is that of transformers; `Style` says which norm, rotary embedding and attention."""
    return transformers.forward(layer, kind, x, run)
