"""The run directory: who it belongs to, what may be resumed, and that nothing foreign is ever deleted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from overspill.checkpoint import (
    RunDirectory,
    RunIdentity,
    RunSummary,
    applied_settings,
    find_runs,
    new_run_path,
    number_settings,
    refuse_fixed_settings,
)
from overspill.checkpoint.run_directory import job_text
from overspill.errors import OverspillError
from overspill.job import Job, read_job
from overspill.job.runs import forecast_only


def _job(model: str = "/m", **train: object) -> Job:
    return Job.read({"model": {"path": model}, "data": {"path": ["/d.txt"]}, "train": {"steps": 10, **train}})


def _identity(threads: int = 2) -> RunIdentity:
    return RunIdentity.fresh(model="/m", model_digest="d", numel=3, torch="2.13.0", simd="x86-64-v3", threads=threads)


def _made(path: Path) -> RunDirectory:
    run = RunDirectory(path).create(_job())
    run.write_identity(_identity())
    return run


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": {"max_grad_norm": 0}}, {"plan": {"memory": "7GiB", "at_risk": "2h", "durability": "step"}}],
)
def test_the_copied_job_reads_back_as_the_same_job(tmp_path: Path, changes: dict[str, object]) -> None:
    job = Job.read({**_job().model_dump(), **changes})
    file = tmp_path / "job.toml"
    file.write_text(job_text(job))
    assert read_job(file) == job


def test_a_run_comes_back_as_it_was_made(tmp_path: Path) -> None:
    run = _made(tmp_path / "r")
    again = RunDirectory.open(tmp_path / "r")
    assert again.job() == _job()
    assert again.identity() == run.identity()
    assert find_runs(tmp_path)[0].path == run.path


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    _made(tmp_path / "r")
    with pytest.raises(OverspillError, match=r"OVS604.*overspill resume"):
        RunDirectory(tmp_path / "r").create(_job())


def test_a_run_directory_of_another_model_is_refused_with_both_names(tmp_path: Path) -> None:
    _made(tmp_path / "r")
    with pytest.raises(OverspillError, match=r"OVS602.*/other.*/m"):
        RunDirectory(tmp_path / "r").create(_job(model="/other"))


def test_a_directory_with_other_files_is_neither_used_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"x")
    with pytest.raises(OverspillError, match=r"OVS604.*cat.png"):
        RunDirectory(tmp_path / "photos").create(_job())
    with pytest.raises(OverspillError, match="OVS601"):
        RunDirectory(tmp_path / "photos").remove()
    assert (tmp_path / "photos" / "cat.png").exists()


@pytest.mark.parametrize("directory_was_there", [True, False])
def test_a_start_that_fails_takes_back_all_it_made_and_nothing_else(tmp_path: Path, directory_was_there: bool) -> None:
    path = tmp_path / "r"
    if directory_was_there:
        path.mkdir()
    run = RunDirectory(path).create(_job())
    (run.path / "data").mkdir()
    (run.path / "data" / "tokens.bin").write_bytes(b"x")
    run.write_identity(_identity())
    run.undo_creation()
    assert path.exists() == directory_was_there
    assert RunDirectory(path).create(_job(seed=5)).job().train.seed == 5


@pytest.mark.parametrize(
    "left",
    [
        ("job.toml.new",),
        ("job.toml",),
        ("job.toml", "data"),
        ("job.toml", "run.json.new"),
        (".overspill-probe-host-1-x",),
        ("job.toml", ".overspill-probe-host-1-x"),
    ],
)
def test_a_start_that_was_killed_is_taken_over_by_the_next(tmp_path: Path, left: tuple[str, ...]) -> None:
    path = tmp_path / "r"
    path.mkdir()
    for name in left:
        if name == "data" or name.startswith("."):
            (path / name).mkdir()
        else:
            (path / name).write_text(job_text(_job()))
    assert RunDirectory(path).create(_job(seed=5)).job().train.seed == 5


def test_a_users_own_job_and_data_are_not_taken_for_a_killed_start(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(OverspillError, match=r"OVS604.*data"):
        RunDirectory(tmp_path).create(_job())
    (tmp_path / "job.toml").write_text("[train]\nsteps = 3\n")
    with pytest.raises(OverspillError, match="OVS604"):
        RunDirectory(tmp_path).create(_job())
    assert (tmp_path / "job.toml").read_text() == "[train]\nsteps = 3\n"


def test_two_starts_in_one_directory_do_not_mix(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "r").create(_job())
    with pytest.raises(OverspillError, match="OVS405"):
        RunDirectory(tmp_path / "r").create(_job(seed=5))
    first.write_identity(_identity())
    with pytest.raises(OverspillError, match="OVS604"):
        RunDirectory(tmp_path / "r").create(_job(seed=5))
    assert first.job().train.seed == 0


def test_a_finished_run_is_refused_until_more_steps_are_asked_for(tmp_path: Path) -> None:
    run = _made(tmp_path / "r")
    run.refuse_if_finished(run.job())
    run.write_summary(RunSummary(status="finished", step=10, total_steps=10, steps_asked=10))
    with pytest.raises(OverspillError, match=r"OVS603.*10 steps"):
        run.refuse_if_finished(run.job())
    run.refuse_if_finished(_job(steps=20))


def test_a_damaged_identity_names_its_file(tmp_path: Path) -> None:
    run = _made(tmp_path / "r")
    run.identity_file.write_text("{")
    with pytest.raises(OverspillError, match=r"OVS404.*run.json"):
        run.identity()


def test_new_runs_get_free_names(tmp_path: Path) -> None:
    first = new_run_path(Path("x/story.toml"), parent=tmp_path)
    assert first == tmp_path / "story-001"
    first.mkdir()
    assert new_run_path(Path("x/story.toml"), parent=tmp_path) == tmp_path / "story-002"


def test_removing_a_run_takes_everything_and_nothing_beside_it(tmp_path: Path) -> None:
    run = _made(tmp_path / "r")
    (tmp_path / "keep.txt").write_text("x")
    assert run.nbytes() > 0
    run.remove()
    assert not run.path.exists()
    assert (tmp_path / "keep.txt").exists()


def test_every_name_of_a_new_run_is_synced_in_the_directory_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, set[str]]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            synced.append((str(path.relative_to(tmp_path)), {entry.name for entry in path.iterdir()}))

    monkeypatch.setattr(os, "fsync", record)
    run = RunDirectory(tmp_path / "runs" / "deep" / "r").create(_job())
    run.write_identity(_identity())
    run.write_summary(RunSummary(status="failed", step=1, total_steps=2))
    for directory, name in (
        (".", "runs"),
        ("runs", "deep"),
        ("runs/deep", "r"),
        ("runs/deep/r", "job.toml"),
        ("runs/deep/r", "run.json"),
        ("runs/deep/r", "summary.json"),
    ):
        assert any(where == directory and name in names for where, names in synced), (directory, name, synced)


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, "OVS401"), (errno.EROFS, "OVS402"), (errno.EIO, "OVS403")])
def test_a_disk_that_refuses_the_runs_files_is_named_and_no_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    run = _made(tmp_path / "r")

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    for write in (
        lambda: RunDirectory(tmp_path / "other").create(_job()),
        lambda: run.write_identity(_identity()),
        lambda: run.write_summary(RunSummary(status="failed", step=1, total_steps=2)),
    ):
        with pytest.raises(OverspillError, match=code):
            write()


def test_settings_that_a_run_keeps_are_refused_and_the_others_are_said() -> None:
    then = number_settings(_job())
    assert applied_settings(then, number_settings(_job())) == []
    refuse_fixed_settings(then, number_settings(_job(steps=20, save_every=3)), job_file="r/job.toml")
    assert applied_settings(then, number_settings(_job(steps=20))) == ["train.steps 10 until now, 20 from here on"]
    with pytest.raises(
        OverspillError, match=r"OVS602.*So have train.seed.*train.micro_batch, got 2, limit 1 in the run"
    ):
        refuse_fixed_settings(then, number_settings(_job(micro_batch=2, seed=4)), job_file="r/job.toml")


def test_every_setting_is_either_kept_by_a_run_applied_or_known_to_change_no_number() -> None:
    free = {"model.path", "model.tokenizer", "model.init", "data.path", "data.num_workers", "train.threads"}
    free |= {"train.eval_every", "train.save_every"} | forecast_only()
    data = _job().model_dump(mode="json")
    keys = {f"{table}.{key}" for table, values in data.items() if table != "plan" for key in values}
    assert keys - free == {key for key in number_settings(_job()) if not key.startswith("plan.")}
