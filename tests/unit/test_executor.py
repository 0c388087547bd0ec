"""The executor's waits and states, with work that takes as long as a test says."""

from __future__ import annotations

import threading

import pytest

from overspill.errors import OverspillError
from overspill.plan import Overlap
from overspill.schedule import ChunkPlan, Key, Kind, Lane, Op, StepPlan, build_step
from overspill.train.executor import Executor, SubmittedStep

CHUNK = ChunkPlan(block=0, index=0, start=0, stop=2048, resident=False)
PLAN = StepPlan(
    blocks=1,
    chunks=(CHUNK,),
    buffers=1,
    state_nbytes=10,
    weight_nbytes=2,
    update_nbytes=26,
    overlap=Overlap.STEP,
)
THREADS = {Lane.READ: 1, Lane.UPDATE: 1, Lane.WRITE: 1, Lane.COMMIT: 1}


def test_a_wait_that_takes_too_long_says_what_it_waited_for() -> None:
    release = threading.Event()

    def run(step: SubmittedStep[None], op: Op) -> None:
        if op.key.kind is Kind.READ:
            release.wait(30)

    executor: Executor[None] = Executor(run, threads=THREADS, wait_limit_seconds=0.3)
    try:
        step = executor.submit(1, build_step(PLAN, commits=False), None)
        with pytest.raises(OverspillError, match=r"OVS505.*waits for read\(0, 0\) of step 1.*running for more than"):
            executor.wait_all(step, Kind.READ, cause="disk_read")
    finally:
        release.set()
        executor.close()


def test_the_first_error_of_a_lane_is_the_one_that_every_wait_raises() -> None:
    def run(step: SubmittedStep[None], op: Op) -> None:
        raise ValueError(f"first of {op.key.kind}")

    executor: Executor[None] = Executor(run, threads=THREADS)
    try:
        step = executor.submit(1, build_step(PLAN, commits=True), None)
        for _ in range(2):
            with pytest.raises(OverspillError, match=r"OVS501.*first of read"):
                executor.wait_all(step, Kind.READ, cause="disk_read")
        with pytest.raises(OverspillError, match="OVS501"):
            executor.submit(2, build_step(PLAN, commits=True), None)
    finally:
        executor.close()


def test_a_pause_between_two_steps_is_no_fault_however_long() -> None:
    done: list[str] = []

    def run(step: SubmittedStep[None], op: Op) -> None:
        done.append(str(op.key))

    executor: Executor[None] = Executor(run, threads=THREADS, wait_limit_seconds=0.05)
    try:
        first = executor.submit(1, build_step(PLAN, commits=True), None)
        threading.Event().wait(0.5)  # the user thinks: the update waits for the norm
        executor.reach(first, Key(Kind.NORM), cause="update")
        second = executor.submit(2, build_step(PLAN, commits=True), None)
        threading.Event().wait(0.5)  # the commit waits for the boundary, the next update for both
        assert "commit()" not in done
        executor.pass_by(first, Key(Kind.BOUNDARY))
        executor.reach(second, Key(Kind.NORM), cause="update")
        executor.pass_by(second, Key(Kind.BOUNDARY))
        executor.wait_all(second, Kind.COMMIT, cause="commit")
        assert done.count("commit()") == 2
    finally:
        executor.close()
