"""Live blocks: the tensors behind a model's blocks, as views of the host pool.

A live block owns flat memory for its weights and gradients, and for the optimizer state of the chunks that stay in
DRAM; parameters and ``p.grad`` are views of it. The indirection block -> storage is all that the rest of training
sees, so that where the memory is can change without them. Nothing here decides a placement or moves a byte in time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from overspill.errors import OverspillError
from overspill.model import Block, BlockParameter
from overspill.plan import StateClass
from overspill.schedule import ChunkPlan
from overspill.tiers.host import Allocation, HostPool
from overspill.train.arrays import StateArray, state_nbytes

__all__ = ["LiveBlock", "LiveParameter", "StagingBuffer", "as_tensor", "place_weights", "same_bytes", "weight_of"]

_COMPARED_NBYTES = 1024 * 1024


def as_tensor(allocation: Allocation, dtype: torch.dtype, numel: int, *, offset_nbytes: int = 0) -> torch.Tensor:
    """A flat tensor over part of an allocation; it keeps the memory alive."""
    return torch.frombuffer(allocation.buffer, dtype=dtype, count=numel, offset=offset_nbytes)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat contiguous CPU tensor, writable."""
    return memoryview(tensor.view(torch.uint8).numpy().data)


def same_bytes(array: np.ndarray[Any, Any], tensor: torch.Tensor) -> bool:
    """Whether both hold the same bits; compared in pieces, since a comparison takes memory of its own."""
    ours = array.reshape(-1).view(np.uint8)
    theirs = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if ours.nbytes != theirs.nbytes:
        return False
    starts = range(0, ours.nbytes, _COMPARED_NBYTES)
    return all(np.array_equal(ours[i : i + _COMPARED_NBYTES], theirs[i : i + _COMPARED_NBYTES]) for i in starts)


@dataclass(eq=False)
class LiveParameter:
    """One trainable parameter: the module's own object, and its places in its block.

    ``on_device``: the parameter lives on an accelerator; ``weight`` is then the host's copy of it.
    ``version``: the parameter's version counter after our last own change; another value means an edit by the user.
    """

    parameter: nn.Parameter
    place: BlockParameter
    block: LiveBlock
    index: int  # within the block
    order: int  # within the optimizer: norms are added up in this order
    weight: torch.Tensor
    gradient: torch.Tensor
    on_device: bool
    version: int = 0
    steps: int = 0
    resync: bool = True


@dataclass(eq=False)
class LiveBlock:
    """One block's memory.

    weights, gradients: flat, ``layout.numel`` elements. arrays: what the optimizer keeps per element.
    resident: those arrays for the chunks that stay in DRAM, which are the first ``resident_numel`` elements.
    touched: the step being executed updates the block. on_disk: chunks whose state the store holds; others are zero.
    dirty: memory is newer than what the store's working version holds.
    """

    layout: Block
    dtype: torch.dtype
    weights: torch.Tensor
    gradients: torch.Tensor
    arrays: tuple[StateArray, ...]
    resident_numel: int
    resident: dict[str, torch.Tensor]
    chunks: list[ChunkPlan] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    parameters: list[LiveParameter] = field(default_factory=list)
    touched: bool = False
    weights_dirty: bool = True
    resident_dirty: bool = False  # all state is zero before the first update, and a slot never written reads as zero
    on_disk: set[int] = field(default_factory=set)

    @property
    def index(self) -> int:
        return self.layout.index

    def slot_name(self, array: str) -> str:
        return f"b{self.index:05d}.{array}"


@dataclass(eq=False)
class StagingBuffer:
    """Room for one chunk's state arrays, through which disk state passes."""

    arrays: dict[str, torch.Tensor]

    @classmethod
    def allocate(cls, pool: HostPool, arrays: Sequence[StateArray], chunk_numel: int, index: int) -> StagingBuffer:
        allocation = pool.allocate(state_nbytes(arrays) * chunk_numel, StateClass.STAGING, f"staging buffer {index}")
        tensors, offset = {}, 0
        for array in arrays:
            tensors[array.name] = as_tensor(allocation, array.dtype, chunk_numel, offset_nbytes=offset)
            offset += array.item_nbytes * chunk_numel
        return cls(tensors)


def weight_of(block: LiveBlock, place: BlockParameter) -> torch.Tensor:
    """A parameter's part of its block, as a tensor whose storage is that part alone.

    Parameters that are views of one storage look shared to what saves a model: save_pretrained then copies them all.
    """
    part = block.weights[place.offset : place.offset + place.numel]
    return torch.from_numpy(part.view(torch.uint8).numpy()).view(part.dtype).view(place.shape)


def build_live_block(
    pool: HostPool,
    layout: Block,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    arrays: tuple[StateArray, ...],
    chunks: list[ChunkPlan],
) -> LiveBlock:
    """Allocate a block's memory. Raises OverspillError OVS301 when the budget does not hold it."""
    for kind, where in ((dtype, "weights"), (grad_dtype, "gradients")):
        if kind not in (torch.float32, torch.bfloat16):
            raise OverspillError(
                "OVS206",
                f"{where} of {layout.name} are {kind}.",
                field=layout.parameters[0].name,
                value=str(kind),
                limit="bf16 or fp32",
            )
    numel = layout.numel
    resident_numel = sum(chunk.numel for chunk in chunks if chunk.resident)
    taken: list[Allocation] = []

    def take(dtype: torch.dtype, numel: int, state_class: StateClass, name: str) -> torch.Tensor:
        taken.append(pool.allocate(numel * dtype.itemsize, state_class, f"{name} of {layout.name}"))
        return as_tensor(taken[-1], dtype, numel)

    try:
        weights = take(dtype, numel, StateClass.WEIGHTS, "weights")
        gradients = take(grad_dtype, numel, StateClass.GRADIENTS, "gradients")
        resident = {a.name: take(a.dtype, resident_numel, a.state_class, a.name) for a in arrays if resident_numel}
    except OverspillError:
        for allocation in taken:
            pool.free(allocation)
        raise
    return LiveBlock(
        layout=layout,
        dtype=dtype,
        weights=weights,
        gradients=gradients,
        arrays=arrays,
        resident_numel=resident_numel,
        resident=resident,
        chunks=chunks,
        allocations=taken,
    )


def add_parameters(
    block: LiveBlock, parameter_by_name: dict[str, nn.Parameter], order_by_id: dict[int, int]
) -> list[LiveParameter]:
    """Make the views of a block's parameters. The parameters themselves are moved by place_weights."""
    for index, place in enumerate(block.layout.parameters):
        parameter = parameter_by_name[place.name]
        stop = place.offset + place.numel
        block.parameters.append(
            LiveParameter(
                parameter=parameter,
                place=place,
                block=block,
                index=index,
                order=order_by_id[id(parameter)],
                weight=weight_of(block, place),
                gradient=block.gradients[place.offset : stop].view(place.shape),
                on_device=parameter.device.type not in ("cpu", "meta"),
            )
        )
    return block.parameters


def place_weights(module: nn.Module, parameter: nn.Parameter, storage: torch.Tensor) -> nn.Parameter:
    """Let a parameter live in ``storage``, which takes its values; returns the parameter that the module now has.

    A parameter on the CPU keeps its identity. One on meta cannot (torch refuses to change the device behind it), so
    it is replaced in every module that owns it, tied ones included.
    """
    with torch.no_grad():
        if parameter.device.type == "cpu":
            storage.copy_(parameter.data)
            parameter.data = storage
            return parameter
        if parameter.device.type != "meta":
            storage.copy_(parameter.data)
            return parameter
        # .data has a version counter of its own; views of one block would share theirs, and an edit of one parameter
        # would look like an edit of all (see Session._adopt_weights).
        fresh = nn.Parameter(storage.data, requires_grad=parameter.requires_grad)
        fresh.__dict__.update(parameter.__dict__)
        for owner in module.modules():
            for name, held in owner._parameters.items():
                if held is parameter:
                    owner._parameters[name] = fresh
        return fresh


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter once, under its first owner's name, in the module's order."""
    return dict(module.named_parameters())


def refuse_unsupported(module: nn.Module) -> None:
    """Raises OverspillError OVS504 for models whose parameters another system moves.

    accelerate's hooks move weights in every forward, so nobody else can say where a parameter is; such a model also
    cannot be trained in parallel (huggingface/transformers#31557).
    """
    advice = "Load the model without device_map and without offload, and let Overspill place it."
    device_map: Any = getattr(module, "hf_device_map", None)
    if isinstance(device_map, dict) and len(set(device_map.values())) > 1:
        raise OverspillError(
            "OVS504",
            "The model is spread over devices by device_map, whose hooks move weights for inference only.",
            field="device_map",
            value=str(sorted({str(device) for device in device_map.values()})),
            next_step=advice,
        )
    for name, part in module.named_modules():
        if hasattr(part, "_hf_hook"):
            raise OverspillError(
                "OVS504",
                f"accelerate has put a {type(part._hf_hook).__name__} on this module, which moves its weights.",
                field=name or "the model",
                next_step=advice,
            )
    for name, parameter in module.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise OverspillError(
                "OVS504",
                "The parameter is a DTensor shard; sharded models are not supported yet.",
                field=name,
                next_step="Attach before fully_shard, or train on one rank.",
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise OverspillError("OVS206", "Only floating-point parameters can be trained.", field=name)
    _refuse_shared_memory(named_parameters(module))


def _refuse_shared_memory(parameters: dict[str, nn.Parameter]) -> None:
    """Two Parameters over the same memory (tied through ``.data``) would be untied by moving each into the pool."""
    extents = []
    for name, parameter in parameters.items():
        if parameter.device.type != "meta" and parameter.numel() > 0:
            last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            start = parameter.data_ptr()
            extents.append((parameter.device.type, start, start + (last + 1) * parameter.element_size(), name))
    extents.sort()
    for (device, _, stop, name), (next_device, start, _, next_name) in itertools.pairwise(extents):
        if device == next_device and start < stop:
            raise OverspillError(
                "OVS504",
                f"Two parameters share memory: {name} and {next_name}.",
                field=next_name,
                next_step="Tie them by assigning one Parameter to both modules (`head.weight = embed.weight`).",
            )
