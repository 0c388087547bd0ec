"""SIGKILL at any instant loses at most what the plan says, and the run ends with the bits of an undisturbed one.

The quick tests kill at a few instants; ``make campaign-crash`` draws 100 and prints where they fell.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.crash_cases import (
    CASES,
    FINISHED,
    SAVE_EVERY,
    STEPS,
    Case,
    Kills,
    Result,
    Run,
    Worker,
    make_inputs,
)

CAMPAIGN_KILLS = 100


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("crash")
    make_inputs(folder)
    worker = Worker(folder)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def undisturbed(worker: Worker) -> Result:
    run = Run(worker, worker.folder / "undisturbed", Case("host", "step", "checkpoint"))
    run.finish()
    return run.result()


@pytest.fixture
def begin(worker: Worker, tmp_path: Path) -> Iterator[list[Run]]:
    """Runs that a test made; workers that a killed run left behind end with the test."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.clean_up()


def _new(runs: list[Run], worker: Worker, folder: Path, case: Case) -> Run:
    runs.append(Run(worker, folder / f"run{len(runs)}", case))
    return runs[-1]


@pytest.mark.parametrize(
    ("case", "kills"),
    [
        (Case("disk", "forward", "step"), (4, 13)),
        (Case("mixed", "step", "N"), (9, 10)),
        (Case("host", "forward", "checkpoint"), (14,)),
    ],
)
def test_a_killed_training_goes_on_and_ends_with_the_bits_of_an_undisturbed_one(
    worker: Worker, undisturbed: Result, tmp_path: Path, begin: list[Run], case: Case, kills: tuple[int, ...]
) -> None:
    run = _new(begin, worker, tmp_path, case)
    draw = random.Random(str(case))
    for index, step in enumerate(kills):
        # The second kill leaves the data workers alive: they must not keep the run's lock.
        assert run.kill_at(step, everyone=index == 0, draw=draw) == "train"
    run.finish()
    assert run.result() == undisturbed


def test_kills_while_it_starts_and_while_it_resumes_lose_nothing(
    worker: Worker, undisturbed: Result, tmp_path: Path, begin: list[Run]
) -> None:
    run = _new(begin, worker, tmp_path, Case("mixed", "forward", "step"))
    # In a start, in a training and in a resume of any speed; whatever the instant, nothing may be lost.
    for seconds in (0.02, 0.05, 0.1, 0.2):
        assert run.kill_at(seconds) in ("begin", "train")
    assert run.kill_at(SAVE_EVERY + 1) == "train"
    for seconds in (0.05, 0.1, 0.2):
        assert run.kill_at(seconds) in ("begin", "train")
    run.finish()
    assert run.result() == undisturbed


def test_kills_with_state_on_two_disks_leave_no_orphans_and_lose_nothing(
    worker: Worker, undisturbed: Result, tmp_path: Path, begin: list[Run]
) -> None:
    disks = [tmp_path / "disk0", tmp_path / "disk1"]
    run = _new(begin, worker, tmp_path, Case("disk", "forward", "N", directories=tuple(map(str, disks))))
    for label in ("new-directory", "slot-names", "manifest", "commit"):
        assert _die_in_a_row(run, [(label, 1, False)], finish=False) == [label]
    run.kill_at(SAVE_EVERY + 2)
    run.finish()
    assert run.result() == undisturbed
    for disk in disks:
        assert len(list(disk.iterdir())) == 1, "what a killed start had made there was taken back"
        assert len(list(next(disk.iterdir()).glob("slots/*"))) > 0


DECIDING = [
    (label, count, after)
    for label, count in (
        ("slot-data", 17),
        ("manifest", 4),
        ("prepared-name", 5),
        ("commit", 6),
        ("committed-name", 7),
        ("pin-manifest", 1),
        ("pin-links", 1),
        ("pin", 1),
        ("pin-name", 1),
        ("unpin", 1),
        ("unpin-name", 1),
    )
    for after in (False, True)
]


def _die_in_a_row(run: Run, instants: list[tuple[str, int, bool]], *, finish: bool = True) -> list[str]:
    """Kill a run at each instant in turn, then let it finish; gives the instants that were reached."""
    reached = []
    for label, count, after in instants:
        before = run.step()
        run.begin(die={"label": label, "count": count, "after": after})
        if run.end(before) == FINISHED:
            break
        reached.append(label)
    else:
        if finish:
            run.finish()
    return reached


def test_kills_while_a_commit_or_a_checkpoint_is_being_decided_leave_the_one_or_the_other(
    worker: Worker, undisturbed: Result, tmp_path: Path, begin: list[Run]
) -> None:
    run = _new(begin, worker, tmp_path, Case("disk", "forward", "step"))
    instants = [("commit", 3, False), ("commit", 3, True), ("pin", 1, True), ("slot-data", 17, False)]
    assert len(_die_in_a_row(run, instants)) == len(instants)
    assert run.result() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["step", "N", "checkpoint"])
@pytest.mark.parametrize("instant", DECIDING, ids=lambda instant: f"{instant[0]}-{'after' if instant[2] else 'before'}")
def test_a_kill_at_each_sync_and_rename_of_commit_and_checkpoint_crash_campaign(
    worker: Worker,
    undisturbed: Result,
    tmp_path: Path,
    begin: list[Run],
    instant: tuple[str, int, bool],
    durability: str,
) -> None:
    run = _new(begin, worker, tmp_path, Case("mixed", "forward", durability))
    label, count, after = instant
    assert _die_in_a_row(run, [(label, 1 if durability != "step" else count, after)]) == [label]
    assert run.result() == undisturbed


def test_a_kill_of_the_last_step_before_its_checkpoint_is_made_up_for_by_the_resume(
    worker: Worker, undisturbed: Result, tmp_path: Path, begin: list[Run]
) -> None:
    run = _new(begin, worker, tmp_path, Case("disk", "forward", "step"))
    # Checkpoints are made at steps 6, 12, 18 and 20: the fourth never gets its name, while step 20 is committed.
    assert _die_in_a_row(run, [("pin", 4, False)]) == ["pin"]
    assert run.committed >= STEPS - 1
    assert run.result() == undisturbed


def test_a_killed_export_leaves_no_model_behind_and_a_second_one_is_whole(
    worker: Worker, undisturbed: Result, tmp_path: Path, begin: list[Run]
) -> None:
    run = _new(begin, worker, tmp_path, Case("disk", "step", "checkpoint"))
    run.finish()
    wanted = tmp_path / "wanted"
    run.export(wanted)
    files = {file.name: file.read_bytes() for file in wanted.iterdir()}
    killed = 0
    for number in range(4):
        out = tmp_path / f"export{number}"
        killed += run.kill_export(out, 0.03 * (number + 1))
        if not out.exists():  # killed before the rename that gives it its name
            run.export(out)
        assert {file.name: file.read_bytes() for file in out.iterdir()} == files
    assert killed
    assert run.result() == undisturbed


@pytest.mark.slow
def test_a_hundred_kills_at_random_instants_change_no_bit_crash_campaign(
    worker: Worker, undisturbed: Result, tmp_path: Path, begin: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(2026)
    kills, runs = Kills(), 0
    while kills.total < CAMPAIGN_KILLS:
        run = _new(begin, worker, tmp_path, CASES[runs % len(CASES)])
        runs += 1
        for _ in range(draw.randint(4, 9)):  # several in a row, in starts and resumes as well as in training
            # Half are drawn over the whole life of a process, half over its steps, where most of a run's time goes.
            when = draw.random() * 3.0 if draw.random() < 0.5 else min(run.step() + draw.randint(1, 6), STEPS - 1)
            phase = run.kill_at(when, everyone=draw.random() < 0.7, draw=draw)
            if phase == "finished":
                break
            kills.count(f"{phase}, {run.case.placement}, {run.case.durability}")
        else:
            run.finish()
        assert run.result() == undisturbed, f"{run.case}, after {kills.total} kills"
        run.clean_up()
    with capsys.disabled():
        print(f"\n{kills.total} kills in {runs} runs, each run bit-identical to the undisturbed one")
        for phase, count in sorted(kills.by_phase.items()):
            print(f"  {phase}: {count}")
