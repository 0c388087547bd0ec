"""What the commands say to a person: prompts, labels, hints, and the next command."""

from __future__ import annotations

from pathlib import Path

import pytest

from overspill.cli.main import run
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
