"""attach(): from a model, an optimizer and a plan to a session, all checks first.

Order matters: what can be known to be wrong (an unsupported optimizer, a budget that is too small, a full disk, a
store of another model) is an error here, before a weight is moved or a file is written.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overspill.errors import OverspillError
from overspill.job import OptimizerConfig
from overspill.optim.kernels import KERNELS
from overspill.plan import Plan, StateClass
from overspill.schedule import ChunkPlan, StepPlan
from overspill.tiers.disk import DiskStore, SlotSpec
from overspill.tiers.disk.layout import DTYPE_NBYTES, check_match
from overspill.tiers.host import HostPool, map_anonymous
from overspill.train.arrays import StateArray, state_arrays, state_nbytes
from overspill.train.commit import build_identity, dtype_name, slot_specs
from overspill.train.governor import anonymous_nbytes
from overspill.train.layout import cut_in_chunks, lay_out, split, stored_blocks, stored_frozen
from overspill.train.live import (
    LiveBlock,
    StagingBuffer,
    add_parameters,
    as_tensor,
    build_live_block,
    named_parameters,
    place_weights,
    refuse_unsupported,
    weight_of,
)
from overspill.train.optimizer import Groups, groups_from_config, groups_from_torch
from overspill.train.parts import SessionParts
from overspill.train.session import Session
from overspill.train.transfer import DeviceLink
from overspill.units import MiB

__all__ = ["attach"]


def attach(
    model: nn.Module,
    *,
    optimizer: OptimizerConfig | torch.optim.Optimizer,
    plan: Plan,
    directory: str | Path | None = None,
    checkpoints: str | Path | None = None,
    resume: bool | str = False,
) -> Session:
    """Put a model's training state where the plan says, and return the session that trains it.

    Args:
        model: any module on the CPU, on one accelerator, or with its parameters on meta (they are then allocated in
            the pool, uninitialised; fill them in place). Parameters become views of memory that the session owns.
        optimizer: a torch.optim.AdamW, Adam or SGD over the model's parameters that has not stepped yet, or an
            OptimizerConfig, which makes two groups by ``no_decay``.
        plan: where state lives and when updates run; see overspill.plan.Plan.
        directory: of the store, for state on disk and for checkpoints. None: no disk is used.
        checkpoints: where checkpoints are listed; default: ``directory/checkpoints``.
        resume: go on from the last committed step in ``directory``, or from the checkpoint of this name;
            ``session.restored`` says which step that was.

    Raises:
        OverspillError: OVS206, OVS207 (dtype, optimizer), OVS301 (budget), OVS401 … OVS407 (disk), OVS504 (model).
    """
    _refuse_attached(model)
    refuse_unsupported(model)
    base_nbytes = _base_nbytes(model)
    if isinstance(optimizer, OptimizerConfig):
        kind, groups, defaults = groups_from_config(optimizer, named_parameters(model).items())
    else:
        kind, groups, defaults = groups_from_torch(optimizer)
    kernel = KERNELS[kind]
    for group in groups:
        kernel.check_group(group)

    with contextlib.ExitStack() as undo:  # what fails from here on gives the store's lock back
        store = None
        if directory is not None and resume:
            store = _open_store(Path(directory), plan, checkpoints=checkpoints, resume=resume)
            undo.callback(store.close)
        stored = stored_blocks(store.slots) if store is not None else []
        trainable, frozen = split(model, groups, {name for members in stored for name in members})
        layouts = lay_out(trainable, stored)
        arrays = {dtype: state_arrays(kernel, groups, dtype, plan.state_format) for _, dtype in layouts}
        chunks = cut_in_chunks(layouts, plan, arrays)
        needs_disk = any(not chunk.resident for chunk in chunks)
        if needs_disk and directory is None:
            raise OverspillError(
                "OVS504",
                "The plan keeps optimizer state on disk, and no directory was given for it.",
                field="directory",
                next_step="Give attach() a directory, or place the state on the host.",
            )

        notes: list[str] = [*plan.state_format.notes]
        pool = _make_pool(model, plan, notes)
        pool.reserve(plan.activations_nbytes, StateClass.ACTIVATIONS, "activations and scratch")
        blocks = [
            build_live_block(
                pool,
                layout,
                dtype,
                torch.float32 if plan.grad_dtype == "fp32" else dtype,
                arrays[dtype],
                [chunk for chunk in chunks if chunk.block == layout.index],
            )
            for layout, dtype in layouts
        ]
        staging = _make_staging(pool, plan, chunks, arrays) if needs_disk else []
        frozen_storage = _make_frozen(pool, frozen, notes)
        if store is not None:
            # What was frozen when the run began keeps its slot, also once it is trained; see train/extend.py.
            weights = {place.name: weight_of(block, place) for block in blocks for place in block.layout.parameters}
            held = {**weights, **frozen_storage}
            began = stored_frozen(store.slots)
            if set(frozen_storage) <= set(began) <= set(held):
                frozen_storage = {name: held[name] for name in began}
            check_match(store.slots, slot_specs(blocks, arrays, frozen_storage))
        elif directory is not None:
            slots = slot_specs(blocks, arrays, frozen_storage)
            store = _create_store(Path(directory), slots, plan, checkpoints=checkpoints)
            undo.callback(store.close)
        if store is not None:
            notes.extend(store.notes)

        link = _make_link(model)
        _move(model, blocks, trainable, frozen, frozen_storage, groups, plan)
        session = Session(
            SessionParts(
                model=model,
                plan=plan,
                pool=pool,
                kernel=kernel,
                kind=kind,
                groups=groups,
                defaults=defaults,
                blocks=blocks,
                staging=staging,
                step_plan=_step_plan(plan, blocks, chunks, staging, arrays),
                store=store,
                frozen=frozen_storage,
                frozen_parameters=frozen,
                link=link,
                base_nbytes=base_nbytes,
                notes=notes,
            )
        )
        undo.callback(session.close)
        session.start(resume=bool(resume))
        undo.pop_all()
        _SESSIONS[model] = weakref.ref(session)
        return session


#: The open session of each model, so that a second one does not take weights whose update is still under way.
_SESSIONS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Session]] = weakref.WeakKeyDictionary()


def _refuse_attached(model: nn.Module) -> None:
    reference = _SESSIONS.get(model)
    session = reference() if reference is not None else None
    if session is not None and not session.closed:
        raise OverspillError(
            "OVS504", "The model is attached to a session already.", next_step="Close that session first."
        )


def _base_nbytes(model: nn.Module) -> int:
    """What the process holds beside the model: interpreter and libraries, on top of which the budget counts."""
    own = sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type == "cpu")
    return max(0, (anonymous_nbytes() or 0) - own)


def _make_pool(model: nn.Module, plan: Plan, notes: list[str]) -> HostPool:
    """Anonymous memory; pinned for what a device copies from and to, as long as the system pins."""
    if _device_of(model).type in ("cpu", "meta"):
        return HostPool(plan.memory_nbytes)
    pins = True

    def map_memory(nbytes: int, state_class: StateClass) -> Any:
        nonlocal pins
        if pins and state_class in (StateClass.WEIGHTS, StateClass.GRADIENTS):
            try:
                return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
            except RuntimeError as error:
                pins = False
                notes.append(
                    f"The system's limit on pinned host memory is reached ({str(error).splitlines()[0]}); the rest is "
                    "pageable, and copies from and to the device make their thread wait."
                )
        return map_anonymous(nbytes)

    return HostPool(plan.memory_nbytes, map_memory=map_memory)


def _make_link(model: nn.Module) -> DeviceLink | None:
    device = _device_of(model)
    return None if device.type in ("cpu", "meta") else DeviceLink(device)


def _device_of(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise OverspillError(
            "OVS504", "The model's parameters are on several devices.", value=", ".join(sorted(map(str, devices)))
        )
    return devices.pop() if devices else torch.device("cpu")


def _make_staging(
    pool: HostPool, plan: Plan, chunks: Sequence[ChunkPlan], arrays: dict[torch.dtype, tuple[StateArray, ...]]
) -> list[StagingBuffer]:
    """As many staging buffers as plan.staging_nbytes holds; each has room for the widest chunk."""
    staged = [chunk for chunk in chunks if not chunk.resident]
    numel = max(chunk.numel for chunk in staged)
    widest = max(arrays.values(), key=state_nbytes)
    one_nbytes = numel * state_nbytes(widest)
    count = min(plan.staging_nbytes // one_nbytes, len(staged))
    if count < 1:
        raise OverspillError(
            "OVS301",
            "The staging buffers do not hold one chunk of optimizer state.",
            field="plan.staging_nbytes",
            value=plan.staging_nbytes,
            limit=f"at least {one_nbytes}",
            next_step="Raise plan.staging_nbytes or lower plan.chunk_numel.",
        )
    return [StagingBuffer.allocate(pool, widest, numel, index) for index in range(count)]


def _make_frozen(pool: HostPool, frozen: dict[str, nn.Parameter], notes: list[str]) -> dict[str, torch.Tensor]:
    """Host memory for parameters that are not trained; those that stay where they are get a note."""
    storage: dict[str, torch.Tensor] = {}
    left: list[str] = []
    for name, parameter in frozen.items():
        if parameter.device.type in ("cpu", "meta") and dtype_name(parameter.dtype) in DTYPE_NBYTES:
            nbytes = parameter.numel() * parameter.element_size()
            allocation = pool.allocate(nbytes, StateClass.WEIGHTS, f"frozen {name}")
            storage[name] = as_tensor(allocation, parameter.dtype, parameter.numel()).view(parameter.shape)
        else:
            left.append(name)
    if left:
        notes.append(f"{len(left)} frozen parameters are not part of checkpoints, the first: {left[0]}.")
    return storage


def _open_store(directory: Path, plan: Plan, *, checkpoints: str | Path | None, resume: bool | str) -> DiskStore:
    return DiskStore.open(
        directory,
        from_pin=resume if isinstance(resume, str) else None,
        checkpoints=None if checkpoints is None else Path(checkpoints),
        verify_reads=plan.verify_reads,
    )


def _create_store(directory: Path, slots: list[SlotSpec], plan: Plan, *, checkpoints: str | Path | None) -> DiskStore:
    return DiskStore.create(
        directory,
        slots,
        identity=build_identity(),
        pins=max(1, plan.keep_last),
        directories=plan.directories,
        weights=plan.directory_weights,
        checkpoints=None if checkpoints is None else Path(checkpoints),
        piece_nbytes=_piece_nbytes(plan),
        verify_reads=plan.verify_reads,
    )


def _piece_nbytes(plan: Plan) -> int:
    """Unit of the store's checksums: what every chunk of every class begins and ends on, at most 1 MiB."""
    smallest_nbytes = 2 * plan.chunk_numel  # two bytes per element: bf16 weights, residual
    return min(MiB, smallest_nbytes & -smallest_nbytes)


def _move(
    model: nn.Module,
    blocks: Sequence[LiveBlock],
    trainable: dict[str, nn.Parameter],
    frozen: dict[str, nn.Parameter],
    frozen_storage: dict[str, torch.Tensor],
    groups: Groups,
    plan: Plan,
) -> None:
    """Move weights into the pool, one parameter at a time; groups follow parameters that had to be replaced."""
    moved: dict[int, nn.Parameter] = {}
    for block in blocks:
        for place in block.layout.parameters:
            parameter = trainable[place.name]
            storage = weight_of(block, place)
            fresh = place_weights(model, parameter, storage)
            moved[id(parameter)] = trainable[place.name] = fresh
            if plan.grad_dtype == "fp32" and fresh.dtype is not torch.float32:
                fresh.grad_dtype = torch.float32
    for name, storage in frozen_storage.items():
        frozen[name] = trainable[name] if name in trainable else place_weights(model, frozen[name], storage)
    for group in groups:
        group["params"] = [moved.get(id(p), p) for p in group["params"]]
    order = {id(p): i for i, p in enumerate(p for group in groups for p in group["params"])}
    for block in blocks:
        add_parameters(block, trainable, order)


def _step_plan(
    plan: Plan,
    blocks: Sequence[LiveBlock],
    chunks: tuple[ChunkPlan, ...],
    staging: Sequence[StagingBuffer],
    arrays: dict[torch.dtype, tuple[StateArray, ...]],
) -> StepPlan:
    state = max((state_nbytes(of) for of in arrays.values()), default=0)
    weight = max((block.weights.element_size() for block in blocks), default=0)
    gradient = max((block.gradients.element_size() for block in blocks), default=0)
    return StepPlan(
        blocks=len(blocks),
        chunks=chunks,
        buffers=len(staging),
        state_nbytes=state,
        weight_nbytes=weight,
        update_nbytes=2 * state + 2 * weight + gradient,
        overlap=plan.overlap,
    )
