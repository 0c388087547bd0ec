"""The build and the process that holds the device: what happens when a part of it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.emulated_accelerator import BuildError, _build
from testing.emulated_accelerator.device_process import MARK

REPOSITORY = Path(__file__).parents[2]


def test_a_build_that_fails_gives_the_compilers_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    fails = "echo 'note: hm' >&2; echo 'runtime.h:1:1: error: no such luck' >&2; exit 1"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) {fails};; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match=r"^runtime\.h:1:1: error: no such luck$"):
        _build.build(cache=tmp_path / "cache")


def test_a_library_built_before_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = tmp_path / _build._key() / f"{_build.EXTENSION_NAME}.so"
    built.parent.mkdir()
    built.touch()
    monkeypatch.setenv("CXX", "/bin/false")
    assert _build.build(cache=tmp_path) == built


def test_a_change_of_the_sources_asks_for_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _build._key()
    (tmp_path / "changed.cpp").write_text("// another one\n")
    monkeypatch.setattr(_build, "SOURCES", tmp_path)
    assert _build._key() != before


def test_whether_there_is_a_compiler_is_asked_of_the_one_that_would_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert not _build.has_compiler()
    monkeypatch.setenv("CXX", f"{sys.executable} -with arguments")
    assert _build.has_compiler()


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", str(folder), *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    hook = "from testing.emulated_accelerator.device_process import pytest_runtest_protocol"
    (tmp_path / "conftest.py").write_text(f"{hook}\n")
    (tmp_path / "test_it.py").write_text(
        "import os, signal, pytest\n"
        "from testing.emulated_accelerator.device_process import is_device_process\n"
        "def test_is_inside(): assert is_device_process(); print('pid', os.getpid())\n"
        "def test_says_why():\n    left, right = 1, 2\n    assert left == right\n"
        "def test_crashes(): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "@pytest.mark.parametrize('x', [1, 2])\n"
        "def test_goes_on(x): assert is_device_process(); print('pid', os.getpid())\n"
        "def test_is_skipped(): pytest.skip('not today')\n"
    )
    return tmp_path


def test_tests_of_the_device_run_in_a_process_of_their_own_and_report_as_usual(folder: Path) -> None:
    ran = run_pytest(folder)
    assert "2 failed, 3 passed, 1 skipped" in ran.stdout
    assert "assert 1 == 2" in ran.stdout
    assert "the device process died (SIGSEGV)" in ran.stdout
    assert "not today" in ran.stdout


def test_one_process_serves_until_it_dies_and_then_a_new_one(folder: Path) -> None:
    ran = run_pytest(folder)
    pids = [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("pid ")]
    assert len(pids) == 3
    assert pids[0] != pids[1]
    assert pids[1] == pids[2]


def test_a_choice_of_tests_runs_only_these(folder: Path) -> None:
    ran = run_pytest(folder, "-k", "goes_on")
    assert "2 passed, 4 deselected" in ran.stdout


def test_tests_for_the_cpu_run_outside_and_what_modules_share_is_ended_in_both_processes(folder: Path) -> None:
    """Modules have tests for both processes, in turns, whose last is for one or the other, and a fixture for all."""
    (folder / "test_it.py").unlink()
    orders = {"a": ["cpu", "emulated", "cuda"], "b": ["cpu", "cuda", "emulated"], "c": ["emulated", "cpu", "cuda"]}
    for name, order in orders.items():
        (folder / f"test_{name}.py").write_text(
            "import pytest\n"
            "from testing.emulated_accelerator.device_process import is_device_process\n"
            "@pytest.fixture(scope='module')\n"
            f"def shared():\n    yield {name!r}\n    open(f'ended_{name}_{{is_device_process()}}', 'x').close()\n"
            f"@pytest.mark.parametrize('device', {order})\n"
            "@pytest.mark.parametrize('x', [1, 2])\n"
            f"def test_it(shared, device, x):\n    assert shared == {name!r}\n"
            "    assert is_device_process() == (device == 'emulated')\n"
        )
    ran = run_pytest(folder)
    assert "18 passed" in ran.stdout, ran.stdout
    ended = {f"ended_{name}_{inside}" for name in orders for inside in (True, False)}
    assert {path.name for path in folder.glob("ended_*")} == ended
