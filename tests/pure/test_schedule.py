"""The schedule, run on the null tier: random orders that dependencies allow, with every invariant checked."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.plan import Overlap
from overspill.schedule import Key, Kind, Lane, Op, StepPlan, StepSchedule, build_step, plan_chunks

CHUNK = 2048


def step_plan(numels: list[int], resident: int, buffers: int, overlap: Overlap) -> StepPlan:
    return StepPlan(
        blocks=len(numels),
        chunks=plan_chunks([n * CHUNK for n in numels], chunk_numel=2 * CHUNK, resident_numel=resident * CHUNK),
        buffers=buffers,
        state_nbytes=10,
        weight_nbytes=2,
        update_nbytes=26,
        overlap=overlap,
    )


class NullTier:
    """Does operations on nothing, and checks at each one that it may be done now."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.version = {(c.block, c.index): 0 for c in plan.chunks}  # of the chunk's state, where it lives
        self.weights = dict(self.version)
        self.on_disk = dict(self.version)
        self.committed = 0
        self.buffers: dict[int, tuple[int, int] | None] = {}
        self.norm = 0
        self.writing_for_commit: set[tuple[int, int]] = set()

    def run(self, step: int, op: Op, commits: bool) -> None:
        here = (op.key.block, op.key.chunk)
        kind = op.key.kind
        if kind is Kind.READ:
            assert self.buffers.get(op.buffer) is None, "a buffer is filled while another chunk has it"
            assert self.on_disk[here] == step - 1, "the bytes read are not those of the step before"
            self.buffers[op.buffer] = here
        elif kind is Kind.UPDATE:
            assert self.norm == step, "an update ran before the norm was known"
            if op.buffer is not None:
                assert self.buffers[op.buffer] == here, "an update used a buffer that does not hold its chunk"
            assert self.version[here] == step - 1, "a chunk was updated twice, or a step was lost"
            assert here not in self.writing_for_commit, "state was changed before a commit had written it"
            self.version[here] = self.weights[here] = step
            if commits:
                self.writing_for_commit.add(here)
        elif kind is Kind.WRITE:
            assert self.version[here] == step
            self.on_disk[here] = step
            self.writing_for_commit.discard(here)
            if op.buffer is not None:
                assert self.buffers[op.buffer] == here
                self.buffers[op.buffer] = None
        elif kind is Kind.COMMIT:
            assert all(v == step for v in self.on_disk.values()), "a commit did not have every chunk"
            self.committed = step
        elif kind is Kind.FORWARD and self.plan.overlap is Overlap.FORWARD:
            mine = [v for (block, _), v in self.weights.items() if block == op.key.block]
            assert all(v == step - 1 for v in mine), "a block ran forward before its update was done"
        elif kind is Kind.NORM:
            assert all(v == step - 1 for v in self.version.values()), "gradients were reused before their update"
            self.norm = step
        held = [b for b, chunk in self.buffers.items() if chunk is not None]
        assert len(held) <= self.plan.buffers, "more staging buffers are in use than there are"


def run_in_some_order(plan: StepPlan, schedules: list[StepSchedule], seed: int) -> NullTier:
    """All steps at once, each lane in its order, the lanes in a random one, as the dependencies allow."""
    rng = random.Random(seed)
    tier = NullTier(plan)
    lanes: dict[Lane, list[tuple[int, Op]]] = {lane: [] for lane in Lane}
    for number, schedule in enumerate(schedules, start=1):
        for op in schedule.ops:
            lanes[op.lane].append((number, op))
    keys = [{op.key for op in schedule.ops} for schedule in schedules]
    done: set[tuple[int, Key]] = set()

    def ready(number: int, op: Op) -> bool:
        previous_overlaps_step = plan.overlap is Overlap.STEP and op.lane is Lane.COMPUTE and number > 1
        if previous_overlaps_step and not all(
            (number - 1, k) in done for k in keys[number - 2] if k.kind is Kind.UPDATE
        ):
            return False  # step() returned only then
        if not all((number, key) in done for key in op.after):
            return False
        if number == 1:
            return True
        return all((number - 1, key) in done for key in op.after_previous if key in keys[number - 2])

    while any(lanes.values()):
        heads = [lane for lane, ops in lanes.items() if ops and ready(*ops[0])]
        assert heads, f"deadlock: {[str(ops[0][1].key) for ops in lanes.values() if ops]}"
        number, op = lanes[rng.choice(heads)].pop(0)
        tier.run(number, op, schedules[number - 1].commits)
        done.add((number, op.key))
    return tier


@given(
    numels=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    resident=st.integers(0, 20),
    buffers=st.integers(1, 5),
    overlap=st.sampled_from(Overlap),
    commits=st.lists(st.booleans(), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_every_order_the_dependencies_allow_keeps_the_invariants(
    numels: list[int], resident: int, buffers: int, overlap: Overlap, commits: list[bool], seed: int
) -> None:
    plan = step_plan(numels, resident, buffers, overlap)
    schedules = [build_step(plan, commits=c) for c in commits]
    tier = run_in_some_order(plan, schedules, seed)
    last = len(commits)
    assert set(tier.version.values()) == {last}
    assert tier.committed == max((i for i, c in enumerate(commits, start=1) if c), default=0)
    if not commits[-1]:
        staged = {(c.block, c.index) for c in plan.staged}
        assert all(v == last for here, v in tier.on_disk.items() if here in staged)


@given(
    numels=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    chunk=st.integers(1, 4),
    resident=st.integers(0, 60),
)
def test_chunks_cover_every_block_and_resident_ones_fit(numels: list[int], chunk: int, resident: int) -> None:
    chunks = plan_chunks([n * CHUNK for n in numels], chunk_numel=chunk * CHUNK, resident_numel=resident * CHUNK)
    for block, numel in enumerate(numels):
        mine = [c for c in chunks if c.block == block]
        assert [c.index for c in mine] == list(range(len(mine)))
        assert mine[0].start == 0
        assert mine[-1].stop == numel * CHUNK
        assert all(a.stop == b.start for a, b in itertools.pairwise(mine))
    stays = [c for c in chunks if c.resident]
    assert sum(c.numel for c in stays) <= resident * CHUNK
    assert chunks[: len(stays)] == tuple(stays), "chunks that stay are the earliest in forward order"


NEEDED = [
    (Kind.READ, "after", Kind.WRITE),
    (Kind.READ, "after_previous", Kind.WRITE),
    (Kind.UPDATE, "after", Kind.NORM),
    (Kind.UPDATE, "after", Kind.READ),
    (Kind.UPDATE, "after_previous", Kind.COMMIT),
    (Kind.WRITE, "after", Kind.UPDATE),
    (Kind.FORWARD, "after_previous", Kind.UPDATE),
    (Kind.COMMIT, "after", Kind.WRITE),
]


@pytest.mark.parametrize(("kind", "where", "needs"), NEEDED)
def test_leaving_out_a_kind_of_dependency_breaks_an_invariant(kind: Kind, where: str, needs: Kind) -> None:
    plan = step_plan([3, 4, 2], resident=2, buffers=2, overlap=Overlap.FORWARD)
    good = [build_step(plan, commits=c) for c in (True, False, True, True)]

    def without(op: Op) -> Op:
        if op.key.kind is not kind:
            return op
        return dataclasses.replace(op, **{where: tuple(k for k in getattr(op, where) if k.kind is not needs)})

    mutated = [StepSchedule(tuple(without(op) for op in s.ops), s.buffers, s.commits) for s in good]
    assert mutated != good
    assert any(_fails(plan, mutated, seed) for seed in range(200))


def _fails(plan: StepPlan, schedules: list[StepSchedule], seed: int) -> bool:
    try:
        run_in_some_order(plan, schedules, seed)
    except AssertionError as error:
        return "deadlock" not in str(error)
    return False
