"""The process that gets killed: trains, resumes and exports as the command line does, with a plan given in full.

Importing torch and transformers takes seconds, and a campaign starts hundreds of processes. So this script imports
them once, has no threads, and forks one child for each request it reads; the child makes a session of its own
(a process group too, so that its data workers can be killed with it, or left alive without it).

A request is a line of JSON: ``{"do": "train" | "resume" | "export", "run": …, "job": …, "plan": …, "log": …,
"die": {"label": …, "count": …, "after": …}}``. The answers are ``{"pid": …}`` and, when it ended, ``{"status": …}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from overspill.checkpoint import RunDirectory
from overspill.cli.assemble import assemble
from overspill.cli.jobs import load_job
from overspill.cli.main import run as command_line
from overspill.interop.hf import build_empty, load_config, load_tokenizer
from overspill.observe.metrics import MetricsWriter
from overspill.plan import Plan
from overspill.tiers.disk import FileIO
from overspill.tiers.disk import store as store_module
from testing.tiny import TINY_ASSETS

FINISHED, UNFINISHED, FAILED = 0, 3, 4


class DyingIO(FileIO):
    """The real I/O layer, which ends the process at the ``count``-th sync or rename with ``label``, before or after."""

    def __init__(self, label: str, count: int, after: bool) -> None:
        super().__init__()
        self._label, self._left, self._after = label, count, after

    def _is_it(self, label: str) -> bool:
        if label == self._label:
            self._left -= 1
            if self._left == 0:
                if not self._after:
                    os.killpg(0, signal.SIGKILL)
                return True
        return False

    def fdatasync(self, fd: int, label: str) -> None:
        now = self._is_it(label)
        super().fdatasync(fd, label)
        if now:
            os.killpg(0, signal.SIGKILL)

    def fsync(self, fd: int, label: str) -> None:
        now = self._is_it(label)
        super().fsync(fd, label)
        if now:
            os.killpg(0, signal.SIGKILL)

    def sync_directory(self, path: Path, label: str) -> None:
        now = self._is_it(label)
        super().sync_directory(path, label)
        if now:
            os.killpg(0, signal.SIGKILL)

    def rename(self, source: Path, target: Path, label: str) -> None:
        now = self._is_it(label)
        super().rename(source, target, label)
        if now:
            os.killpg(0, signal.SIGKILL)


def train(request: dict[str, Any], *, resume: bool) -> int:
    run = RunDirectory(request["run"])
    job = run.job() if resume else load_job(Path(request["job"]), [])
    plan = Plan.read(request["plan"])
    if not resume:
        run.create(job)
    with assemble(run, job, plan, resume=resume) as parts:
        restored = parts.session.restored
        print("FROM", 0 if restored is None else restored.step, flush=True)
        with MetricsWriter(run.metrics_file) as metrics:
            result = parts.loop(metrics.append, before_commit=metrics.sync).run()
    return FINISHED if result.finished else UNFINISHED


def work(request: dict[str, Any]) -> int:
    if "die" in request:
        die = request["die"]
        store_module.FileIO = lambda: DyingIO(**die)  # type: ignore[assignment, misc]
    if request["do"] == "export":
        return command_line(["export", request["run"], "--out", request["out"]])
    return train(request, resume=request["do"] == "resume")


def child(request: dict[str, Any]) -> None:
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    status = FAILED
    try:
        status = work(request)
    except BaseException:  # noqa: BLE001 - whatever it is, the log must hold it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    torch.set_num_threads(1)
    load_tokenizer(str(TINY_ASSETS))  # transformers imports most of itself at the first use
    build_empty(load_config(str(TINY_ASSETS)), "bf16")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(request)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
