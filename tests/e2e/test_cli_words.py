"""What the commands say to a person: prompts, labels, hints, and the next command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overspill.cli.main import run
from overspill.errors import CODES
from overspill.units import format_nbytes
from testing.tiny import TINY_PLAY, make_tiny_model

JOB = """
[model]
path = "tiny"
[data]
path = "play.txt"
seq_len = 32
eval_fraction = 0.1
[train]
steps = 4
micro_batch = 2
threads = 1
save_every = 2
[plan]
memory = "128MiB"
optimizer_state = "disk"
durability = "step"
"""


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, a text and a job in the working directory."""
    make_tiny_model(tmp_path / "tiny")
    (tmp_path / "play.txt").write_text(TINY_PLAY.read_text()[:30_000])
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_answer_stands_behind_its_prompt(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "tiny", "--prompt", "To be, or", "--max-new-tokens", "5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("To be, or") and len(out.strip()) > len("To be, or")


def test_a_run_says_what_training_gained(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "job.toml", "--run", "run"]) == 0
    out = capsys.readouterr().out
    before = next(line for line in out.splitlines() if line.startswith("evaluation before the first step: "))
    assert f"Evaluation loss: {before.split()[-1]} before the first step, " in out


def _refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_missing_data_is_known_before_the_forecast(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (inputs / "play.txt").unlink()
    for command in (("forecast", "job.toml"), ("train", "job.toml", "--run", "run")):
        said = _refusal(capsys, *command)
        assert "OVS204" in said and "play.txt" in said and "data.path" in said
    assert not (inputs / "run").exists()


def test_the_disk_space_follows_from_the_bytes_of_a_commit(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["forecast", "job.toml", "--set", "plan.keep_last=2", "--json"]) == 0
    disk_nbytes = json.loads(capsys.readouterr().out)["forecast"]["disk_nbytes"]
    assert run(["forecast", "job.toml", "--set", "plan.keep_last=2"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "a commit writes" in line)
    assert f"a commit writes {format_nbytes(disk_nbytes / 4)}, " in line
    assert "; 4 versions " in line and f"take {format_nbytes(disk_nbytes)} of disk" in line


def test_a_run_says_how_often_it_goes_through_its_data(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "job.toml", "--run", "run", "--set", "train.epochs=0.5"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Data: "))
    sequences = int(line.split()[1])
    assert sequences > 20 and "sequences of 32 tokens" in line and "more held out" in line
    steps = int(line.split(" steps of ")[0].split()[-1])
    assert float(line.split()[-2]) == pytest.approx(steps * 2 / sequences, rel=0.01)


def test_what_exists_already_is_named_by_its_own_code(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "job.toml", "--run", "run"]) == 0
    assert run(["export", "run", "--out", "model"]) == 0
    assert "OVS605" in _refusal(capsys, "export", "run", "--out", "model")
    said = _refusal(capsys, "runs", "rm", "run")
    assert "OVS106" in said and "--yes" in said
    assert (inputs / "run" / "run.json").exists()


def test_what_a_run_is_begins_without_an_empty_line(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "job.toml", "--run", "run"]) == 0
    capsys.readouterr()
    assert run(["runs", "show", "run"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["run", "run"]


def test_the_next_step_of_an_error_says_what_to_do() -> None:
    for code, row in CODES.items():
        assert "the message" not in row.fix.lower(), code


def test_a_relative_path_in_a_runs_job_file_is_relative_to_that_file(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "job.toml", "--run", "run"]) == 0
    job = inputs / "run" / "job.toml"
    text = job.read_text().replace("steps = 4", "steps = 6").replace(str(inputs / "play.txt"), "../play.txt")
    job.write_text(text.replace(str(inputs / "tiny"), "../tiny"))
    assert run(["resume", "run"]) == 0
    assert run(["export", "run", "--out", "out"]) == 0
    # "tiny" in the working directory is not what the file means.
    job.write_text(text.replace("steps = 6", "steps = 8").replace(str(inputs / "tiny"), "tiny"))
    said = _refusal(capsys, "resume", "run")
    assert "OVS201" in said and str(inputs / "run" / "tiny") in said


def test_a_model_that_is_neither_a_directory_nor_on_the_hub_is_named_with_the_path_that_was_tried(
    inputs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def offline(*arguments: object, **options: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    for command in ("forecast", "train"):
        said = _refusal(capsys, command, "job.toml", "--set", "model.path=models/gone")
        assert "OVS201" in said and "no network" in said and str(inputs / "models" / "gone") in said
