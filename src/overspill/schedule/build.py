"""From blocks and a plan to the operations of one step.

[Note: Order of updates] Blocks are updated in forward order, since the next forward needs the first block first;
with ``overlap = forward`` the update of block k hides behind the forward of the blocks before it, with
``overlap = step`` all updates are done when ``step()`` returns. The chunks that stay in DRAM are the earliest in
that order: their update cannot hide behind anything. For a cyclic order a fixed set is as good as Belady's optimum.

[Note: Buffers] Staged chunk j uses staging buffer j mod n, in every step, so that which operation frees a buffer
is known when the schedule is built: the READ into it comes after the WRITE of the chunk that had it before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overspill.plan import Overlap
from overspill.schedule.ops import Key, Kind, Op, StepSchedule

__all__ = ["ChunkPlan", "StepPlan", "build_step", "plan_chunks"]


@dataclass(frozen=True)
class ChunkPlan:
    """Elements [start, stop) of a block, which are read, updated and written as one."""

    block: int
    index: int
    start: int
    stop: int
    resident: bool

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class StepPlan:
    """What build_step needs to know of a model and a plan.

    chunks: in update order. state_nbytes, weight_nbytes: per element, what a chunk's state (master or residual,
    moments) and its published weights take on disk. update_nbytes: DRAM traffic of the kernel per element.
    """

    blocks: int
    chunks: tuple[ChunkPlan, ...]
    buffers: int
    state_nbytes: int
    weight_nbytes: int
    update_nbytes: int
    overlap: Overlap

    @property
    def staged(self) -> tuple[ChunkPlan, ...]:
        return tuple(chunk for chunk in self.chunks if not chunk.resident)


def plan_chunks(block_numels: Sequence[int], *, chunk_numel: int, resident_numel: int) -> tuple[ChunkPlan, ...]:
    """Cut blocks into chunks, the first ``resident_numel`` elements in forward order staying in DRAM.

    A chunk is resident only if it fits there whole, so that the budget holds.
    """
    assert chunk_numel > 0 and chunk_numel % 2048 == 0
    chunks: list[ChunkPlan] = []
    left = resident_numel
    for block, numel in enumerate(block_numels):
        for index, start in enumerate(range(0, numel, chunk_numel)):
            stop = min(start + chunk_numel, numel)
            resident = stop - start <= left
            left = left - (stop - start) if resident else 0
            chunks.append(ChunkPlan(block=block, index=index, start=start, stop=stop, resident=resident))
    return tuple(chunks)


def build_step(plan: StepPlan, *, commits: bool) -> StepSchedule:
    """The operations of one optimizer step.

    commits: the step is made durable, so chunks that stay in DRAM and the weights are written too.
    """
    staged = plan.staged
    buffers = min(plan.buffers, len(staged))
    assert buffers > 0 or not staged, "chunks on disk need at least one staging buffer"
    slot_of = {(chunk.block, chunk.index): j for j, chunk in enumerate(staged)}

    last_chunk: dict[int, Key] = {}
    for chunk in plan.chunks:
        last_chunk[chunk.block] = Key(Kind.UPDATE, chunk.block, chunk.index)

    ops: list[Op] = []
    previous_compute: Key | None = None

    def compute(kind: Kind, block: int, after_previous: tuple[Key, ...] = ()) -> None:
        nonlocal previous_compute
        key = Key(kind, block)
        ops.append(
            Op(key, after=(previous_compute,) if previous_compute else (), after_previous=after_previous),
        )
        previous_compute = key

    for block in range(plan.blocks):
        waits = plan.overlap is Overlap.FORWARD and block in last_chunk
        compute(Kind.FORWARD, block, (last_chunk[block],) if waits else ())
    for block in reversed(range(plan.blocks)):
        compute(Kind.BACKWARD, block)
    norm = Key(Kind.NORM)
    # Every update of the step before is done by then, also of blocks that did not run forward: the memory of its
    # gradients is about to be used again.
    ops.append(
        Op(norm, after=(previous_compute,) if previous_compute else (), after_previous=tuple(last_chunk.values()))
    )

    for chunk in plan.chunks:
        here = (chunk.block, chunk.index)
        update = Key(Kind.UPDATE, *here)
        write = Key(Kind.WRITE, *here)
        buffer = None
        needs: list[Key] = [norm]
        if not chunk.resident:
            j = slot_of[here]
            buffer = j % buffers
            read = Key(Kind.READ, *here)
            # What has this buffer before: an earlier chunk of this step, or the last one of the step before.
            frees: tuple[Key, ...] = ()
            frees_previous: tuple[Key, ...] = ()
            if j >= buffers:
                frees = (Key(Kind.WRITE, staged[j - buffers].block, staged[j - buffers].index),)
            else:
                last = j + (len(staged) - 1 - j) // buffers * buffers
                frees_previous = (Key(Kind.WRITE, staged[last].block, staged[last].index),)
            # The bytes to read are those that the step before wrote.
            ops.append(
                Op(
                    read,
                    nbytes=chunk.numel * plan.state_nbytes,
                    buffer=buffer,
                    after=frees,
                    after_previous=(*frees_previous, write),
                )
            )
            needs.append(read)
        # A commit of the step before reads state and weights as that step left them, and nothing of this step may
        # reach the store before it has decided.
        ops.append(
            Op(
                update,
                nbytes=chunk.numel * plan.update_nbytes,
                buffer=buffer,
                after=tuple(needs),
                after_previous=(Key(Kind.COMMIT),),
            )
        )
        nbytes = chunk.numel * (plan.weight_nbytes if commits else 0)
        if commits or not chunk.resident:
            nbytes += chunk.numel * plan.state_nbytes
            ops.append(Op(write, nbytes=nbytes, buffer=buffer, after=(update,)))
    if commits:
        writes = tuple(op.key for op in ops if op.key.kind is Kind.WRITE)
        boundary = Key(Kind.BOUNDARY)
        ops.append(Op(boundary, after=(norm,)))
        ops.append(Op(Key(Kind.COMMIT), after=(boundary, *writes)))
    return StepSchedule(ops=tuple(ops), buffers=buffers, commits=commits)
