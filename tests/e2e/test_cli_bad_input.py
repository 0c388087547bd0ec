"""Mistakes on the command line: exit code 2, one paragraph with a code and what to do, never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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
[train]
steps = 2
micro_batch = 2
threads = 1
[plan]
memory = "128MiB"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a job that would run."""
    shutil.copytree(model, tmp_path / "tiny")
    (tmp_path / "play.txt").write_text(TINY_PLAY.read_text()[:20_000])
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OVERSPILL_DEBUG", raising=False)
    return tmp_path


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command, check the manners of its refusal, and return the paragraph."""
    capsys.readouterr()
    code = run(arguments)
    captured = capsys.readouterr()
    assert code == 2, captured.err
    paragraphs = [line for line in captured.err.splitlines() if line.strip()]
    assert len(paragraphs) == 1, captured.err
    assert paragraphs[0].startswith("[OVS")
    assert "Traceback" not in captured.err
    return paragraphs[0]


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _drop_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "tiny" / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "tiny" / "model.safetensors")


def _break_header(folder: Path) -> None:
    file = folder / "tiny" / "model.safetensors"
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])


def _remove_tokenizer(folder: Path) -> None:
    for file in (folder / "tiny").glob("tokenizer*"):
        file.unlink()


def _quantise(folder: Path) -> None:
    file = folder / "tiny" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    file.write_text(json.dumps(config))


SETTINGS: dict[str, tuple[list[str], list[str]]] = {
    "an unknown key, with the nearest known one": (["train.stesp=3"], ["OVS101", "train.stesp", "Did you mean steps?"]),
    "an unknown table": (["trian.steps=3"], ["OVS101", "Did you mean train?"]),
    "an impossible unit": (["plan.memory=2GiBs"], ["OVS102", "plan.memory", "2GiBs", "GiB"]),
    "a unit in the wrong case": (["plan.memory=2gib"], ["OVS102", "Did you mean GiB?"]),
    "a dtype that no kernel takes": (["model.dtype=fp16"], ["OVS108", "model.dtype", "bf16 or fp32"]),
    "a budget below the largest need": (["plan.memory=1MiB"], ["OVS301", "plan.memory", "MiB"]),
    "a sequence longer than the positions": (["data.seq_len=100000"], ["OVS205", "data.seq_len", "100000"]),
    "a model that is not there": (["model.path=./gone"], ["OVS201", "gone"]),
    "a data file that is not there": (["data.path=gone.txt"], ["OVS204", "gone.txt"]),
    "a pattern that matches no parameter": (["model.freeze=['nothing*']"], ["OVS101", "model.freeze", "nothing*"]),
    "more checkpoints than the disk holds": (["plan.keep_last=10000000"], ["OVS401", "free"]),
    "a directory that cannot be made": (["plan.directories=['job.toml/x']"], ["OVS402", "job.toml/x"]),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_wrong_setting_is_refused_with_its_field_and_a_way_on(
    folder: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    settings, expected = SETTINGS[what]
    arguments = [part for setting in settings for part in ("--set", setting)]
    paragraph = _refused(capsys, "train", "job.toml", "--run", "run", *arguments)
    for text in expected:
        assert text in paragraph


INPUTS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no weights": (lambda f: (f / "tiny/model.safetensors").unlink(), ["OVS202", "model.safetensors"]),
    "truncated weights": (lambda f: _truncate(f / "tiny/model.safetensors"), ["OVS202", "truncated"]),
    "weights with a broken header": (_break_header, ["OVS202", "header"]),
    "weights that lack a tensor": (_drop_tensor, ["OVS202", "layers.1.mlp.up_proj"]),
    "no tokenizer": (_remove_tokenizer, ["OVS203", "tokenizer"]),
    "quantised weights": (_quantise, ["OVS206", "gptq"]),
    "no config": (lambda f: (f / "tiny/config.json").unlink(), ["OVS201", "config.json"]),
    "an empty data file": (lambda f: (f / "play.txt").write_text(""), ["OVS204", "play.txt", "empty"]),  # type: ignore[func-returns-value]
    "data that is no text": (lambda f: (f / "play.txt").write_bytes(b"\xff\xfe\xff" * 99), ["OVS204", "UTF-8"]),  # type: ignore[func-returns-value]
    "a text shorter than a sequence": (lambda f: (f / "play.txt").write_text("Oh."), ["OVS204", "data.seq_len"]),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("what", INPUTS)
def test_an_unusable_input_is_refused_by_name(folder: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    spoil, expected = INPUTS[what]
    spoil(folder)
    paragraph = _refused(capsys, "train", "job.toml", "--run", "run")
    for text in expected:
        assert text in paragraph
    # The mistake is corrected and the same command works: nothing of the failed start is in the way.
    assert not (folder / "run" / "run.json").exists()


def _set_config(folder: Path, **changes: object) -> None:
    file = folder / "tiny" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


ODD_CONFIGS: dict[str, dict[str, object]] = {
    "ten million layers": {"num_hidden_layers": 10_000_000},
    "no whole number of layers": {"num_hidden_layers": 2.5},
    "a text for a number": {"num_key_value_heads": "many"},
    "no heads": {"num_attention_heads": 0},
    "a list for the head's width": {"head_dim": [1]},
    "an activation that nobody knows": {"hidden_act": "siluu"},
    "a negative vocabulary": {"vocab_size": -1},
    "an odd head width": {"head_dim": 7},
}


@pytest.mark.parametrize("what", ODD_CONFIGS)
def test_a_config_that_describes_no_model_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    _set_config(folder, **ODD_CONFIGS[what])
    paragraph = _refused(capsys, "train", "job.toml", "--run", "run")
    assert paragraph.startswith(("[OVS201]", "[OVS202]")), paragraph
    assert not (folder / "run" / "run.json").exists()


ODD_TEXTS = {
    "nested too deeply": "[" * 100_000,
    "a number of 5000 digits": '{"a": ' + "9" * 5000 + "}",
    "half of a surrogate pair": '{"model": {"path": "\\ud800"}}',
    "a NUL": '{"model": {"path": "a\\u0000b"}}',
    "a list": "[1, 2]",
}


@pytest.mark.parametrize("what", ODD_TEXTS)
@pytest.mark.parametrize("where", ["job", "config", "data", "index"])
def test_json_that_nobody_writes_is_refused_wherever_it_stands(
    folder: Path, capsys: pytest.CaptureFixture[str], where: str, what: str
) -> None:
    file = {"job": "job.json", "config": "tiny/config.json", "data": "rows.jsonl"}.get(where)
    job, settings = "job.toml", []
    if where == "index":
        (folder / "tiny/model.safetensors").unlink()
        file = "tiny/model.safetensors.index.json"
    elif where == "job":
        job = "job.json"
    elif where == "data":
        settings = ["--set", "data.path=rows.jsonl"]
    assert file is not None
    (folder / file).write_text(ODD_TEXTS[what])
    paragraph = _refused(capsys, "train", job, "--run", "run", *settings)
    assert Path(file).name in paragraph


def test_a_path_that_no_system_takes_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 5000
    for arguments in (("train", long), ("forecast", long), ("resume", long), ("runs", "show", long)):
        assert _refused(capsys, *arguments).startswith("[OVS")
    for setting in (f"model.path=./{long}", f"data.path={long}", f"plan.directories=['{long}']"):
        assert _refused(capsys, "train", "job.toml", "--run", "run", "--set", setting).startswith("[OVS")
    assert _refused(capsys, "train", "job.toml", "--run", long).startswith("[OVS")


def test_a_run_that_cannot_be_read_does_not_hide_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "job.toml", "--run", "runs/good"]) == 0
    shutil.copytree(folder / "runs/good", folder / "runs/bad")
    (folder / "runs/bad/run.json").write_text("{")
    capsys.readouterr()
    assert run(["runs", "list"]) == 0
    captured = capsys.readouterr()
    assert "good" in captured.out
    assert "runs/bad cannot be read: [OVS404]" in captured.out + captured.err


def test_a_state_directory_whose_disk_is_not_mounted_is_named_and_nothing_is_made_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "other").mkdir()
    arguments = ("--run", "run", "--set", "plan.directories=['other']")
    assert run(["train", "job.toml", *arguments]) == 0
    (folder / "other").rename(folder / "unmounted")
    _set_steps(folder / "run" / "job.toml", 4)
    paragraph = _refused(capsys, "resume", "run")
    assert "Mount the disk" in paragraph and "other/overspill-" in paragraph
    assert not (folder / "other").exists()
    (folder / "unmounted").rename(folder / "other")
    assert run(["resume", "run"]) == 0


def _set_steps(job: Path, steps: int) -> None:
    text = job.read_text()
    assert "steps = 2" in text
    job.write_text(text.replace("steps = 2", f"steps = {steps}"))


def test_a_job_file_that_is_missing_or_no_toml_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "OVS103" in _refused(capsys, "train", "gone.toml")
    (folder / "job.toml").write_text("[model\npath = 3")
    assert "line 1" in _refused(capsys, "forecast", "job.toml")


def test_a_run_directory_in_a_place_that_cannot_be_written_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "OVS402" in _refused(capsys, "train", "job.toml", "--run", "play.txt/run")


def test_a_finished_run_and_a_run_of_another_model_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "job.toml", "--run", "run"]) == 0
    assert "OVS603" in _refused(capsys, "resume", "run")
    assert "OVS604" in _refused(capsys, "train", "job.toml", "--run", "run")
    make_tiny_model(folder / "other", hidden_size=32, intermediate_size=64)
    paragraph = _refused(capsys, "train", "job.toml", "--run", "run", "--set", "model.path=other")
    assert "OVS602" in paragraph and "other" in paragraph

    job = folder / "run" / "job.toml"
    job.write_text(
        job.read_text().replace(str(folder / "tiny"), str(folder / "other")).replace("steps = 2", "steps = 4")
    )
    assert "OVS602" in _refused(capsys, "resume", "run")


def test_names_that_do_not_exist_are_refused_with_those_that_do(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "OVS601" in _refused(capsys, "resume", "nowhere")
    assert "OVS601" in _refused(capsys, "runs", "show", "tiny")
    assert "OVS601" in _refused(capsys, "runs", "rm", "tiny", "--yes")
    assert (folder / "tiny" / "config.json").exists()
    assert run(["train", "job.toml", "--run", "run"]) == 0
    assert "step-000002" in _refused(capsys, "export", "run", "--from", "step-000001")


def test_a_damaged_checkpoint_is_not_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "job.toml", "--run", "run"]) == 0
    (folder / "run" / "state" / "slots").rename(folder / "elsewhere")  # the links of the checkpoint alone are left
    for file in (folder / "run" / "state" / "checkpoints" / "step-000002").glob("*.bin"):
        data = bytearray(file.read_bytes())
        data[1000] ^= 1
        file.write_bytes(data)
    paragraph = _refused(capsys, "export", "run")
    assert "OVS404" in paragraph and "Slot" in paragraph
    assert not (folder / "run" / "export").exists()
