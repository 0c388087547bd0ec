"""The command's start: fast, light, and `new` writes a job file that reads back as the schema's defaults."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from overspill.cli.main import run
from overspill.cli.starter import job_tables, starter_text
from overspill.job import Job, read_job
from overspill.job.runs import forecast_only


def _modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = _modules_after("import overspill")
    assert not loaded & {"torch", "numpy", "pydantic_core", "typer", "rich", "transformers"}


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], {"torch", "numpy", "pydantic_core", "transformers"}),
        (["--version"], {"torch", "numpy", "pydantic_core", "transformers"}),
        (["train", "--help"], {"torch", "numpy", "transformers"}),  # typer reads options with pydantic
        (["runs", "list"], {"torch", "numpy", "transformers"}),
    ],
)
def test_help_and_small_commands_load_nothing_heavy(arguments: list[str], heavy: set[str], tmp_path: Path) -> None:
    code = f"import os\nos.chdir({str(tmp_path)!r})\nfrom overspill.cli.main import run\nassert run({arguments!r}) == 0"
    assert not _modules_after(code) & heavy


def test_the_starter_holds_every_key_and_reads_back_as_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    assert run(["new", str(file), "--model", "m", "--data", "d.txt", "--memory", "2GiB"]) == 0
    job = read_job(file)
    assert job == Job.read(
        {"model": {"path": "m"}, "data": {"path": "d.txt"}, "train": {"steps": 100}, "plan": {"memory": "2GiB"}}
    )
    text = file.read_text()
    for table in job_tables():
        for key in table.keys:
            assert f"{key.name} = " in text or f"{table.name}.{key.name}" in forecast_only()
            assert key.description, f"{table.name}.{key.name} has no description"


def test_every_key_of_the_starter_is_valid_when_its_mark_is_removed() -> None:
    uncommented = "\n".join(
        line[1:] if line.startswith("#") and not line.startswith("# ") and not line.endswith("# not set") else line
        for line in starter_text().splitlines()
    )
    data = tomllib.loads(uncommented)
    assert Job.read(data) == Job.read(tomllib.loads(starter_text()))


def test_new_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.toml"
    file.write_text("mine")
    assert run(["new", str(file)]) == 2
    assert file.read_text() == "mine"
    assert "OVS105" in capsys.readouterr().err


def test_new_refuses_a_size_without_a_unit_and_says_what_is_still_to_be_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.toml"
    assert run(["new", str(file), "--memory", "8"]) == 2
    assert "OVS102" in capsys.readouterr().err and not file.exists()
    assert run(["new", str(file), "--model", "m"]) == 0
    assert "Next: set data.path in it, then overspill forecast" in capsys.readouterr().out
    assert run(["new", str(tmp_path / "other.toml"), "--model", "m", "--data", "d.txt"]) == 0
    assert "Next: overspill forecast" in capsys.readouterr().out


def test_an_unexpected_exception_is_short_and_its_traceback_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill.cli.crash import crashes_go_to, save_traceback

    def fails() -> None:
        with crashes_go_to(tmp_path):
            raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError) as caught:
        fails()
    file = save_traceback(caught.value)
    assert file == tmp_path / "crash.txt"
    assert "planted" in file.read_text() and "Traceback" in file.read_text()
