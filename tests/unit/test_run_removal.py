"""Removing a run: all of it, nothing else, and nothing before every check; outputs stay out of a run's state."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from disk_cases import commit, create

from overspill.checkpoint import RunDirectory, RunIdentity
from overspill.checkpoint.contents import COPIED_FILES, first_stranger, refuse_inside_state
from overspill.cli.main import run as command
from overspill.errors import OverspillError
from overspill.files import SCRATCH_PREFIX
from overspill.job import Job
from overspill.tiers.disk import DiskStore
from overspill.tiers.disk.manifest import encode


def made(path: Path, *disks: Path) -> RunDirectory:
    """A run with a store, two steps and a checkpoint; its state on ``disks`` where there are any."""
    job = {"model": {"path": "/m"}, "data": {"path": ["/d.txt"]}, "train": {"steps": 10}}
    job["plan"] = {"directories": [str(disk) for disk in disks]}
    run = RunDirectory(path).create(Job.read(job))
    run.write_identity(
        RunIdentity.fresh(model="/m", model_digest="d", numel=3, torch="2.13.0", simd="x86-64-v3", threads=2)
    )
    with create(run.state, directories=list(disks)) as store:
        commit(store, 1)
        store.pin("step-000001")
        commit(store, 2)
    return run


def tree(path: Path) -> list[str]:
    """Without locks, which a check may make."""
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*") if entry.name != "lock")


def refuse(path: Path, code: str, *said: str, folder: Path) -> None:
    """`runs rm` refuses with this, and nothing is gone."""
    before = tree(folder)
    with pytest.raises(OverspillError) as caught:
        command(["runs", "rm", "--yes", str(path)])
    assert caught.value.code == code
    for text in said:
        assert text in str(caught.value)
    assert tree(folder) == before


@pytest.fixture(autouse=True)
def _errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_DEBUG", "1")


def test_a_link_to_a_run_is_refused_and_the_run_is_named(tmp_path: Path) -> None:
    made(tmp_path / "run", tmp_path / "disk")
    (tmp_path / "link").symlink_to("run")
    refuse(tmp_path / "link", "OVS601", "link", f"runs rm {tmp_path / 'run'}", folder=tmp_path)


def test_the_directory_that_one_stands_in_is_removed_as_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "run", tmp_path / "disk")
    monkeypatch.chdir(tmp_path / "run")
    assert command(["runs", "rm", "--yes", "."]) == 0
    assert tree(tmp_path) == ["disk"]


@pytest.mark.parametrize("text", ["{}", "[]", "\0", '{"format": 1, "run_id": 7}'])
def test_a_directory_whose_run_json_is_no_runs_is_left_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for name in ("run.json", "job.toml", "precious.txt"):
        (tmp_path / "own" / name).write_text(text)
    refuse(tmp_path / "own", "OVS601", "run.json", "by hand", folder=tmp_path)


@pytest.mark.parametrize(
    "place",
    [
        "notes.txt",
        "paper/notes.txt",
        "state/notes.txt",
        "state/slots/notes.txt",
        "state/checkpoints/step-000001/notes.txt",
        "export/step-000001/model.gguf",
        "data/text.txt",
        "model/model.safetensors",
    ],
)
def test_a_file_that_no_run_makes_is_named_and_only_force_deletes_it(place: str, tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    (run.path / place).parent.mkdir(parents=True, exist_ok=True)
    (run.path / place).write_text("mine")
    refuse(run.path, "OVS604", str(run.path / place), "--force", folder=tmp_path)
    assert command(["runs", "rm", "--yes", "--force", str(run.path)]) == 0
    assert not run.path.exists()


def test_a_link_in_a_run_is_no_runs_and_what_it_leads_to_is_never_deleted(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    (run.path / "export").symlink_to(tmp_path / "mine")
    refuse(run.path, "OVS604", str(run.path / "export"), folder=tmp_path)
    run.remove(force=True)
    assert tree(tmp_path) == ["mine", "mine/file"]


def test_everything_that_a_run_makes_is_known(tmp_path: Path) -> None:
    run = made(tmp_path / "run", tmp_path / "run" / "own disk", tmp_path / "disk")
    for name in ("metrics.jsonl", "summary.json", "summary.json.new", "crash.txt", "state/manifest.next.json"):
        (run.path / name).write_text("")
    for folder, names in (
        ("data", ("tokens.bin", "counted.bin", "offsets.bin", "index.json")),
        (".data.partial", ("tokens.bin",)),
        ("export/step-1", ("config.json", "model.safetensors", *COPIED_FILES)),
        ("export/.mine.partial", ("model-00001-of-00002.safetensors", "model.safetensors.index.json")),
        ("state/" + SCRATCH_PREFIX + "host-1", ("probe",)),
        (SCRATCH_PREFIX + "host-1", ("probe",)),
    ):
        (run.path / folder).mkdir(parents=True)
        for name in names:
            (run.path / folder / name).write_text("")
    run.remove()
    assert tree(tmp_path) == ["disk"]


def test_a_copy_is_refused_and_the_original_keeps_its_state(tmp_path: Path) -> None:
    made(tmp_path / "run", tmp_path / "disk")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    refuse(tmp_path / "copy", "OVS408", str(tmp_path / "run"), "by hand", folder=tmp_path)
    assert command(["runs", "rm", "--yes", str(tmp_path / "run")]) == 0
    assert tree(tmp_path / "disk") == []


def test_a_run_in_use_is_refused_also_where_only_its_other_disks_are(tmp_path: Path) -> None:
    run = made(tmp_path / "run", tmp_path / "disk")
    with DiskStore.open(run.state):
        refuse(run.path, "OVS405", folder=tmp_path)
        run.path.rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", tmp_path / "copy")
        refuse(tmp_path / "copy", "OVS405", folder=tmp_path)


@pytest.mark.parametrize("harm", ["damage", "remove"])
def test_state_on_other_disks_goes_although_the_manifest_is_damaged_or_missing(harm: str, tmp_path: Path) -> None:
    run = made(tmp_path / "run", tmp_path / "disk1", tmp_path / "disk2")
    other = made(tmp_path / "other", tmp_path / "disk1", tmp_path / "disk2")
    manifest = run.state / "manifest.json"
    manifest.write_bytes(b"x")
    if harm == "remove":
        manifest.unlink()
    assert run.remove() == []
    with DiskStore.open(other.state) as store:
        assert store.committed_step == 2
    other.remove()
    assert tree(tmp_path) == ["disk1", "disk2"]


def test_state_that_nothing_ties_to_the_run_is_named_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", tmp_path / "disk")
    (run.state / "manifest.json").unlink()
    shutil.rmtree(run.checkpoints)
    (root,) = (tmp_path / "disk").iterdir()
    assert command(["runs", "rm", "--yes", str(run.path)]) == 0
    assert f"{root} may hold state of this run" in " ".join(capsys.readouterr().err.split())
    assert root.exists() and not run.path.exists()


def test_state_elsewhere_goes_only_where_a_store_made_it(tmp_path: Path) -> None:
    run = made(tmp_path / "run", tmp_path / "disk")
    (root,) = (tmp_path / "disk").iterdir()
    (root / "slots" / "notes.txt").write_text("mine")
    refuse(run.path, "OVS604", str(root / "slots" / "notes.txt"), folder=tmp_path)
    with pytest.raises(OverspillError, match="OVS604"):
        run.remove(force=True)
    home = tmp_path / "home"  # what a forged manifest names
    shutil.move(root, home)
    with DiskStore.open(made(tmp_path / "other").state) as store:
        forged = encode(replace(store._head, directories=[str(home)]))
    (run.state / "manifest.json").write_bytes(forged)
    shutil.rmtree(run.checkpoints)
    run.remove()
    assert (home / "slots" / "notes.txt").exists()


def test_a_run_that_was_killed_while_its_store_was_made_is_removed_whole(tmp_path: Path) -> None:
    run = made(tmp_path / "run", tmp_path / "disk")
    (root,) = (tmp_path / "disk").iterdir()
    shutil.rmtree(run.checkpoints)
    (run.state / "manifest.json").unlink()
    (run.state / "creating.json").write_text(json.dumps([str(root)]))
    assert run.remove() == []
    assert tree(tmp_path) == ["disk"]


def test_outputs_into_the_state_of_a_run_are_refused(tmp_path: Path) -> None:
    run = made(tmp_path / "run", tmp_path / "disk")
    (root,) = (tmp_path / "disk").iterdir()
    before = tree(tmp_path)
    for inside in (run.state, run.checkpoints / "mine", run.state / "slots" / "a" / "b", root / "mine"):
        with pytest.raises(OverspillError, match=r"OVS105.*inside the state"):
            command(["new", str(inside / "job.toml")])
        with pytest.raises(OverspillError, match=r"OVS604.*inside the state"):
            RunDirectory(inside / "run").create(run.job())
    for outside in (run.path / "mine", run.exports / "mine", tmp_path / "disk" / "mine"):
        refuse_inside_state(outside, "OVS605")
    assert tree(tmp_path) == before
    assert first_stranger(run.path, [root]) is None
