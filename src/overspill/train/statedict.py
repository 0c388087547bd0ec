"""torch's optimizer ``state_dict`` over tiered state.

``build_state_dict`` gives torch's structure; its tensors are read-only views of committed slot files, so that what
calls it at every save (Accelerate, the Trainer) takes no memory for it. Without a store they are views of the pool,
as torch's own are views of its state. ``load_state_dict`` takes that structure back, from here or from torch.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from overspill.errors import OverspillError
from overspill.train.arrays import MASTER
from overspill.train.live import LiveBlock, LiveParameter, as_bytes, same_bytes

if TYPE_CHECKING:
    from overspill.tiers.disk import DiskStore
    from overspill.train.session import Session

__all__ = ["build_state_dict", "load_state_dict"]


def build_state_dict(session: Session, store: DiskStore | None) -> dict[str, Any]:
    """torch's structure: ``state`` by position over the groups, and ``param_groups``."""
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    position = 0
    for group in session.optimizer.param_groups:
        members = []
        for parameter in group["params"]:
            live = session.live_of(parameter)
            if live is not None and live.steps:
                state[position] = {"step": torch.tensor(float(live.steps))} | _arrays(live, store)
            members.append(position)
            position += 1
        groups.append({key: value for key, value in group.items() if key != "params"} | {"params": members})
    return {"state": state, "param_groups": groups}


def _arrays(live: LiveParameter, store: DiskStore | None) -> dict[str, torch.Tensor]:
    block, place = live.block, live.place
    arrays: dict[str, torch.Tensor] = {}
    for array in block.arrays:
        if array.name == MASTER and live.resync:
            continue  # the weights were edited: the master here is of the old ones, and is made anew at the next step
        if store is not None:
            mapped = store.map_tensor(block.slot_name(array.name), place.name)
            arrays[array.name] = _read_only(mapped, array.dtype).view(place.shape)
        else:
            flat = block.resident[array.name][place.offset : place.offset + place.numel]
            arrays[array.name] = flat.view(place.shape)
    return arrays


def _read_only(mapped: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns of writing to one; a write would be a SIGSEGV, not lost state.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(mapped.reshape(-1).view(np.uint8)).view(dtype)


def load_state_dict(session: Session, store: DiskStore | None, state_dict: dict[str, Any]) -> None:
    """Take over groups, step counts and state. What maps our own committed files is checked and not copied.

    As in torch the dict replaces what there is: a parameter that it has no state for starts afresh.

    Raises OverspillError OVS406 when the groups or shapes are of another model.
    """
    groups, saved = session.optimizer.param_groups, state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in saved]
    if sizes[0] != sizes[1]:
        raise OverspillError(
            "OVS406", "The state_dict is of another model.", field="param_groups", value=sizes[1], limit=sizes[0]
        )
    entries: dict[int, dict[str, Any]] = {}
    for group, old in zip(groups, saved, strict=True):
        for parameter, position in zip(group["params"], old["params"], strict=True):
            live = session.live_of(parameter)
            entry = state_dict["state"].get(position)
            if live is not None and entry:
                entries[id(live)] = entry
                _check_shapes(live, entry)
        group.update({key: value for key, value in old.items() if key != "params"})
    afresh = {id(live) for live in session.live_parameters if live.steps and id(live) not in entries}
    changed = entries.keys() | afresh
    blocks = [block for block in session.blocks if any(id(live) in changed for live in block.parameters)]
    if not all(_is_committed(block, entries, store) for block in blocks):
        with session.lanes_idle():
            for block in blocks:
                _load_block(session, store, block, entries, afresh)
    for live in session.live_parameters:
        if id(live) in afresh:
            live.steps, live.resync = 0, True
        if id(live) in entries:
            live.steps = int(float(entries[id(live)]["step"]))
            live.resync = live.resync and MASTER not in entries[id(live)]


def _check_shapes(live: LiveParameter, entry: dict[str, Any]) -> None:
    for array in live.block.arrays:
        value = entry.get(array.name)
        if value is None and array.name != MASTER:
            raise OverspillError(
                "OVS406",
                f"The state_dict has no {array.name} for this parameter.",
                field=live.place.name,
                value=", ".join(sorted(entry)),
            )
        if value is not None and tuple(value.shape) != tuple(live.place.shape):
            raise OverspillError(
                "OVS406",
                f"{array.name} has another shape than the parameter.",
                field=live.place.name,
                value=tuple(value.shape),
                limit=tuple(live.place.shape),
            )


def _is_committed(block: LiveBlock, entries: dict[int, dict[str, Any]], store: DiskStore | None) -> bool:
    """Every tensor given for this block is a view of the store's own committed file, and nothing is newer."""
    if store is None:
        return False
    for live in block.parameters:
        entry = entries.get(id(live))
        if entry is None or live.steps != int(float(entry["step"])):
            return False
        for array in block.arrays:
            value = entry.get(array.name)
            mapped = store.map_tensor(block.slot_name(array.name), live.place.name)
            if value is None or value.dtype is not array.dtype:
                return False
            if not same_bytes(mapped, value):
                return False
    return True


def _load_block(
    session: Session,
    store: DiskStore | None,
    block: LiveBlock,
    entries: dict[int, dict[str, Any]],
    afresh: set[int],
) -> None:
    """Write a block's state: to DRAM for the chunks that stay there, through a bounded buffer to disk for the rest."""
    for array in block.arrays:
        item = torch.empty(0, dtype=array.dtype).element_size()
        for chunk in block.chunks:
            if chunk.resident:
                target = block.resident[array.name][chunk.start : chunk.stop]
            else:
                assert store is not None
                target = session.scratch(array.name, chunk.numel)
                if chunk.index in block.on_disk:
                    store.read_into(block.slot_name(array.name), chunk.start * item, as_bytes(target))
                else:
                    target.zero_()
            for live in block.parameters:
                start = max(live.place.offset, chunk.start)
                stop = min(live.place.offset + live.place.numel, chunk.stop)
                entry = entries.get(id(live))
                if start < stop and id(live) in afresh:
                    target[start - chunk.start : stop - chunk.start].zero_()
                if start >= stop or entry is None or entry.get(array.name) is None:
                    continue
                source = entry[array.name].detach().reshape(-1)
                target[start - chunk.start : stop - chunk.start].copy_(
                    source[start - live.place.offset : stop - live.place.offset]
                )
            if not chunk.resident:
                assert store is not None
                store.write_from(block.slot_name(array.name), chunk.start * item, as_bytes(target), checksum=False)
    block.on_disk |= {chunk.index for chunk in block.chunks if not chunk.resident}
    block.weights_dirty = block.resident_dirty = True
