"""Names and outputs that are not UTF-8: never a traceback, never a file left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.tiny import TINY_PLAY, make_tiny_model

JOB = """
[model]
path = "tiny"
[data]
path = "play.txt"
seq_len = 32
[train]
steps = 1
threads = 1
[plan]
memory = "128MiB"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def _overspill(*arguments: str | bytes, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "overspill", *arguments],
        capture_output=True,
        cwd=cwd,
        env=os.environ | environment,
        check=False,
    )


def _fill(folder: Path, model: Path) -> None:
    (folder / "tiny").symlink_to(model)
    (folder / "play.txt").write_text(TINY_PLAY.read_text()[:10_000])
    (folder / "job.toml").write_text(JOB)


def _refused(done: subprocess.CompletedProcess[bytes]) -> str:
    said = done.stderr.decode()
    assert done.returncode == 2 and said.startswith("[OVS107]") and "Traceback" not in said, said
    return said


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "tiny", "--prompt", b"caf\xe9"],
        ["train", b"caf\xe9.toml"],
        ["train", "job.toml", "--run", b"caf\xe9"],
        ["train", "job.toml", "--set", b"data.path=caf\xe9"],
        ["new", b"caf\xe9.toml"],
        ["doctor", b"caf\xe9"],
    ],
)
def test_a_word_that_is_not_utf8_is_refused(tmp_path: Path, arguments: list[str | bytes]) -> None:
    assert "caf\\udce9" in _refused(_overspill(*arguments, cwd=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_working_directory_that_is_not_utf8_is_refused_and_stays_as_it_was(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    _fill(folder, model)
    before = sorted(folder.iterdir())
    said = _refused(_overspill("train", "job.toml", "--run", "run", cwd=folder))
    assert "caf\\udce9" in said
    assert sorted(folder.iterdir()) == before


def test_an_output_that_knows_ascii_alone_gets_everything(tmp_path: Path, model: Path) -> None:
    _fill(tmp_path, model)
    (tmp_path / "play.txt").rename(tmp_path / "caf\u00e9.txt")
    setting = ("--set", "data.path=caf\u00e9.txt")
    done = _overspill("train", "job.toml", "--run", "run", *setting, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b"Loading the model and the data \\u2026" in done.stdout
    gone = ("--set", "data.path=g\u00f6ne.txt")
    done = _overspill("train", "job.toml", *gone, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and done.stderr.startswith(b"[OVS204]") and b"g\\xf6ne.txt" in done.stderr
    answer = ("generate", "tiny", "--max-new-tokens", "2", "--prompt", "caf\u00e9", "--json")
    done = _overspill(*answer, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert json.loads(done.stdout)["prompt"] == "caf\u00e9"
