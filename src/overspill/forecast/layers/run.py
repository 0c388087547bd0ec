"""One rank's share of a micro-batch, as a layer sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from overspill.forecast.layers.style import Style

__all__ = ["Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """One rank's share of a micro-batch. trained, targeted: by a linear's or parameter's name inside the layer.

    tensor: tensor-parallel ranks; sequence_parallel: the residual stream is split over them too. prompted: the layer
    has LLaMA-Adapter's prompt.
    """

    style: Style
    tokens: int
    seq_len: int
    trained: Callable[[str], bool]
    targeted: Callable[[str], bool]
    tensor: int = 1
    sequence_parallel: bool = False
    expert: int = 1
    expert_tensor: int = 1
    keeps_grads: bool = True
    extra_saved_nbytes: int = 0
    input_needs_grad: bool = True
    prompted: bool = True
