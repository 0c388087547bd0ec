"""Parameters that join a running session: ``add_param_group``, or unfreezing after some steps.

They become blocks of their own behind the others, within the same budget: state goes to DRAM where the plan keeps
everything there, and to disk otherwise. The store gets new slots; the committed step stays as it is. A parameter that
was frozen when the run began keeps the slot that it had as such, and a commit writes its weights there too, so that
every slot of a checkpoint holds what it says.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import nn

from overspill.errors import OverspillError
from overspill.model import Block, find_blocks
from overspill.schedule import plan_chunks
from overspill.train.arrays import state_arrays
from overspill.train.commit import slot_specs
from overspill.train.live import LiveBlock, add_parameters, build_live_block, named_parameters, place_weights, weight_of

if TYPE_CHECKING:
    from overspill.train.session import Session

__all__ = ["extend"]


def extend(session: Session, parameters: list[nn.Parameter]) -> None:
    """Take parameters into the session. Raises OverspillError OVS504 when the model does not own them, OVS301."""
    parameters = [parameter for parameter in parameters if parameter.numel() > 0]
    if not parameters:
        return
    name_by_id = {id(p): name for name, p in named_parameters(session.model).items()}
    named: dict[str, nn.Parameter] = {}
    for parameter in parameters:
        if id(parameter) not in name_by_id:
            raise OverspillError(
                "OVS504",
                f"A parameter of shape {tuple(parameter.shape)} is not in the attached model.",
                field="optimizer.add_param_group",
                next_step="Register it in the model first, so that checkpoints can name it.",
            )
        named[name_by_id[id(parameter)]] = parameter
    with session.lanes_idle():
        fresh = _new_blocks(session, named)
        if session.store is not None:
            arrays = {block.dtype: block.arrays for block in fresh}
            session.store.add_slots(slot_specs(fresh, arrays, {}))
        order = {id(p): i for i, p in enumerate(p for g in session.optimizer.param_groups for p in g["params"])}
        for block in fresh:
            for place in block.layout.parameters:
                storage = weight_of(block, place)
                place_weights(session.model, named[place.name], storage)
                session.follow_frozen(place.name, storage)
            add_parameters(block, named, order)
            for live in block.parameters:
                live.version = live.parameter._version
        blocks = [*session.blocks, *fresh]
        chunks = tuple(chunk for block in blocks for chunk in block.chunks)
        plan = dataclasses.replace(session.step_plan, blocks=len(blocks), chunks=chunks)
        session.install(blocks, session.staging, plan)


def _new_blocks(session: Session, named: dict[str, nn.Parameter]) -> list[LiveBlock]:
    by_dtype: dict[torch.dtype, list[tuple[str, tuple[int, ...]]]] = {}
    for name, parameter in named.items():
        by_dtype.setdefault(parameter.dtype, []).append((name, tuple(parameter.shape)))
    first = len(session.blocks)
    groups = session.optimizer.param_groups
    fresh: list[LiveBlock] = []
    for dtype, members in by_dtype.items():
        for found in find_blocks(members):
            index = first + len(fresh)
            layout = Block(index, found.name, found.parameters, found.numel)
            resident_numel = 0 if session.staging else layout.numel
            numel = session.plan.chunk_numel
            cut = plan_chunks([layout.numel], chunk_numel=numel, resident_numel=resident_numel)
            chunks = [dataclasses.replace(chunk, block=index) for chunk in cut]
            arrays = state_arrays(session.kernel, groups, dtype, session.plan.state_format)
            grad_dtype = torch.float32 if session.plan.grad_dtype == "fp32" else dtype
            try:
                fresh.append(build_live_block(session.pool, layout, dtype, grad_dtype, arrays, chunks))
            except OverspillError:
                for block in fresh:
                    for allocation in block.allocations:
                        session.pool.free(allocation)
                raise
    return fresh
