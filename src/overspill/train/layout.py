"""Which parameters are trained, and in which blocks and chunks they lie. Decides nothing about memory.

A fresh run cuts the model by names (model/blocks.py). A resumed one takes the cut from its store: parameters that were
unfrozen or added while it ran are blocks of their own there, whatever a fresh cut would say.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from overspill.errors import OverspillError
from overspill.model import Block, find_blocks
from overspill.model.blocks import layer_of
from overspill.plan import Plan
from overspill.schedule import ChunkPlan, plan_chunks
from overspill.tiers.disk import SlotSpec
from overspill.train.arrays import StateArray
from overspill.train.live import named_parameters
from overspill.train.optimizer import Groups

__all__ = ["cut_in_chunks", "lay_out", "split", "stored_blocks", "stored_frozen"]


def split(
    model: nn.Module, groups: Groups, stored: Collection[str] = ()
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Parameters that are trained, and all others, by name.

    Trained is what lies in a group and requires a gradient, or has state in the store (``stored``). A parameter without
    elements is neither: there is nothing to hold.
    """
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    wanted: set[int] = set()
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise OverspillError(
                    "OVS504",
                    f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the model.",
                    field="optimizer.param_groups",
                    next_step="Pass the module that owns all parameters of the optimizer.",
                )
            wanted.add(id(parameter))
    trainable: dict[str, nn.Parameter] = {}
    frozen: dict[str, nn.Parameter] = {}
    for name, parameter in named_parameters(model).items():
        if parameter.numel() > 0:
            trained = id(parameter) in wanted and (parameter.requires_grad or name in stored)
            (trainable if trained else frozen)[name] = parameter
    return trainable, frozen


def stored_blocks(slots: Sequence[SlotSpec]) -> list[list[str]]:
    """The names of each block's parameters, as a store has them."""
    blocks = (slot for slot in slots if slot.name.startswith("b") and _is_weights(slot))
    return [[tensor.name for tensor in slot.tensors] for slot in blocks]


def stored_frozen(slots: Sequence[SlotSpec]) -> list[str]:
    """The names of the parameters that were frozen when the run began, in the order of their slots."""
    return [slot.tensors[0].name for slot in slots if slot.name.startswith("frozen") and _is_weights(slot)]


def _is_weights(slot: SlotSpec) -> bool:
    return slot.name.endswith(".weights")


def lay_out(trainable: dict[str, nn.Parameter], stored: list[list[str]]) -> list[tuple[Block, torch.dtype]]:
    """Blocks in forward order, one dtype each; a layer with weights of two dtypes makes two blocks.

    stored: the cut of the run that goes on, taken if it holds just these parameters (else the store is another model's,
    and comparing it with a fresh cut says so).
    """
    if stored and sorted(name for members in stored for name in members) == sorted(trainable):
        blocks: list[tuple[Block, torch.dtype]] = []
        for index, members in enumerate(stored):
            named = [(name, tuple(trainable[name].shape)) for name in members]
            (one,) = find_blocks(named, groups=[(layer_of(members[0]) or members[0], members)])
            blocks.append((Block(index, one.name, one.parameters, one.numel), trainable[members[0]].dtype))
        return blocks
    by_dtype: dict[torch.dtype, list[tuple[str, tuple[int, ...]]]] = {}
    for name, parameter in trainable.items():
        by_dtype.setdefault(parameter.dtype, []).append((name, tuple(parameter.shape)))
    position = {name: i for i, name in enumerate(trainable)}
    found = [(block, dtype) for dtype, named in by_dtype.items() for block in find_blocks(named)]
    if len(by_dtype) > 1:
        found.sort(key=lambda pair: position[pair[0].parameters[0].name])
    return [
        (Block(index, block.name, block.parameters, block.numel), dtype) for index, (block, dtype) in enumerate(found)
    ]


def cut_in_chunks(
    layouts: Sequence[tuple[Block, torch.dtype]], plan: Plan, arrays: dict[torch.dtype, tuple[StateArray, ...]]
) -> tuple[ChunkPlan, ...]:
    """The chunks of all blocks in update order, and which of them stay in DRAM. Raises OverspillError OVS504."""
    if plan.optimizer_state.device > 0:
        raise OverspillError(
            "OVS504",
            "Optimizer state cannot be kept on the device yet.",
            field="plan.optimizer_state.device",
            value=plan.optimizer_state.device,
            limit=0,
            next_step="Give its share to host or disk.",
        )
    numels = [layout.numel for layout, _ in layouts]
    # An optimizer without state (SGD on fp32 weights) has nothing to keep on disk.
    share = plan.optimizer_state.host if any(arrays.values()) else 1.0
    # Rounded so that a share of 1 is everything, whatever the floating-point sum of the shares.
    resident = sum(numels) if share >= 1 - 1e-9 else int(share * sum(numels))
    return plan_chunks(numels, chunk_numel=plan.chunk_numel, resident_numel=resident)
