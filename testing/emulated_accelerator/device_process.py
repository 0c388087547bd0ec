"""Runs tests in a process of their own, so that the device that they register stays there.

A pytest process (or xdist worker) whose conftest imports ``pytest_runtest_protocol`` from here starts one child pytest
for all tests beside that conftest, tells it one test after the other, and reports the child's results as its own:
names, tracebacks, captured output, skips and durations are as if the tests had run here. A child that crashes fails
the one test that it was running; the next test gets a new child. A test with a parameter "cpu" or "cuda" runs in the
calling process: with the emulated device registered, PyTorch knows no other accelerator.

``OVERSPILL_DEVICE_PROCESS=1 pytest tests/device/…`` runs the tests in the calling process instead, for ``--pdb``.

The pattern is pytest-xdist's, with a pipe in place of execnet. This module has two faces: the parent imports it, the
child loads it as a plugin (the hooks at the end).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

__all__ = ["is_device_process", "pytest_runtest_protocol"]

MARK = "OVERSPILL_DEVICE_PROCESS"
_PIPES = "OVERSPILL_DEVICE_PROCESS_PIPES"
# A test may build the device first, on a busy machine; a device that hangs must still end in a message.
PATIENCE_SECONDS = 600
STACKS_AFTER_SECONDS = 240
# The child sees no device but the emulated one.
_NO_OTHER = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def is_device_process() -> bool:
    """Whether this process was started to have the device, or was told to run the tests itself."""
    return MARK in os.environ


def runs_here(item: pytest.Item) -> bool:
    """Whether the test is for a device that needs no process of its own."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and bool({"cpu", "cuda"} & {p for p in callspec.params.values() if isinstance(p, str)})


class _DeviceProcess:
    """The child, as its parent sees it."""

    def __init__(self, session: pytest.Session, files: list[str]) -> None:
        self.config = session.config
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in close())
        to_child, write_end = os.pipe()
        self._answers, from_child = os.pipe()
        self._unread = b""
        root = str(self.config.rootpath)
        command = [sys.executable, "-m", "pytest", "-p", __name__, "-p", "no:xdist", "-p", "no:cacheprovider"]
        command += ["--rootdir", root, "-o", f"faulthandler_timeout={STACKS_AFTER_SECONDS}", "-q"]
        if self.config.inipath:
            command += ["-c", str(self.config.inipath)]
        path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), root, os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [*command, *files],
            env={**os.environ, **_NO_OTHER, MARK: "1", _PIPES: f"{to_child},{from_child}", "PYTHONPATH": path},
            pass_fds=(to_child, from_child),
            stdin=subprocess.DEVNULL,
            stdout=self.errors,
            stderr=self.errors,
            cwd=root,
        )
        os.close(to_child)
        os.close(from_child)
        self._commands = os.fdopen(write_end, "w")

    def run(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
        """The reports of one test."""
        following = nextitem.nodeid if nextitem is not None else None
        try:
            self._commands.write(json.dumps({"test": item.nodeid, "next": following}) + "\n")
            self._commands.flush()
            while (answer := self._answer()) != {"done": item.nodeid}:
                if isinstance(answer.get("longrepr"), list):  # where and why a test was skipped; JSON has no tuples
                    answer["longrepr"] = tuple(answer["longrepr"])
                yield self.config.hook.pytest_report_from_serializable(config=self.config, data=answer)
        except (_ChildDied, BrokenPipeError) as died:
            yield pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={},
                outcome="failed",
                longrepr=f"{died}\n{self._last_words()}",
                when="call",
            )
            self.close()

    def _answer(self) -> Any:
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE_SECONDS)
            if not ready:
                self._process.kill()
                raise _ChildDied(f"the device process gave no answer for {PATIENCE_SECONDS} s")
            more = os.read(self._answers, 1 << 16)
            if not more:
                code = self._process.wait()
                reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise _ChildDied(f"the device process died ({reason})")
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def _last_words(self) -> str:
        self.errors.seek(0)
        return "".join(self.errors.readlines()[-60:])

    @property
    def alive(self) -> bool:
        return not self._commands.closed

    def close(self) -> None:
        if not self.alive:
            return
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        self.errors.close()


class _ChildDied(Exception):
    """The child is gone, or as good as."""


_child = pytest.StashKey[_DeviceProcess]()


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """The parent's hook; conftest.py imports it."""
    if is_device_process() or runs_here(item):
        return None
    stash = item.session.stash
    if _child not in stash or not stash[_child].alive:
        folder = item.path.parent
        files = sorted({str(other.path) for other in item.session.items if folder in other.path.parents})
        stash[_child] = _DeviceProcess(item.session, files)
        item.config.add_cleanup(stash[_child].close)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in stash[_child].run(item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    # An earlier test of this process may have left what it shares with this one; see the child's loop.
    ended = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), when="teardown")
    if ended.excinfo is not None:
        item.ihook.pytest_runtest_logreport(report=item.ihook.pytest_runtest_makereport(item=item, call=ended))
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


# ---- the child ----


class _Child:
    def __init__(self, commands: TextIO, answers: TextIO) -> None:
        self.commands = commands
        self.answers = answers

    def say(self, answer: Any) -> None:
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()

    @pytest.hookimpl
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for line in self.commands:
            command = json.loads(line)
            item = items[command["test"]]
            nextitem = items.get(command["next"])
            # Tests in between may have run elsewhere, so what comes next was not what the last test had been told.
            session._setupstate.teardown_exact(item)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            self.say({"done": item.nodeid})
        return True

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self.config
        self.say(config.hook.pytest_report_to_serializable(config=config, report=report))

    config: pytest.Config


def pytest_configure(config: pytest.Config) -> None:
    if _PIPES not in os.environ:
        return
    commands, answers = (int(end) for end in os.environ.pop(_PIPES).split(","))
    child = _Child(os.fdopen(commands, "r"), os.fdopen(answers, "w"))
    child.config = config
    config.pluginmanager.register(child, "device process")
