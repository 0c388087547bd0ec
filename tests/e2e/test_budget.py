"""A run stays within its budget: the kernel holds it to base + budget + 5 %, without swap, and it finishes.

``base`` is what interpreter and libraries hold, measured by the same process. 64 MiB too much are planted to show that
the limit is sharp. ``make campaign-budget`` does the same with the demo's model.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from overspill.units import MiB
from testing.cgroup import MemoryGroup, missing
from testing.tiny import TINY_PLAY, make_tiny_model

reason = missing()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_SECONDS = 900
PLANTED_NBYTES = 64 * MiB
WORKER_NBYTES = 16 * MiB  # a data worker's own pages, and those of the parent that it keeps; part of the reserve


class Budget:
    """Runs budget_worker.py in groups of their own, and keeps what it measured."""

    def __init__(
        self, folder: Path, model: Path, text: str, plan: dict[str, Any], *, seq_len: int, memory: str = "1GiB"
    ) -> None:
        self.folder, self.model, self.plan, self.seq_len, self.memory = folder, model, plan, seq_len, memory
        (folder / "play.txt").write_text(text)
        self._count = 0

    def job(self, workers: int, steps: int) -> str:
        path = self.folder / f"job{workers}.toml"
        path.write_text(
            f'[model]\npath = "{self.model}"\n[data]\npath = "play.txt"\nseq_len = {self.seq_len}\n'
            f"num_workers = {workers}\neval_fraction = 0.002\n[train]\nsteps = {steps}\naccumulation = 2\n"
            f'save_every = 2\n[plan]\nmemory = "{self.memory}"\ndurability = "step"\n'
        )
        return str(path)

    def run(self, do: str, *, workers: int = 0, **request: Any) -> tuple[int, dict[str, Any]]:
        """Return code, and what the process measured with the group's highest use."""
        self._count += 1
        plan = dict(request.pop("plan", self.plan))
        if do in ("train", "resume"):
            plan |= {key: plan[key] + workers * WORKER_NBYTES for key in ("memory_nbytes", "activations_nbytes")}
            request["job"] = self.job(workers, steps=6)
        file = self.folder / f"request{self._count}.json"
        with MemoryGroup() as group:
            content = {"do": do, "model": str(self.model), "group": str(group.path), "plan": plan}
            file.write_text(json.dumps({**content, "seq_len": self.seq_len, **request}))
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            done = group.run(
                [sys.executable, "-m", "tests.e2e.budget_worker", str(file)],
                env=environment,
                cwd=ROOT,
                timeout_seconds=LIMIT_SECONDS,
            )
            answer: dict[str, Any] = json.loads(file.with_suffix(".answer").read_text())
            answer |= {"peak_nbytes": group.peak_nbytes, "kills": group.kills}
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        figures = (f"{key.removesuffix('_nbytes')} {value / MiB:.0f}" for key, value in answer.items() if "_n" in key)
        what = " ".join(request.get("arguments", [do])[:1]) + (" with 64 MiB too much" if "plant" in request else "")
        print(f"{what}, MiB: {', '.join(figures)}; {answer['kills']} killed")
        return done.returncode, answer

    def cli(self, *arguments: str, **request: Any) -> tuple[int, dict[str, Any]]:
        return self.run("cli", arguments=list(arguments), **request)


def _fits(result: tuple[int, dict[str, Any]]) -> None:
    code, answer = result
    assert code == 0, f"ended by the kernel: {answer}"
    assert answer["kills"] == 0


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Budget:
    """12 M parameters: 24 MiB of weights, as much of gradients, 20 MiB for buffers and 24 MiB for activations."""
    folder = tmp_path_factory.mktemp("budget")
    model = make_tiny_model(
        folder / "model",
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=7,
        num_attention_heads=6,
        head_dim=64,
    )
    plan = {
        "memory_nbytes": 100 * MiB,
        "activations_nbytes": 24 * MiB,
        "optimizer_state": {"disk": 1.0},
        "overlap": "forward",
        "chunk_numel": 512 * 1024,
        "staging_nbytes": 20 * MiB,
        "max_grad_norm": 1.0,
        "durability": {"every_steps": 2},
        "keep_last": 1,
    }
    return Budget(folder, model, TINY_PLAY.read_text()[:60_000], plan, seq_len=64)


def test_training_with_workers_resume_and_export_stay_within_the_budget(small: Budget, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    _fits(small.run("train", run=run, workers=2, stop_after=3))
    _fits(small.run("resume", run=run, workers=2))
    _fits(small.cli("export", run, "--out", str(tmp_path / "model")))


def test_sixty_four_mebibytes_too_much_are_noticed(small: Budget, tmp_path: Path) -> None:
    _fits(small.run("train", run=str(tmp_path / "right")))
    code, answer = small.run("train", run=str(tmp_path / "run"), plant=PLANTED_NBYTES)
    assert (code, answer["kills"]) == (-signal.SIGKILL, 1)


def test_a_trainer_that_saves_stays_within_the_budget(small: Budget, tmp_path: Path) -> None:
    _fits(small.run("trainer", run=str(tmp_path / "run")))


# With the demo's model: 135 M parameters, whose training state takes 1.8 GiB, planned and run by the command line.

ASSETS = ROOT / ".cache" / "assets"
DEMO_MEMORY = 1000 * MiB
TRAINER_ACTIVATIONS = 300 * MiB


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Budget:
    model = ASSETS / "smollm2-135m-instruct"
    if not (model / "model.safetensors").exists():
        pytest.skip("`make assets` has not been run")
    text = (ASSETS / "shakespeare" / "shakespeare.txt").read_text()[:1_000_000]
    plan = {
        "memory_nbytes": DEMO_MEMORY,
        "activations_nbytes": TRAINER_ACTIVATIONS,
        "optimizer_state": {"disk": 1.0},
        "keep_last": 1,
    }
    folder = tmp_path_factory.mktemp("budget")
    return Budget(folder, model, text, plan, seq_len=128, memory=f"{DEMO_MEMORY // MiB}MiB")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_demos_training_resume_and_export_fit_budget_campaign(demo: Budget, tmp_path: Path, workers: int) -> None:
    run = tmp_path / "run"
    _fits(demo.cli("train", demo.job(workers, steps=4), "--run", str(run)))
    job = run / "job.toml"
    job.write_text(job.read_text().replace("steps = 4", "steps = 8", 1))
    _fits(demo.cli("resume", str(run)))
    _fits(demo.cli("export", str(run), "--out", str(tmp_path / "model")))


@pytest.mark.slow
@pytest.mark.parametrize("do", ["trainer", "accelerate"])
def test_the_demos_model_in_a_trainer_and_a_prepared_loop_fits_budget_campaign(
    demo: Budget, tmp_path: Path, do: str
) -> None:
    _fits(demo.run(do, run=str(tmp_path / "run")))


@pytest.mark.slow
def test_the_demos_training_notices_sixty_four_mebibytes_too_much_budget_campaign(demo: Budget, tmp_path: Path) -> None:
    # The smallest budget: all state on disk, two buffers, the measured activations. 5 % are 54 MiB then.
    plan = {"memory_nbytes": 792 * MiB, "activations_nbytes": 250 * MiB, "staging_nbytes": 20 * MiB}
    _fits(demo.run("train", run=str(tmp_path / "right"), plan={**demo.plan, **plan}))
    code, answer = demo.run("train", run=str(tmp_path / "run"), plan={**demo.plan, **plan}, plant=PLANTED_NBYTES)
    assert (code, answer["kills"]) == (-signal.SIGKILL, 1)
