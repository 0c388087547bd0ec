"""Runs that are killed and resumed until they are finished, and what must hold at each resume and at the end.

All runs train the same tiny Llama with dropout, shuffled data, forked data workers, a learning-rate schedule,
accumulation and clipping. Placement, overlap and durability never change numbers, so every one of them is compared
with one and the same undisturbed run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from overspill.observe.metrics import last_row, read_metrics
from overspill.tiers.disk import StoreReader
from testing.tiny import TINY_PLAY, make_tiny_model
from tests.e2e.crash_worker import FAILED, FINISHED

STEPS = 20
SAVE_EVERY = 6
LIMIT_SECONDS = 120.0
JOB = f"""
[model]
path = "tiny"
[data]
path = "play.txt"
seq_len = 32
num_workers = 2
eval_fraction = 0.05
[optimizer]
lr = 3e-3
max_grad_norm = 0.5
[schedule]
warmup_steps = 3
[train]
steps = {STEPS}
micro_batch = 2
accumulation = 2
threads = 1
eval_every = 7
save_every = {SAVE_EVERY}
[plan]
memory = "64MiB"
optimizer_state = "disk"
"""
Durability = Literal["step", "N", "checkpoint"]
EVERY_STEPS = {"step": 1, "N": 4, "checkpoint": 0}


@dataclass(frozen=True)
class Case:
    """What a run's plan is, beside the job that all runs share."""

    placement: Literal["host", "disk", "mixed"] = "disk"
    overlap: Literal["step", "forward"] = "forward"
    durability: Durability = "step"
    directories: tuple[str, ...] = ()

    def plan(self) -> dict[str, Any]:
        host = {"host": 1.0, "disk": 0.0, "mixed": 0.4}[self.placement]
        return {
            "memory_nbytes": "64MiB",
            "optimizer_state": {"host": host, "disk": 1 - host},
            "overlap": self.overlap,
            "durability": {"every_steps": EVERY_STEPS[self.durability]},
            "chunk_numel": 16384,
            "staging_nbytes": 4 * 16384 * 10,
            "max_grad_norm": 0.5,
            "keep_last": 2,
            "directories": self.directories,
        }

    @property
    def may_repeat_steps(self) -> int:
        """Steps with a row in the metrics that a kill may cost, at most: the row of step t+1 follows t's commit."""
        return {"step": 1, "N": 4, "checkpoint": SAVE_EVERY}[self.durability]


CASES = tuple(
    Case(placement, overlap, durability)
    for placement in ("disk", "mixed", "host")
    for durability in ("step", "N", "checkpoint")
    for overlap in ("forward", "step")
)


@dataclass
class Result:
    """What a run leaves: each step's loss and evaluation, and every byte of the state at its last checkpoint."""

    losses: list[tuple[int, float | None, float | None, float | None]]
    state: dict[str, str]


@dataclass
class Kills:
    """How often, and where, runs were ended."""

    total: int = 0
    by_phase: dict[str, int] = field(default_factory=dict)

    def count(self, phase: str) -> None:
        self.total += 1
        self.by_phase[phase] = self.by_phase.get(phase, 0) + 1


class Worker:
    """The forking process of crash_worker.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        root = Path(__file__).resolve().parent.parent.parent
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.crash_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env=environment,
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the worker is gone"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def start(self, request: dict[str, Any]) -> int:
        """Begin a request in a process group of its own; returns its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._answer()["pid"])

    def end(self) -> int:
        """Wait for the request's end: the exit code, or the negative signal."""
        return int(self._answer()["status"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_SECONDS)


class Run:
    """One run directory that is trained, killed and resumed until it is finished."""

    def __init__(self, worker: Worker, path: Path, case: Case) -> None:
        self.worker, self.path, self.case = worker, path, case
        self.metrics = path / "metrics.jsonl"
        self.log = path.with_name(path.name + ".log")
        self.committed = 0
        self._groups: list[int] = []

    @property
    def exists(self) -> bool:
        return (self.path / "run.json").is_file()

    def step(self) -> int:
        row = last_row(self.metrics)
        return 0 if row is None else row.step

    def begin(self, **more: Any) -> int:
        """Train, or resume where there is something to resume."""
        self.log.write_text("")
        request = {
            "do": "resume" if self.exists else "train",
            "run": str(self.path),
            "job": str(self.worker.folder / "job.toml"),
            "plan": self.case.plan(),
            "log": str(self.log),
            **more,
        }
        pid = self.worker.start(request)
        self._groups.append(pid)
        return pid

    def end(self, before: int | None) -> int:
        """Wait for the end, and check what the resume came back to. ``before``: newest row when it began."""
        status = self.worker.end()
        text = self.log.read_text()
        assert status in (FINISHED, -signal.SIGKILL), f"exit {status}\n{text}"
        came_back_to = next((int(line.split()[1]) for line in text.splitlines() if line.startswith("FROM ")), None)
        if came_back_to is not None and before is not None:
            assert came_back_to >= self.committed, f"step {self.committed} was committed, and is lost"
            repeated = before - came_back_to
            assert repeated <= self.case.may_repeat_steps, f"{repeated} steps are done again"
        row = last_row(self.metrics)
        if row is not None:
            self.committed = max(self.committed, row.committed_step or 0)
        return status

    def finish(self) -> None:
        before = self.step()
        self.begin()
        assert self.end(before) == FINISHED

    def kill_at(self, wait_until: float | int, *, everyone: bool = True, draw: random.Random | None = None) -> str:
        """Begin, and kill at ``wait_until``: seconds after the start (float), or steps done (int) plus a moment.

        Returns the phase that was cut: ``begin``, ``train`` or ``finished`` when it was too late.
        """
        before = self.step()
        pid = self.begin()
        deadline = time.monotonic() + LIMIT_SECONDS
        if isinstance(wait_until, int):
            while not (self._is_training() and self.step() >= wait_until) and _alive(pid):
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(draw.random() * 0.03 if draw else 0.0)
        else:
            time.sleep(wait_until)
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if everyone else os.kill)(pid, signal.SIGKILL)
        status = self.end(before)
        if status == FINISHED:
            return "finished"
        return "train" if self._is_training() else "begin"

    def _is_training(self) -> bool:
        """The process has its parts, and the metrics are cut back to where it goes on from."""
        return "FROM" in self.log.read_text()

    def _begin_export(self, out: Path) -> int:
        self.log.write_text("")
        return self.worker.start({"do": "export", "run": str(self.path), "out": str(out), "log": str(self.log)})

    def export(self, out: Path) -> None:
        self._begin_export(out)
        assert self.worker.end() == FINISHED, self.log.read_text()

    def kill_export(self, out: Path, seconds: float) -> bool:
        """Begin an export and kill it; False when it was done before."""
        pid = self._begin_export(out)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        return self.worker.end() == -signal.SIGKILL

    def result(self) -> Result:
        rows = read_metrics(self.metrics)
        assert [row.step for row in rows] == list(range(1, STEPS + 1))
        state = {}
        with StoreReader(self.path / "state" / "checkpoints" / f"step-{STEPS:06d}") as reader:
            reader.verify()
            for slot in reader.slots:
                state[slot.name] = hashlib.sha256(reader.array(slot.name).tobytes()).hexdigest()
        return Result([(row.step, row.loss, row.eval_loss, row.grad_norm) for row in rows], state)

    def clean_up(self) -> None:
        """Workers that outlived their killed parent go by themselves, but not before the test ends."""
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def make_inputs(folder: Path) -> None:
    make_tiny_model(folder / "tiny", attention_dropout=0.1)
    (folder / "play.txt").write_text(TINY_PLAY.read_text()[:30_000])
    (folder / "job.toml").write_text(JOB)


__all__ = [
    "CASES",
    "FAILED",
    "FINISHED",
    "SAVE_EVERY",
    "STEPS",
    "Case",
    "Kills",
    "Result",
    "Run",
    "Worker",
    "make_inputs",
]
