"""Optimizers whose kernels do not run on meta, as footprints: the state that they make and what a step takes.

Any `torch.optim.Optimizer` runs for real in a trace and needs nothing from here; AdamW's foreach and for-loop ways are
torch's own code. A footprint has the face that a trace uses: ``state``, ``step()`` and ``zero_grad()``. Each says
where its numbers come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn

__all__ = ["FOOTPRINTS", "Blockwise8bit", "Footprint", "FusedAdam"]


class Footprint:
    """State is made in the first step, parameter by parameter, for those that have a gradient, as torch does."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.state: dict[nn.Parameter, list[torch.Tensor]] = {}

    def new_state(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        raise NotImplementedError

    def update(self, parameter: nn.Parameter) -> None:
        """What one parameter's update takes and lets go of; kernels in place take nothing."""

    def step(self) -> None:
        with torch.no_grad():
            having = [p for p in self.parameters if p.grad is not None]
            for parameter in having:
                if parameter not in self.state:
                    self.state[parameter] = self.new_state(parameter)
            for parameter in having:
                self.update(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()


class FusedAdam(Footprint):
    """AdamW and Adam with ``fused=True``: moments in the parameter's dtype and the step count on the device.

    torch/optim/adam.py, _init_group: ``step`` is a fp32 scalar on the device when fused; the kernel works in place.
    """

    def new_state(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return [step, torch.zeros_like(parameter), torch.zeros_like(parameter)]


class Blockwise8bit(Footprint):
    """bitsandbytes' 8-bit optimizers: quantised moments and a fp32 scale for each block of them.

    bitsandbytes/optim/optimizer.py, Optimizer2State.init_state and get_state_buffer: parameters below
    ``min_8bit_numel`` (4096) elements, and those of ``keep_fp32``, have fp32 moments; the others uint8 ones with
    ``absmax`` per ``block_numel`` elements (256; 2048 before release 0.44) and two shared quantisation maps of 256
    fp32 values. Paged ones keep moments of 100 000 elements and more in managed memory (``paged``).
    """

    MAP_NUMEL: Final = 256
    PAGED_NUMEL: Final = 100_000

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        moments: int = 2,
        block_numel: int = 256,
        min_8bit_numel: int = 4096,
        paged: bool = False,
        keep_fp32: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__(parameters)
        self.moments, self.block_numel, self.min_8bit_numel, self.paged = moments, block_numel, min_8bit_numel, paged
        self._fp32 = {id(p) for p in keep_fp32}
        self._maps: list[torch.Tensor] = []

    def new_state(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        new: Callable[..., torch.Tensor] = parameter.new_empty
        if parameter.numel() < self.min_8bit_numel or id(parameter) in self._fp32:
            return [new(parameter.shape, dtype=torch.float32) for _ in range(self.moments)]
        if not self._maps:
            self._maps = [new((self.MAP_NUMEL,), dtype=torch.float32) for _ in range(self.moments)]
        blocks = -(-parameter.numel() // self.block_numel)
        paged = self.paged and parameter.numel() >= self.PAGED_NUMEL
        quantised = [] if paged else [new(parameter.shape, dtype=torch.uint8) for _ in range(self.moments)]
        return [*quantised, *(new((blocks,), dtype=torch.float32) for _ in range(self.moments)), *self._maps]


def _footprint(kind: Callable[..., Any], **options: Any) -> Callable[[list[nn.Parameter]], Any]:
    return lambda parameters: kind(parameters, **options)


#: Optimizers by the name that Hugging Face's TrainingArguments has for them.
FOOTPRINTS: Final[dict[str, Callable[[list[nn.Parameter]], Any]]] = {
    "adamw_torch_fused": _footprint(FusedAdam),
    "adamw_8bit": _footprint(Blockwise8bit),
    "paged_adamw_8bit": _footprint(Blockwise8bit, paged=True),
    "lion_8bit": _footprint(Blockwise8bit, moments=1),
    "paged_lion_8bit": _footprint(Blockwise8bit, moments=1, paged=True),
}
