"""What the user did to the weights between two steps: edits in place, or other storage put behind a parameter.

torch's optimizers see both; a session with masters and pool memory of its own has to look. An edited weight is the
truth: its master follows from it (the resync flag of the kernels), so that no edit is lost to an older master.
torch counts edits of the parameter itself; one through ``parameter.data`` is not counted, and the kernels see it: a
weight that is not what its fp32 master publishes replaces it, and the split master's upper half is the weight itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from overspill.errors import OverspillError
from overspill.train.live import LiveParameter

__all__ = ["adopt_edits"]


def adopt_edits(parameters: Iterable[LiveParameter], is_committed: Callable[[LiveParameter], bool]) -> None:
    """Take up edits since the last step; ``is_committed`` says whether weights are just those of the committed step.

    Raises OverspillError OVS504 when a parameter's dtype or shape was changed after attach.
    """
    for live in parameters:
        parameter = live.parameter
        if parameter._version != live.version:
            live.version = parameter._version
            # A checkpoint that is loaded over the very weights it holds is no edit, and costs no master.
            if not is_committed(live):
                live.resync = live.block.weights_dirty = True
            if live.on_device:
                live.weight.copy_(parameter.data)
        if not live.on_device and parameter.data_ptr() != live.weight.data_ptr():
            if parameter.dtype is not live.weight.dtype or parameter.shape != live.weight.shape:
                raise OverspillError(
                    "OVS504",
                    "The parameter's dtype or shape was changed after attach.",
                    field=live.place.name,
                    value=f"{parameter.dtype} {tuple(parameter.shape)}",
                    limit=f"{live.weight.dtype} {tuple(live.weight.shape)}",
                    next_step="Convert the model before attaching.",
                )
            with torch.no_grad():
                live.weight.copy_(parameter.data)
            parameter.data = live.weight
            live.resync = live.block.weights_dirty = True
