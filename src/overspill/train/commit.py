"""Commits: what a step leaves on disk, and how a session comes back from it.

A commit of step t holds weights, optimizer state, each parameter's own step count, the param groups, and the
snapshot of RNG, schedules and data position taken at the step's boundary. The store decides atomically; nothing
here is believed before that. A checkpoint is a pin of a commit and copies no state.

[Note: Commit of a step] With ``durability`` every N steps the writes of such a step include weights and the state
that stays in DRAM, on the write lane, and the COMMIT runs behind the next forward and backward; the next step's
updates wait for it. A checkpoint at a step that was not expected writes what is still dirty on the user's thread.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import overspill
from overspill.errors import OverspillError
from overspill.plan import Overlap, StateClass
from overspill.tiers.disk import DiskStore, SlotSpec, TensorSpec
from overspill.train.arrays import StateArray
from overspill.train.live import LiveBlock, LiveParameter, as_bytes, same_bytes
from overspill.train.snapshot import Tracked, decode, encode, restore_rng, take_rng
from overspill.train.work import StepWork
from overspill.units import MiB, format_nbytes

if TYPE_CHECKING:
    from overspill.train.session import Session

__all__ = ["Committer", "Restored", "build_identity", "slot_specs"]

#: Persistent buffers (running means and the like) go into each manifest; a model that has more of them is told so.
_BUFFERS_LIMIT_NBYTES = 16 * MiB


def dtype_name(dtype: torch.dtype) -> str:
    """As the store calls it: "float32", "bfloat16", "int16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Restored:
    """What a resumed session came back to. ``differs``: facts that are not as they were, so that bits may differ."""

    step: int
    extra: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    differs: tuple[str, ...] = ()


def slot_specs(
    blocks: Sequence[LiveBlock], arrays_of: dict[torch.dtype, tuple[StateArray, ...]], frozen: dict[str, torch.Tensor]
) -> list[SlotSpec]:
    """One slot for each block's weights and each of its state arrays, and one for each frozen parameter."""
    slots: list[SlotSpec] = []
    for block in blocks:
        arrays = [("weights", block.dtype, StateClass.WEIGHTS)]
        arrays += [(array.name, array.dtype, array.state_class) for array in arrays_of[block.dtype]]
        for name, dtype, state_class in arrays:
            item = torch.empty(0, dtype=dtype).element_size()
            tensors = tuple(
                TensorSpec(p.name, p.offset * item, p.shape, dtype_name(dtype)) for p in block.layout.parameters
            )
            numel = block.layout.numel
            slots.append(
                SlotSpec(block.slot_name(name), dtype_name(dtype), (numel,), numel * item, str(state_class), tensors)
            )
    for index, (name, tensor) in enumerate(frozen.items()):
        spec = TensorSpec(name, 0, tuple(tensor.shape), dtype_name(tensor.dtype))
        numel = max(tensor.numel(), 1)
        slots.append(
            SlotSpec(
                frozen_slot(index),
                dtype_name(tensor.dtype),
                (numel,),
                numel * tensor.element_size(),
                str(StateClass.WEIGHTS),
                (spec,),
            )
        )
    return slots


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that state_dict() holds. (Asking state_dict() itself would end pending updates.)"""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and not buffer.is_meta
    }


def frozen_slot(index: int) -> str:
    return f"frozen{index:05d}.weights"


def build_identity() -> dict[str, Any]:
    """What has to be the same for bits to repeat."""
    return {
        "overspill": overspill.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "compute_threads": torch.get_num_threads(),
    }


class Committer:
    """The durable side of one session. All methods run on the user's thread, but commit(), which has its lane."""

    def __init__(
        self,
        session: Session,
        store: DiskStore | None,
        frozen: dict[str, torch.Tensor],
    ) -> None:
        self._session = session
        self._store = store
        self._frozen = frozen
        self._tracked: dict[str, Tracked] = {}
        self._pending_restore: dict[str, Any] = {}
        self._expected_every = 0
        self._expected_at: frozenset[int] = frozenset()
        self._last_boundary: StepWork | None = None
        self._restored_extra: Mapping[str, Any] = {}
        self._buffers = _persistent_buffers(session.model)
        self._frozen_versions: dict[str, int] = {}
        held_nbytes = sum(buffer.nbytes for buffer in self._buffers.values())
        if store is not None and held_nbytes > _BUFFERS_LIMIT_NBYTES:
            session.notes.append(
                f"Checkpoints leave out the model's buffers: {format_nbytes(held_nbytes)} are more than "
                f"{format_nbytes(_BUFFERS_LIMIT_NBYTES)}."
            )
            self._buffers = {}

    def follow_frozen(self, name: str, storage: torch.Tensor) -> None:
        """What is written to the slot of a parameter that was frozen comes from ``storage`` from now on."""
        if name in self._frozen:
            self._frozen[name] = storage
            self._frozen_versions.pop(name, None)

    # -- when ------------------------------------------------------------------------------------------------

    @property
    def committed_step(self) -> int | None:
        return None if self._store is None else self._store.committed_step

    def is_commit_step(self, number: int) -> bool:
        if self._store is None:
            return False
        periods = (self._session.plan.durability.every_steps, self._expected_every)
        return number in self._expected_at or any(period and number % period == 0 for period in periods)

    def expect(self, every_steps: int, at: frozenset[int]) -> None:
        self._expected_every, self._expected_at = every_steps, at

    # -- the snapshot ------------------------------------------------------------------------------------------

    def track(self, objects: dict[str, Tracked]) -> None:
        for name, tracked in objects.items():
            self._tracked[name] = tracked
            if name in self._pending_restore:
                tracked.load_state_dict(decode(self._pending_restore.pop(name)))
                # torch's schedulers write the first step's lr into the groups when they are made, and loading their
                # state does not undo it: in torch's own order the optimizer is loaded after that. So once more.
                self._restore_groups(self._restored_extra["groups"])

    def take_boundary(self, work: StepWork, extra: dict[str, Any]) -> None:
        """Take the snapshot of a step. Raises OverspillError OVS504 for something tracked that JSON cannot hold."""
        work.extra, work.complete = self._snapshot(encode(extra), complete=True), True
        self._last_boundary = work

    def close_boundary(self, work: StepWork) -> None:
        """Nobody called step_boundary() yet: a commit now holds weights and optimizer only, and says so."""
        work.extra, work.complete = self._snapshot({}, complete=False), False
        self._last_boundary = work

    def _snapshot(self, extra: Any, *, complete: bool) -> dict[str, Any]:
        if self._store is None:
            return {}
        name_by_id = {id(live.parameter): live.place.name for live in self._session.live_parameters}
        groups = [
            {key: encode(value, key) for key, value in group.items() if key != "params"}
            | {"params": [name_by_id[id(p)] for p in group["params"] if id(p) in name_by_id]}
            for group in self._session.optimizer.param_groups
        ]
        return {
            "complete": complete,
            "build": build_identity(),
            "groups": groups,
            "steps": {live.place.name: live.steps for live in self._session.live_parameters},
            "rng": take_rng(),
            "tracked": {name: encode(tracked.state_dict(), name) for name, tracked in self._tracked.items()},
            "extra": extra,
            "buffers": {name: encode(buffer, name) for name, buffer in self._buffers.items()},
            "time": time.time(),
        }

    # -- writing -----------------------------------------------------------------------------------------------

    def commit(self, work: StepWork) -> None:
        """Make a step durable. Runs on the commit lane, after the step's writes."""
        # With overlap = step the weights were on disk when step() returned; else they may have been edited meanwhile.
        live = self._session.live_parameters if self._session.plan.overlap is Overlap.FORWARD else ()
        edited = [p.place.name for p in live if p.parameter._version != p.version]
        if edited:
            raise OverspillError(
                "OVS504",
                f"Weights were edited while step {work.number} was being written; the step is not committed.",
                field=edited[0],
                next_step="Call session.flush() before editing weights.",
            )
        self._decide(work.number, work.extra, work.written_out)

    def checkpoint(self, name: str) -> Path:
        store = self._need_store("checkpoint")
        step = self._session.step
        if step == 0:
            raise OverspillError("OVS504", "There is nothing to save before the first step.", field="checkpoint")
        self.commit_if_behind()
        path = store.pin(name)
        pins = store.pins()
        for pin in pins[: max(0, len(pins) - max(1, self._session.plan.keep_last))]:
            if pin.name != name:
                store.unpin(pin.name)
        return path

    def commit_if_behind(self) -> None:
        """Commit the step just done where it is not, or where weights were edited since."""
        store, step = self._store, self._session.step
        if store is None or step == 0:
            return
        if store.committed_step != step or any(block.weights_dirty for block in self._session.blocks):
            self.commit_now()

    def commit_now(self) -> None:
        """Commit the step just done, on this thread; the lanes have nothing to write meanwhile."""
        for block in self._session.blocks:
            for chunk in block.chunks:
                self._session.worker.write_out(block, chunk, checksum=True)
        work = self._last_boundary
        extra = work.extra if work is not None and work.number == self._session.step else None
        everything = {block.index for block in self._session.blocks}
        self._decide(self._session.step, extra or self._snapshot({}, complete=False), everything)

    def _decide(self, step: int, extra: dict[str, Any], written_out: set[int]) -> None:
        store = self._need_store("commit")
        self._write_the_rest(written_out)
        # Weights that were edited since their last update: their master starts anew from them, also after a resume.
        edited = [live.place.name for live in self._session.live_parameters if live.resync and live.steps]
        prepared = store.prepare(step, {**extra, "edited": edited})
        store.commit(prepared)
        for block in self._session.blocks:
            block.weights_dirty = block.resident_dirty = False

    def _write_the_rest(self, written_out: set[int]) -> None:
        """Weights that this commit's writes did not come by: frozen ones, and blocks that joined meanwhile."""
        store = self._need_store("commit")
        for index, (name, tensor) in enumerate(self._frozen.items()):
            version = self._session.frozen_version(name)
            if self._frozen_versions.get(name) != version:
                store.write_from(frozen_slot(index), 0, as_bytes(tensor.reshape(-1)), checksum=True)
                self._frozen_versions[name] = version
        for block in self._session.blocks:
            if block.weights_dirty and block.index not in written_out:
                for chunk in block.chunks:
                    self._session.worker.write_out(block, chunk, checksum=True)

    # -- coming back -------------------------------------------------------------------------------------------

    def restore(self) -> Restored | None:
        """Load the committed step's weights, resident state, step counts, groups and RNG into the session."""
        store = self._need_store("resume")
        if not store.committed_step:
            return None
        saved = store.extra
        for block in self._session.blocks:
            store.read_into(block.slot_name("weights"), 0, as_bytes(block.weights))
            if all(store.is_written(block.slot_name(array.name)) for array in block.arrays):
                for name, array in block.resident.items():
                    store.read_into(block.slot_name(name), 0, as_bytes(array))
                block.on_disk = {chunk.index for chunk in block.chunks if not chunk.resident}
            block.weights_dirty = block.resident_dirty = False
            for live in block.parameters:
                live.steps = int(saved["steps"][live.place.name])
                live.resync = live.steps == 0 or live.place.name in saved["edited"]
                if live.on_device:
                    with torch.no_grad():
                        live.parameter.data.copy_(live.weight)
        for index, tensor in enumerate(self._frozen.values()):
            store.read_into(frozen_slot(index), 0, as_bytes(tensor.reshape(-1)))
        with torch.no_grad():
            for name, saved_buffer in saved["buffers"].items():
                self._buffers[name].copy_(decode(saved_buffer))
        self._restore_groups(saved["groups"])
        self._pending_restore = dict(saved["tracked"])
        self._restored_extra = saved
        restore_rng(saved["rng"])
        if not saved["complete"]:
            self._session.notes.append(
                "The commit was made without a step boundary: random generators, schedules and data position are of "
                "the moment at which it was made."
            )
        differs = tuple(
            f"{key}: {saved['build'].get(key)} then, {value} now"
            for key, value in build_identity().items()
            if saved["build"].get(key) != value
        )
        self._session.step = int(store.committed_step)
        return Restored(self._session.step, decode(saved["extra"]), bool(saved["complete"]), differs)

    def note_unclaimed(self) -> None:
        """Say, once, which tracked state of the resumed run nobody has asked for."""
        if self._pending_restore:
            names = ", ".join(sorted(self._pending_restore))
            self._session.notes.append(f"The resumed run tracked {names}, and this one does not; it starts anew.")
            self._pending_restore = {}

    def restore_rng(self) -> None:
        if self._restored_extra:
            restore_rng(self._restored_extra["rng"])

    def _restore_groups(self, saved: list[dict[str, Any]]) -> None:
        groups = self._session.optimizer.param_groups
        if len(groups) != len(saved):
            raise OverspillError(
                "OVS602",
                "The optimizer has another number of param groups than the run.",
                field="optimizer.param_groups",
                value=len(groups),
                limit=len(saved),
            )
        for group, old in zip(groups, saved, strict=True):
            group.update({key: decode(value) for key, value in old.items() if key != "params"})

    # -- facts -------------------------------------------------------------------------------------------------

    def moved_nbytes(self) -> tuple[int, int]:
        if self._store is None:
            return 0, 0
        return self._store.bytes_read, self._store.bytes_written

    def disk_nbytes_by_class(self) -> dict[str, int]:
        """Bytes of the current version of each class that the store has been given."""
        held: dict[str, int] = {}
        if self._store is not None:
            for slot in self._store.slots:
                if self._store.is_written(slot.name):
                    held[slot.state_class] = held.get(slot.state_class, 0) + slot.nbytes
        return held

    def holds_weights(self, live: LiveParameter) -> bool:
        """The newest step is committed, and these are its weights, bit for bit."""
        if self._store is None or live.steps == 0 or self._store.committed_step != self._session.step:
            return False
        mapped = self._store.map_tensor(live.block.slot_name("weights"), live.place.name)
        return same_bytes(mapped, live.parameter.data)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _need_store(self, what: str) -> DiskStore:
        if self._store is None:
            raise OverspillError(
                "OVS504",
                f"A {what} needs a store on disk, and this session has none.",
                field="directory",
                next_step="Give attach() a directory.",
            )
        return self._store

    # -- torch's state_dict --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        from overspill.train.statedict import build_state_dict

        if self._store is not None and self._session.step and self._store.committed_step != self._session.step:
            self.commit_now()
        return build_state_dict(self._session, self._store)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from overspill.train.statedict import load_state_dict

        load_state_dict(self._session, self._store, state_dict)
