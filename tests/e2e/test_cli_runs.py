"""Whole runs through the command line: train, stop, resume, export, generate, and what they print."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from overspill.checkpoint import RunDirectory
from overspill.cli.assemble import assemble
from overspill.cli.forecast import resolve
from overspill.cli.main import run
from overspill.errors import OverspillError
from overspill.observe.metrics import read_metrics
from overspill.tiers.disk import DiskStore
from testing.tiny import TINY_PLAY, make_tiny_model

JOB = """
[model]
path = "tiny"
[data]
path = "play.txt"
seq_len = 32
eval_fraction = 0.1
[optimizer]
lr = 3e-3
[train]
steps = 24
micro_batch = 2
accumulation = 2
threads = 1
eval_every = 10
save_every = 8
[plan]
memory = "128MiB"
optimizer_state = "disk"
durability = "step"
keep_last = 3
"""
COMMAND = [sys.executable, "-m", "overspill"]
LIMIT_SECONDS = 120


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with dropout, a text and a job."""
    folder = tmp_path_factory.mktemp("inputs")
    make_tiny_model(folder / "tiny", attention_dropout=0.1)
    (folder / "play.txt").write_text(TINY_PLAY.read_text()[:30_000])
    (folder / "job.toml").write_text(JOB)
    return folder


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbs."""
    path = tmp_path_factory.mktemp("whole") / "run"
    assert run(["train", str(inputs / "job.toml"), "--run", str(path)]) == 0
    return path


@pytest.fixture(autouse=True)
def _in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OVERSPILL_DEBUG", "1")  # an unexpected exception is a failure with its traceback


def _losses(path: Path) -> list[tuple[int, float | None, float | None]]:
    return [(row.step, row.loss, row.eval_loss) for row in read_metrics(path / "metrics.jsonl")]


def _weights(path: Path) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "weights"
        assert run(["export", str(path), "--out", str(out)]) == 0
        return (out / "model.safetensors").read_bytes()


def _start(inputs: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path.cwd()
    )


def _wait_for_rows(process: subprocess.Popen[str], file: Path, rows: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not file.exists() or file.read_bytes().count(b"\n") < rows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_writes_its_metrics_checkpoints_and_comparison(whole: Path) -> None:
    rows = read_metrics(whole / "metrics.jsonl")
    assert [row.step for row in rows] == list(range(1, 25))
    assert [row.step for row in rows if row.eval_loss is not None] == [10, 20, 24]
    assert all(row.loss is not None and row.grad_norm is not None and row.tokens == 128 for row in rows)
    first, last = rows[0].loss, rows[-1].loss
    assert first is not None and last is not None and last < first
    assert sum(row.written_nbytes["disk"] for row in rows) > 0

    directory = RunDirectory.open(whole)
    assert directory.checkpoint_names() == ["step-000008", "step-000016", "step-000024"]
    summary = directory.summary()
    assert summary is not None and (summary.status, summary.step) == ("finished", 24)
    by_name = {row.what: row for row in summary.comparison}
    assert all(row.measured is not None for row in summary.comparison if row.unit == "bytes"), by_name
    for what in ("memory, weights", "memory, gradients", "disk read per step", "disk written per step", "disk space"):
        difference = by_name[what].difference
        assert difference is not None and abs(difference) < 0.05, by_name[what]
    for file in [whole / "run.json", whole / "job.toml", whole / "metrics.jsonl"]:
        assert file.stat().st_mode & 0o077 == 0


def test_ctrl_c_saves_says_how_to_go_on_and_the_resume_repeats_the_undisturbed_run(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "cut"
    process = _start(inputs, "train", str(inputs / "job.toml"), "--run", str(path))
    _wait_for_rows(process, path / "metrics.jsonl", 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 130, err
    assert f"overspill resume {path}" in out
    assert "Traceback" not in err
    done = len(_losses(path))
    assert RunDirectory.open(path).checkpoint().name == f"step-{done:06d}"

    assert run(["resume", str(path)]) == 0
    assert _losses(path) == _losses(whole)
    assert _weights(path) == _weights(whole)


def test_a_second_ctrl_c_leaves_at_once_and_the_run_goes_on_afterwards(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "killed"
    process = _start(inputs, "train", str(inputs / "job.toml"), "--run", str(path))
    _wait_for_rows(process, path / "metrics.jsonl", 3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode in (0, 130)
    assert "Traceback" not in err
    if process.returncode == 130:
        assert run(["resume", str(path)]) == 0
    assert _losses(path) == _losses(whole)


def test_sigkill_loses_nothing_that_was_committed(inputs: Path, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "killed"
    process = _start(inputs, "train", str(inputs / "job.toml"), "--run", str(path))
    _wait_for_rows(process, path / "metrics.jsonl", 6)
    process.kill()
    process.communicate()
    reported = len(_losses(path))
    assert run(["resume", str(path)]) == 0
    assert _losses(path) == _losses(whole)
    assert _weights(path) == _weights(whole)
    assert reported >= 6


def test_a_resume_from_an_earlier_checkpoint_repeats_what_followed_it(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    (path / "summary.json").unlink()
    before = _losses(path)
    assert run(["resume", str(path), "--from", "step-000016"]) == 0
    said = capsys.readouterr().err
    assert "Going on from step 16. 8 steps" in said
    assert "step-000024" in said  # the checkpoint of the future that is given up
    assert _losses(path) == before
    assert RunDirectory.open(path).checkpoint_names() == ["step-000008", "step-000016", "step-000024"]


def test_more_steps_can_be_asked_of_a_finished_run(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    job = path / "job.toml"
    job.write_text(job.read_text().replace("steps = 24", "steps = 26"))
    assert run(["resume", str(path)]) == 0
    assert [step for step, _, _ in _losses(path)] == list(range(1, 27))


def test_another_number_of_threads_is_said_to_change_bits(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    job = path / "job.toml"
    job.write_text(job.read_text().replace("steps = 24", "steps = 25").replace("threads = 1", "threads = 2"))
    assert run(["resume", str(path)]) == 0
    assert "Bits may differ" in capsys.readouterr().err


def test_an_export_loads_in_transformers_and_equals_the_trained_weights(whole: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert run(["export", str(whole), "--out", str(tmp_path / "model")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    batch = tokenizer("To be, or not to be", return_tensors="pt")
    with torch.no_grad():
        loss = model(**batch, labels=batch["input_ids"]).loss.item()
    start = AutoModelForCausalLM.from_pretrained(RunDirectory.open(whole).job().model.path)
    with torch.no_grad():
        assert loss < start(**batch, labels=batch["input_ids"]).loss.item()


def test_everything_that_prints_prints_json_too(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*arguments: str) -> list[dict[str, object]]:
        capsys.readouterr()
        assert run([*arguments, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    job, path = str(inputs / "job.toml"), str(tmp_path / "runs" / "one")
    assert printed("new", "fresh.toml")[0]["job"] == "fresh.toml"
    assert printed("doctor")
    assert printed("forecast", job)
    events = printed("train", job, "--run", path, "--set", "train.steps=2")
    assert [event["event"] for event in events] == ["forecast", "step", "step", "end"]
    assert events[-1]["finished"] is True and events[-1]["comparison"]
    assert printed("export", path)[0]["tensors"]
    assert printed("generate", path, "--prompt", "To be", "--max-new-tokens", "3")[0]["prompt"] == "To be"
    assert [row["run"] for row in json.loads(json.dumps(printed("runs", "list", "--in", "runs")[0]))] == [
        str(Path("runs") / "one")
    ]
    assert printed("runs", "show", path)[0]["status"] == "finished"
    assert printed("runs", "rm", path, "--yes")[0]["removed"] == path
    assert not Path(path).exists()


def test_a_run_in_use_is_neither_removed_nor_resumed(inputs: Path, tmp_path: Path) -> None:
    path = tmp_path / "busy"
    process = _start(inputs, "train", str(inputs / "job.toml"), "--run", str(path), "--set", "train.steps=100000")
    try:
        _wait_for_rows(process, path / "metrics.jsonl", 1)
        environment = {name: value for name, value in os.environ.items() if name != "OVERSPILL_DEBUG"}
        for arguments in (["runs", "rm", str(path), "--yes"], ["resume", str(path)]):
            done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environment)
            assert done.returncode == 2
            assert "OVS405" in done.stderr and str(process.pid) in done.stderr
        assert (path / "run.json").exists()
    finally:
        process.kill()
        process.communicate()


def test_removing_a_run_takes_its_state_on_other_disks(inputs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other disk"
    path = tmp_path / "run"
    setting = f"plan.directories=[{str(other)!r}]"
    assert run(["train", str(inputs / "job.toml"), "--run", str(path), "--set", setting, "--set", "train.steps=1"]) == 0
    assert any(other.iterdir())
    assert run(["runs", "rm", str(path), "--yes"]) == 0
    assert not path.exists()
    assert not any(other.iterdir())


def test_the_forecast_says_what_a_crash_would_cost(inputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def at_risk(*settings: str) -> str:
        arguments = [part for setting in settings for part in ("--set", setting)]
        assert run(["forecast", str(inputs / "job.toml"), *arguments]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if "at risk" in line)

    assert "the step under way" in at_risk("plan.durability=step")
    assert "at most 5 steps" in at_risk("plan.durability=5")
    assert "at most 8 steps" in at_risk("plan.durability=checkpoint")
    assert "the whole run" in at_risk("plan.durability=checkpoint", "train.save_every=0")
    assert "the whole run" in at_risk("plan.durability=100", "train.save_every=0")
    assert "the whole run" in at_risk("plan.durability=24", "train.save_every=0")  # the job's own length
    assert "at most 8 steps" in at_risk("plan.durability=100")


def _tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("lr = 0.003", "lr = 0.001", "optimizer.lr"),
        ("eval_fraction = 0.1", "eval_fraction = 0.2", "data.eval_fraction"),
        ("micro_batch = 2", "micro_batch = 1", "train.micro_batch"),
        ("weight_decay = 0.01", "weight_decay = 0.5", "optimizer.weight_decay"),
    ],
)
def test_a_setting_that_a_run_keeps_is_refused_before_anything_is_changed(
    whole: Path, tmp_path: Path, old: str, new: str, named: str
) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    _edit(path / "job.toml", old, new)
    before = _tree(path)
    with pytest.raises(OverspillError, match=rf"OVS602.*{named}"):
        run(["resume", str(path), "--from", "step-000016"])
    assert _tree(path) == before


def test_a_changed_text_is_refused_and_neither_tokens_nor_checkpoints_are_lost(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    text = tmp_path / "other.txt"
    text.write_text((inputs / "play.txt").read_text() + "And more.")
    _edit(path / "job.toml", str(inputs / "play.txt"), str(text))
    before = _tree(path)
    with pytest.raises(OverspillError, match="OVS602"):
        run(["resume", str(path), "--from", "step-000008"])
    assert _tree(path) == before


def test_a_run_goes_on_with_its_tokens_when_the_text_is_gone(
    inputs: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    _edit(path / "job.toml", str(inputs / "play.txt"), str(tmp_path / "gone.txt"))
    assert run(["resume", str(path), "--from", "step-000016"]) == 0
    assert "gone.txt is no longer there" in capsys.readouterr().err
    assert _losses(path) == _losses(whole)
    _edit(path / "job.toml", "seq_len = 32", "seq_len = 16")
    with pytest.raises(OverspillError, match="OVS602"):
        run(["resume", str(path), "--from", "step-000016"])


def test_a_finished_run_goes_back_to_a_checkpoint_and_drops_what_was_made_of_later_ones(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    for name in ("step-000016", "step-000024"):
        assert run(["export", str(path), "--from", name]) == 0
    _edit(path / "job.toml", "accumulation = 2", "accumulation = 1")
    capsys.readouterr()
    assert run(["resume", str(path), "--from", "step-000016"]) == 0
    said = capsys.readouterr().err
    assert "Exports of the steps that are done again were dropped: step-000024" in said
    assert "train.accumulation 2 until now, 1 from here on" in said
    assert [entry.name for entry in (path / "export").iterdir()] == ["step-000016"]
    assert _losses(path)[:16] == _losses(whole)[:16]
    assert _losses(path)[16:] != _losses(whole)[16:]
    with pytest.raises(OverspillError, match="OVS603"):
        run(["resume", str(path), "--from", "step-000024"])


def test_going_back_that_a_crash_cut_short_is_made_up_for_by_the_next_resume(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    (path / "summary.json").unlink()
    DiskStore.open(path / "state", from_pin="step-000008").close()  # what a kill behind it leaves: later checkpoints
    _edit(path / "job.toml", "accumulation = 2", "accumulation = 1")
    assert run(["resume", str(path)]) == 0
    assert "were dropped: step-000016, step-000024" in capsys.readouterr().err
    assert RunDirectory.open(path).checkpoint_names() == ["step-000008", "step-000016", "step-000024"]


def test_steps_that_were_committed_without_a_boundary_are_said_once(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    _edit(path / "job.toml", "steps = 24", "steps = 30")
    directory = RunDirectory.open(path)
    job = directory.job()
    settings, _ = resolve(job, directory.state)
    with assemble(directory, job, settings, resume=True) as parts:
        batch = next(parts.source)
        parts.model(**batch).loss.backward()
        parts.session.optimizer.step()
        parts.session.checkpoint("step-000025")
    with assemble(directory, job, settings, resume=True) as parts:
        assert parts.session.restored is not None and parts.session.restored.step == 25
        assert sum("without a step boundary" in note for note in parts.notes) == 1
        assert any("1 step has no row in the metrics" in note for note in parts.notes)


def test_a_run_that_goes_on_is_not_shown_as_it_last_ended(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    _edit(path / "job.toml", "steps = 24", "steps = 100000")
    process = subprocess.Popen([*COMMAND, "resume", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_rows(process, path / "metrics.jsonl", 26)
    finally:
        process.kill()
        process.communicate()
    shown = subprocess.run([*COMMAND, "runs", "show", str(path), "--json"], capture_output=True, text=True, check=True)
    facts = json.loads(shown.stdout)
    assert (facts["status"], facts["total_steps"]) == ("not ended", 100000)


def test_waiting_threads_and_kept_kernels_are_bounded_before_torch_is_loaded(inputs: Path, tmp_path: Path) -> None:
    watch = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            names = ('OMP_WAIT_POLICY', 'ONEDNN_PRIMITIVE_CACHE_CAPACITY')\n"
        "            print('SEEN', *(os.environ.get(n) for n in names), flush=True)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from overspill.cli.main import run\n"
        f"run(['train', {str(inputs / 'job.toml')!r}, '--run', {str(tmp_path / 'run')!r}, '--set', 'train.steps=1'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "ONEDNN_"))}
    for extra, seen in (({}, "SEEN passive 64"), ({"OMP_WAIT_POLICY": "active"}, "SEEN active 64")):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        done = subprocess.run(
            [sys.executable, "-c", watch], capture_output=True, text=True, env={**environment, **extra}, check=True
        )
        assert [line for line in done.stdout.splitlines() if line.startswith("SEEN")] == [seen], done.stderr


def test_a_full_disk_is_what_stops_the_run_even_when_its_summary_finds_no_room_either(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(real: Callable[[int], None], name: str) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            if Path(f"/proc/self/fd/{descriptor}").readlink().name == name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        return sync

    monkeypatch.setattr(os, "fdatasync", full(os.fdatasync, "metrics.jsonl"))
    monkeypatch.setattr(os, "fsync", full(os.fsync, "summary.json.new"))
    with pytest.raises(OverspillError, match=r"OVS401.*metrics\.jsonl"):
        run(["train", str(inputs / "job.toml"), "--run", str(tmp_path / "run")])
    assert "Cannot write the run's summary" in capsys.readouterr().err


def test_a_signal_in_the_middle_of_a_write_stops_the_run_and_prints_nothing_through_a_stream(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from overspill.cli.train import _stop_on_signals
    from overspill.train.loop import StopFlag

    class Busy(io.TextIOBase):
        def write(self, text: str, /) -> int:
            raise RuntimeError("reentrant call")

    stop = StopFlag()
    monkeypatch.setattr(sys, "stdout", Busy())
    monkeypatch.setattr(sys, "stderr", Busy())
    with _stop_on_signals(stop):
        signal.raise_signal(signal.SIGTERM)
    monkeypatch.undo()
    assert stop.requested
    assert "Stopping after this step" in capfd.readouterr().err
