"""Which arrays of optimizer state a block has, and in which dtype: from the kernel, the weights and the format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from overspill.optim.kernels import OptimizerKernel
from overspill.plan import StateClass, StateFormat

__all__ = ["MASTER", "StateArray", "state_arrays", "state_nbytes"]

MASTER: Final = "master"
"""The array that completes bf16 weights to an fp32 master: the 16-bit residual, or the master itself."""


@dataclass(frozen=True)
class StateArray:
    """One value of state per element of a block."""

    name: str
    dtype: torch.dtype
    state_class: StateClass

    @property
    def item_nbytes(self) -> int:
        return self.dtype.itemsize


def state_arrays(
    kernel: OptimizerKernel, groups: Sequence[Mapping[str, Any]], weight_dtype: torch.dtype, form: StateFormat
) -> tuple[StateArray, ...]:
    """The arrays of a block whose weights have ``weight_dtype``; fp32 weights are their own master."""
    arrays: list[StateArray] = []
    if weight_dtype is not torch.float32:
        dtype = torch.int16 if form.master == "split" else torch.float32
        arrays.append(StateArray(MASTER, dtype, StateClass.MASTER))
    moments = torch.float32 if form.moments == "fp32" else torch.bfloat16
    arrays += [StateArray(name, moments, StateClass.MOMENTS) for name in kernel.state_names(groups)]
    return tuple(arrays)


def state_nbytes(arrays: Iterable[StateArray]) -> int:
    """Bytes of state per element."""
    return sum(array.item_nbytes for array in arrays)
