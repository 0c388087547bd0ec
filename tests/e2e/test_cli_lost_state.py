"""Nothing that a run holds is lost by a copy, a move, a missing file or a second thought, and each is said plainly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overspill.checkpoint import RunDirectory
from overspill.cli.main import run
from overspill.errors import OverspillError
from overspill.interop import export as export_module
from overspill.observe.metrics import read_metrics
from overspill.tiers.disk import DiskStore
from testing.tiny import TINY_PLAY, make_tiny_model

JOB = """
[model]
path = "tiny"
[data]
path = "play.txt"
seq_len = 32
eval_fraction = 0.0
[optimizer]
lr = 3e-3
[train]
steps = 6
micro_batch = 2
threads = 1
save_every = 2
[plan]
memory = "128MiB"
optimizer_state = "disk"
durability = "step"
keep_last = 3
directories = ["disk"]
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_tiny_model(folder / "tiny")
    (folder / "play.txt").write_text(TINY_PLAY.read_text()[:30_000])
    return folder


@pytest.fixture
def trained(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of six steps with its state in tmp_path / "disk"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OVERSPILL_DEBUG", "1")
    for name in ("tiny", "play.txt"):
        (tmp_path / name).symlink_to(inputs / name)
    (tmp_path / "job.toml").write_text(JOB)
    path = tmp_path / "run"
    assert run(["train", "job.toml", "--run", str(path)]) == 0
    return path


def _steps(path: Path, number: int) -> None:
    job = path / "job.toml"
    job.write_text(job.read_text().replace("steps = 6", f"steps = {number}"))


def _losses(path: Path) -> list[tuple[int, float | None]]:
    return [(row.step, row.loss) for row in read_metrics(path / "metrics.jsonl")]


def _refused(code: str, *arguments: str | Path) -> str:
    with pytest.raises(OverspillError) as caught:
        run([str(argument) for argument in arguments])
    assert caught.value.code == code, caught.value
    return str(caught.value)


def test_a_copy_of_a_run_cannot_harm_its_original(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    _steps(copy, 8)
    for arguments in (
        ("resume", copy),
        ("resume", copy, "--from", "step-000002"),
        ("export", copy),
        ("runs", "rm", "--yes", copy),
    ):
        said = _refused("OVS408", *arguments)
        assert str(trained) in said and str(copy) in said
    before = _losses(trained)
    _steps(trained, 8)
    assert run(["resume", str(trained)]) == 0
    assert _losses(trained)[:6] == before
    assert run(["export", str(trained)]) == 0


def test_a_moved_run_goes_on_and_says_that_it_took_its_state_over(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained.rename(tmp_path / "moved")
    _steps(tmp_path / "moved", 8)
    assert run(["resume", str(tmp_path / "moved")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path / 'moved' / 'state'} took it over" in said


@pytest.mark.parametrize("gone", [("state/manifest.json",), ("state/manifest.json", "metrics.jsonl")])
def test_a_missing_manifest_costs_no_checkpoint(gone: tuple[str, ...], trained: Path) -> None:
    for name in gone:
        (trained / name).unlink()
    (trained / "summary.json").unlink()
    assert "--from step-000006" in _refused("OVS404", "resume", trained)
    assert RunDirectory.open(trained).checkpoint_names() == ["step-000002", "step-000004", "step-000006"]
    assert run(["resume", str(trained), "--from", "step-000004"]) == 0
    assert RunDirectory.open(trained).checkpoint_names() == ["step-000002", "step-000004", "step-000006"]


def test_an_export_into_the_state_is_refused_before_anything_is_loaded(trained: Path) -> None:
    for inside in ("state/checkpoints/mine", "state"):
        assert "inside the state" in _refused("OVS605", "export", trained, "--out", trained / inside)
    assert RunDirectory.open(trained).checkpoint_names() == ["step-000002", "step-000004", "step-000006"]


def test_a_checkpoint_that_is_dropped_during_its_export_is_said_to_be_dropped(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = export_module._copy_files

    def dropped_now(*arguments: object) -> None:
        copied(*arguments)  # type: ignore[arg-type]
        with DiskStore.open(trained / "state") as store:
            store.unpin("step-000002")

    monkeypatch.setattr(export_module, "_copy_files", dropped_now)
    out = tmp_path / "out"
    said = _refused("OVS601", "export", trained, "--from", "step-000002", "--out", out)
    assert "dropped meanwhile" in said and "ry again" in said
    assert not out.exists()


def test_fewer_steps_than_are_done_is_refused_and_shown_as_it_is(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _steps(trained, 3)
    said = _refused("OVS603", "resume", trained)
    assert "at step 6" in said and "3 steps" in said
    (trained / "summary.json").unlink()
    assert "3 steps" in _refused("OVS603", "resume", trained, "--from", "step-000004")
    capsys.readouterr()
    assert run(["runs", "show", str(trained)]) == 0
    assert run(["runs", "list", "--in", str(trained.parent)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "6 of 3" not in shown and "6/3" not in shown and "step 6" in shown
    assert run(["resume", str(trained), "--from", "step-000002"]) == 0
    assert [step for step, _ in _losses(trained)] == [1, 2, 3]


def test_what_is_given_up_and_what_a_session_did_are_said_in_right_numbers(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run(["resume", str(trained), "--from", "step-000004"]) == 0
    printed = capsys.readouterr()
    assert "2 steps after it are given up and are done again" in " ".join(printed.err.split())
    assert "Done: 6 steps; in this session 2 steps, 128 tokens in" in printed.out
    _steps(trained, 7)
    (trained / "metrics.jsonl").unlink()
    assert run(["resume", str(trained)]) == 0
    printed = capsys.readouterr()
    assert "6 steps have no row in the metrics" in " ".join(printed.err.split())
    assert "Done: 7 steps; in this session 1 step, 64 tokens in" in printed.out


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_run_whose_directory_goes_while_it_trains_says_just_that(how: str, trained: Path, tmp_path: Path) -> None:
    shutil.rmtree(trained)
    command = [sys.executable, "-m", "overspill", "train", "job.toml", "--run", str(trained)]
    environment = {name: value for name, value in os.environ.items() if name != "OVERSPILL_DEBUG"}
    command += ["--set", "train.steps=100000"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        deadline = time.monotonic() + 120
        while not (trained / "metrics.jsonl").exists() or (trained / "metrics.jsonl").read_bytes().count(b"\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        trained.rename(tmp_path / "elsewhere")
        if how == "removed":
            shutil.rmtree(tmp_path / "elsewhere")
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 2 and "Traceback" not in said, said
    assert "OVS404" in said and "moved or removed while the run trained" in said
    assert "summary" not in said and "--from" not in said
    if how == "moved":
        job = tmp_path / "elsewhere" / "job.toml"
        steps = _losses(tmp_path / "elsewhere")[-1][0] + 1
        job.write_text(job.read_text().replace("steps = 100000", f"steps = {steps}"))
        assert run(["resume", str(tmp_path / "elsewhere")]) == 0
