"""The work of one step on the lanes: read, update and write a chunk. Called by the executor, on its threads.

A lane's function looks up what the schedule's operation means in tensors and slots; it takes no decision. What the
user's thread decided for the step (which parameters have a gradient, learning rates, clip factor) is in StepWork,
filled before the step's NORM is reached and not changed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from overspill import _native
from overspill.optim.kernels import RESYNC, SCALARS_PER_ROW, SKIP, OptimizerKernel
from overspill.schedule import ChunkPlan, Key, Op
from overspill.tiers.disk import DiskStore
from overspill.train.arrays import MASTER
from overspill.train.live import LiveBlock, LiveParameter, StagingBuffer, as_bytes
from overspill.train.transfer import DeviceLink

__all__ = ["ChunkWorker", "StepWork"]


@dataclass(eq=False)
class StepWork:
    """What the user's thread decided for one step, and the snapshot that belongs to it.

    flags, scalars: one row per parameter, by block. void: the step is not taken; its operations pass through without
    effect, so that the lanes become idle. complete: whether ``extra`` holds RNG, schedules and data position, or
    weights and optimizer only; None: not taken yet. written_out: blocks whose newest state the commit finds on disk.
    """

    number: int
    commits: bool
    void: bool = False
    touched: frozenset[int] = frozenset()
    flags: dict[int, np.ndarray] = field(default_factory=dict)
    scalars: dict[int, np.ndarray] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    complete: bool | None = None
    written_out: set[int] = field(default_factory=set)

    def fill(
        self,
        blocks: Sequence[LiveBlock],
        present: Sequence[LiveParameter],
        groups: Sequence[dict[str, Any]],
        kernel: OptimizerKernel,
        grad_scale: float,
    ) -> None:
        """Fix flags and scalars for the parameters that have a gradient, and count their step.

        Learning rates and all other scalars are read from the groups here and now; what a scheduler does afterwards
        belongs to the next step.
        """
        self.touched = frozenset(live.block.index for live in present)
        for block in blocks:
            if block.index in self.touched:
                self.flags[block.index] = np.full(len(block.parameters), SKIP, dtype=np.int64)
                self.scalars[block.index] = np.zeros((len(block.parameters), SCALARS_PER_ROW), dtype=np.float64)
        group_of = {id(parameter): group for group in groups for parameter in group["params"]}
        rows: dict[tuple[int, int], tuple[float, ...]] = {}
        for live in present:  # first all that can fail, a wrong value in a group; only then does a step count
            group = group_of[id(live.parameter)]
            key = (id(group), live.steps + 1)
            if key not in rows:
                rows[key] = kernel.scalars_row(group, live.steps + 1, grad_scale)
        for live in present:
            live.steps += 1
            key = (id(group_of[id(live.parameter)]), live.steps)
            self.scalars[live.block.index][live.index] = rows[key]
            self.flags[live.block.index][live.index] = RESYNC if live.resync else 0
            live.resync = False


class ChunkWorker:
    """Does READ, UPDATE and WRITE of one chunk.

    Counters of bytes are kept per tier; they are what the reports show, and are tested against /proc/self/io.
    """

    def __init__(
        self,
        *,
        blocks: Sequence[LiveBlock],
        kernel: OptimizerKernel,
        staging: Sequence[StagingBuffer],
        store: DiskStore | None,
        link: DeviceLink | None,
        pool: _native.ThreadPool,
    ) -> None:
        self._blocks = blocks
        self._kernel = kernel
        self._staging = staging
        self._store = store
        self._link = link
        self._pool = pool
        self._chunks: dict[tuple[int, int], ChunkPlan] = {}
        self._segments: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        for block in blocks:
            for chunk in block.chunks:
                self._chunks[chunk.block, chunk.index] = chunk
                self._segments[chunk.block, chunk.index] = _segments(block, chunk)
        self._last_chunk = {block.index: block.chunks[-1].index for block in blocks if block.chunks}

    def read(self, op: Op) -> None:
        """Fill a staging buffer with the chunk's state, as the step before left it."""
        block, chunk = self._find(op.key)
        assert self._store is not None and op.buffer is not None
        for name, array in self._state_of(op, block, chunk).items():
            if chunk.index not in block.on_disk:
                array.zero_()  # before its first step all state is zero
                continue
            self._store.read_into(block.slot_name(name), chunk.start * array.element_size(), as_bytes(array))

    def update(self, op: Op, work: StepWork) -> None:
        """Run the optimizer's kernel over the chunk, in place."""
        block, chunk = self._find(op.key)
        if block.index not in work.touched:
            return
        if self._link is not None and chunk.index == 0:
            self._link.wait_fetched(block.index)
            self._link.wait_stored(block.index)
        template, index = self._segments[chunk.block, chunk.index]
        segments = template.copy()
        segments[:, 2] = work.flags[block.index][index]
        states = self._state_of(op, block, chunk)
        self._kernel.apply(
            weights=block.weights[chunk.start : chunk.stop],
            grads=block.gradients[chunk.start : chunk.stop],
            master=states.pop(MASTER, None),
            states=states,
            segments=segments,
            scalars=work.scalars[block.index][index],
            pool=self._pool,
        )
        if self._link is not None and chunk.index == self._last_chunk[block.index]:
            pairs = [(p.weight, p.parameter.data) for p in block.parameters if p.on_device]
            self._link.store(pairs, block.index)

    def write(self, op: Op, work: StepWork) -> None:
        """Write what is newer in memory than in the store's working version."""
        if work.void:
            return
        block, chunk = self._find(op.key)
        touched = block.index in work.touched
        if not chunk.resident and touched:
            self._write(block, chunk, self._state_of(op, block, chunk), checksum=work.commits)
            block.on_disk.add(chunk.index)
        if work.commits:
            self.write_out(block, chunk, checksum=True)
            work.written_out.add(block.index)

    def write_out(self, block: LiveBlock, chunk: ChunkPlan, *, checksum: bool) -> None:
        """Write the chunk's weights, and its state where that stays in memory, if they changed since."""
        if chunk.resident and block.resident_dirty:
            arrays = {name: array[chunk.start : chunk.stop] for name, array in block.resident.items()}
            self._write(block, chunk, arrays, checksum=checksum)
        if block.weights_dirty:
            self._write(block, chunk, {"weights": block.weights[chunk.start : chunk.stop]}, checksum=checksum)

    def _write(self, block: LiveBlock, chunk: ChunkPlan, arrays: dict[str, torch.Tensor], *, checksum: bool) -> None:
        assert self._store is not None
        for name, array in arrays.items():
            self._store.write_from(
                block.slot_name(name), chunk.start * array.element_size(), as_bytes(array), checksum=checksum
            )

    def _state_of(self, op: Op, block: LiveBlock, chunk: ChunkPlan) -> dict[str, torch.Tensor]:
        if chunk.resident:
            return {name: array[chunk.start : chunk.stop] for name, array in block.resident.items()}
        assert op.buffer is not None
        staged = self._staging[op.buffer].arrays
        return {array.name: staged[array.name][: chunk.numel] for array in block.arrays}

    def _find(self, key: Key) -> tuple[LiveBlock, ChunkPlan]:
        return self._blocks[key.block], self._chunks[key.block, key.chunk]


def _segments(block: LiveBlock, chunk: ChunkPlan) -> tuple[np.ndarray, np.ndarray]:
    """The parameters that lie in a chunk: [start, stop, 0] within it, and their rows in the block's tables."""
    rows: list[tuple[int, int, int]] = []
    index: list[int] = []
    for live in block.parameters:
        start = max(live.place.offset, chunk.start)
        stop = min(live.place.offset + live.place.numel, chunk.stop)
        if start < stop:
            rows.append((start - chunk.start, stop - chunk.start, 0))
            index.append(live.index)
    return np.array(rows, dtype=np.int64).reshape(-1, 3), np.array(index, dtype=np.int64)
