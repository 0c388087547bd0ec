"""Gradients on their way to the update: from ``p.grad`` into the pool, and their norm.

On the CPU ``p.grad`` itself is a view of the pool, set by a hook after each accumulation, so that everything which
reads or edits ``p.grad`` (torch's clipping, GradScaler, the Trainer's logging) works as in torch, and ``p.grad is
None`` at ``step()`` means unused or discarded. On an accelerator ``p.grad`` stays on the device and is copied into
pinned pool memory when the step is taken.

[Note: Norm] One norm over all parameters, in double precision: per parameter over fixed chunks of 65,536 elements,
then added in the optimizer's order of parameters, never in order of arrival. So it is the same for every placement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from overspill import _native
from overspill.errors import OverspillError
from overspill.train.live import LiveBlock, LiveParameter
from overspill.train.transfer import DeviceLink

__all__ = ["GradientNorm", "collect", "install_hook", "measure_norm"]


@dataclass(frozen=True)
class GradientNorm:
    """The global 2-norm of the gradient, in double precision, and how many elements are NaN or infinite."""

    value: float
    nonfinite: int

    @property
    def finite(self) -> bool:
        return self.nonfinite == 0 and math.isfinite(self.value)


def install_hook(live: LiveParameter, before: Callable[[int], None]) -> torch.utils.hooks.RemovableHandle:
    """Move each fresh gradient of a CPU parameter into the pool, after ``before(block)``, which ends its update."""
    # The hook must hold neither the parameter nor, through it, the session: torch keeps hooks where Python's garbage
    # collector does not look, and a circle through there would never be freed.
    view, block, name = live.gradient, live.block.index, live.place.name
    address = view.data_ptr()

    def after_accumulation(parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.data_ptr() == address:
            return
        before(block)
        with torch.no_grad():
            view.copy_(_checked(name, view.dtype, gradient))
        # An alias, so that what a user puts behind p.grad (p.grad.data = …) is not put behind our view as well.
        parameter.grad = view.detach()

    handle: torch.utils.hooks.RemovableHandle = live.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        after_accumulation
    )
    return handle


def collect(parameters: Iterable[LiveParameter], link: DeviceLink | None) -> None:
    """Bring every gradient to its place in the pool, and mark the blocks that have one as touched.

    On return the copies from a device may still be on their way; ``link`` knows when they arrive.
    """
    moved: list[tuple[LiveParameter, torch.Tensor]] = []
    for live in parameters:
        gradient = live.parameter.grad
        if gradient is None:
            continue
        live.block.touched = True
        if live.on_device:
            assert link is not None
            link.fetch(live.gradient, _checked(live.place.name, live.gradient.dtype, gradient), live.block.index)
        elif gradient.data_ptr() != live.gradient.data_ptr():
            moved.append((live, _checked(live.place.name, live.gradient.dtype, gradient)))
    # Gradients that were exchanged between parameters lie in each other's places: all are read before one is written.
    pool = {live.gradient.untyped_storage().data_ptr() for live, _ in moved}
    values = [(live, g.clone() if g.untyped_storage().data_ptr() in pool else g) for live, g in moved]
    for live, gradient in values:
        live.gradient.copy_(gradient)


def measure_norm(blocks: Iterable[LiveBlock], pool: _native.ThreadPool) -> GradientNorm:
    """The norm over all gradients present. See [Note: Norm]."""
    squares: list[tuple[int, float]] = []
    nonfinite = 0
    for block in blocks:
        if not block.touched:
            continue
        present = [live for live in block.parameters if live.parameter.grad is not None]
        segments = np.array(
            [(live.place.offset, live.place.offset + live.place.numel, 0) for live in present], dtype=np.int64
        )
        sums, counts = _native.squared_norms(block.gradients, segments, pool)
        squares.extend((live.order, float(value)) for live, value in zip(present, sums, strict=True))
        nonfinite += int(counts.sum())
    total = 0.0
    for _, value in sorted(squares):
        total += value
    return GradientNorm(math.sqrt(total) if total >= 0 else math.nan, nonfinite)


def _checked(name: str, planned: torch.dtype, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is not torch.strided:
        raise OverspillError(
            "OVS207",
            "Sparse gradients are not supported.",
            field=name,
            value=str(gradient.layout),
            next_step="Build the embedding with sparse=False.",
        )
    if gradient.dtype is not planned:
        raise OverspillError(
            "OVS206",
            "The gradient's dtype is not the one planned.",
            field=name,
            value=str(gradient.dtype),
            limit=str(planned),
            next_step='Leave p.grad in the parameter\'s dtype, or set plan.grad_dtype = "fp32".',
        )
    return gradient
