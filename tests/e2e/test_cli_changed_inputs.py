"""What a run was made of and is no longer the same at its resume: the model's config, the token files, the rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from overspill.cli.main import run
from overspill.observe.metrics import read_metrics
from testing.tiny import TINY_PLAY, make_tiny_model

JOB = """
[model]
path = "tiny"
[data]
path = "play.txt"
seq_len = 32
[train]
steps = 2
micro_batch = 2
threads = 1
[plan]
memory = "128MiB"
optimizer_state = "disk"
durability = "step"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def begun(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with a run of two steps that asks for two more."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / "tiny")
    (tmp_path / "play.txt").write_text(TINY_PLAY.read_text()[:20_000])
    (tmp_path / "job.toml").write_text(JOB)
    assert run(["train", "job.toml", "--run", "run"]) == 0
    job = tmp_path / "run" / "job.toml"
    job.write_text(job.read_text().replace("steps = 2", "steps = 4"))
    capsys.readouterr()
    return tmp_path


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert run(arguments) == 2
    return capsys.readouterr().err


def _edit_config(folder: Path, **changes: object) -> None:
    file = folder / "tiny" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _losses(folder: Path) -> list[float | None]:
    return [row.loss for row in read_metrics(folder / "run" / "metrics.jsonl")]


# The model's config


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rms_norm_eps", 0.1, "rms_norm_eps: 1e-05 then, 0.1 now"),
        ("hidden_act", "relu", 'hidden_act: "silu" then, "relu" now'),
        ("rope_parameters", {"rope_theta": 10.0, "rope_type": "default"}, "rope_parameters.rope_theta: 10000.0 then"),
        ("attention_dropout", 0.5, "attention_dropout: 0.0 then, 0.5 now"),
    ],
)
def test_a_config_that_computes_something_else_is_refused_at_resume_and_export(
    begun: Path, capsys: pytest.CaptureFixture[str], key: str, value: object, said: str
) -> None:
    _edit_config(begun, **{key: value})
    for command in ("resume", "export"):
        paragraph = _refused(capsys, command, "run")
        assert "OVS602" in paragraph and said in paragraph and "tiny/config.json" in paragraph
    assert len(_losses(begun)) == 2


def test_keys_of_a_config_that_compute_nothing_may_change(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The last two stand at their defaults, which the file did not have to say.
    _edit_config(
        begun, _name_or_path="elsewhere", transformers_version="4.1.0", architectures=None, use_cache=False,
        torch_dtype="float32", initializer_range=0.9, mlp_bias=False, pretraining_tp=1,
    )  # fmt: skip
    assert run(["resume", "run"]) == 0
    assert "config" not in capsys.readouterr().err
    assert len(_losses(begun)) == 4


def test_a_run_made_before_commits_held_the_config_goes_on_with_a_note(
    begun: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill.cli import assemble

    shutil.rmtree(begun / "run")
    with monkeypatch.context() as earlier:
        earlier.setattr(assemble, "_model_facts", lambda job: {})
        assert run(["train", "job.toml", "--run", "run"]) == 0
    job = begun / "run" / "job.toml"
    job.write_text(job.read_text().replace("steps = 2", "steps = 4"))
    capsys.readouterr()
    assert run(["resume", "run"]) == 0
    assert "before commits held the model's config" in capsys.readouterr().err
    _edit_config(begun, rms_norm_eps=0.1)  # the commits of the resumed run hold it
    assert "rms_norm_eps" in _refused(capsys, "export", "run")


# The token files


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "counted.bin"])
def test_a_flipped_bit_in_a_token_file_changes_no_loss(
    begun: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    shutil.copytree(begun / "run", begun / "undisturbed")
    assert run(["resume", "undisturbed"]) == 0
    file = begun / "run" / "data" / name
    data = bytearray(file.read_bytes())
    for at in range(16, len(data), 8):
        data[at] ^= 1
    file.write_bytes(data)
    (begun / "play.txt").rename(begun / "away.txt")
    paragraph = _refused(capsys, "resume", "run")
    assert "OVS404" in paragraph and f"run/data/{name}" in paragraph and "play.txt back" in paragraph
    (begun / "away.txt").rename(begun / "play.txt")
    assert run(["resume", "run"]) == 0
    assert f"{name} is damaged" in capsys.readouterr().err
    assert _losses(begun) == [row.loss for row in read_metrics(begun / "undisturbed" / "metrics.jsonl")]


# The rows


def test_rows_that_are_left_out_are_said_before_the_first_step(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "Hail ", "completion": "" if n < 95 else "king " * 40} for n in range(100)]
    (begun / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["train", "job.toml", "--run", "other", "--set", "data.path=rows.jsonl"]) == 0
    assert "95 of 100 rows have no answer and are left out." in capsys.readouterr().err
    (begun / "rows.jsonl").write_text("".join(json.dumps(row | {"completion": ""}) + "\n" for row in rows))
    paragraph = _refused(capsys, "train", "job.toml", "--run", "third", "--set", "data.path=rows.jsonl")
    assert "OVS204" in paragraph and "100 without text or answer" in paragraph
