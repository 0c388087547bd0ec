"""State on other disks has one owner: a copy of a run never writes into, reclaims or removes its original's state."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from disk_cases import SLOTS, Content, commit, create, random_content, read, write

from overspill.errors import OverspillError
from overspill.tiers.disk import DiskStore, FileIO, StoreReader
from overspill.tiers.disk.owner import own_roots
from testing.faultyio import FaultyIO, at_call


def trained(path: Path, disk: Path) -> Content:
    """A store with its state on another disk, two steps, and a checkpoint of the first."""
    with create(path, directories=[disk]) as store:
        commit(store, 1)
        store.pin("step-1")
        return commit(store, 2)


def all_bytes(disk: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(disk)): file.read_bytes()
        for file in sorted(disk.rglob("*"))
        if file.is_file() and file.name != "lock"
    }


def only_root(disk: Path) -> Path:
    (root,) = disk.iterdir()
    return root


@pytest.mark.parametrize("how", [["cp", "-r"], ["cp", "-al"]])
def test_a_copy_beside_its_original_is_refused_with_both_names_and_changes_nothing(
    how: list[str], tmp_path: Path
) -> None:
    content = trained(tmp_path / "a", tmp_path / "disk")
    subprocess.run([*how, str(tmp_path / "a"), str(tmp_path / "b")], check=True)
    before = all_bytes(tmp_path / "disk")
    for attempt in (
        lambda: DiskStore.open(tmp_path / "b"),
        lambda: DiskStore.open(tmp_path / "b", from_pin="step-1"),
        lambda: DiskStore.open(tmp_path / "b", on_prepared="commit"),
        lambda: StoreReader(tmp_path / "b", home=tmp_path / "b"),
        lambda: StoreReader(tmp_path / "b" / "checkpoints" / "step-1", home=tmp_path / "b"),
        lambda: own_roots(FileIO(), tmp_path / "b", [tmp_path / "disk"]),
    ):
        with pytest.raises(OverspillError) as caught:
            attempt()
        assert caught.value.code == "OVS408"
        assert str(tmp_path / "a") in str(caught.value) and str(tmp_path / "b") in str(caught.value)
    assert all_bytes(tmp_path / "disk") == before
    with DiskStore.open(tmp_path / "a") as store:
        assert read(store) == content
        assert store.notes == []


def test_a_copy_is_refused_by_name_also_while_its_original_is_open_or_damaged(tmp_path: Path) -> None:
    trained(tmp_path / "a", tmp_path / "disk")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with DiskStore.open(tmp_path / "a"), pytest.raises(OverspillError, match="OVS408"):
        DiskStore.open(tmp_path / "b")
    (tmp_path / "a" / "manifest.json").write_bytes(b"x")
    with pytest.raises(OverspillError, match="OVS408"):
        DiskStore.open(tmp_path / "b")
    shutil.rmtree(tmp_path / "a" / "checkpoints")  # nothing there says any more which run it is
    with pytest.raises(OverspillError, match="OVS408"):
        DiskStore.open(tmp_path / "b")


def test_a_run_that_was_moved_takes_its_state_along_and_says_so(tmp_path: Path) -> None:
    content = trained(tmp_path / "a", tmp_path / "disk")
    (tmp_path / "a").rename(tmp_path / "c")
    with StoreReader(tmp_path / "c", home=tmp_path / "c") as reader:
        reader.verify()
    with DiskStore.open(tmp_path / "c") as store:
        assert read(store) == content
        (note,) = store.notes
        assert str(tmp_path / "a") in note and str(tmp_path / "c") in note
    with DiskStore.open(tmp_path / "c") as store:
        assert store.notes == []
    shutil.copytree(tmp_path / "c", tmp_path / "a")  # a copy where the original was is a copy still
    with pytest.raises(OverspillError, match="OVS408"):
        DiskStore.open(tmp_path / "a")


def test_a_copy_takes_over_when_its_original_is_gone_or_another_run_took_its_place(tmp_path: Path) -> None:
    content = trained(tmp_path / "a", tmp_path / "disk")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    trained(tmp_path / "a", tmp_path / "disk")
    with DiskStore.open(tmp_path / "b") as store:
        assert read(store) == content
        assert len(store.notes) == 1


def test_a_store_opened_through_a_symbolic_link_is_the_same_store(tmp_path: Path) -> None:
    trained(tmp_path / "a", tmp_path / "disk")
    (tmp_path / "link").symlink_to("a")
    with DiskStore.open(tmp_path / "link") as store:
        assert store.notes == []
    facts = json.loads((only_root(tmp_path / "disk") / "owner.json").read_text())
    assert facts["home"] == str(tmp_path / "a")


def test_state_of_a_store_without_an_owners_file_is_taken_over(tmp_path: Path) -> None:
    content = trained(tmp_path / "a", tmp_path / "disk")
    for name in ("owner.json", "lock"):
        (only_root(tmp_path / "disk") / name).unlink()
    with DiskStore.open(tmp_path / "a") as store:
        assert read(store) == content
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(OverspillError, match="OVS408"):
        DiskStore.open(tmp_path / "b")


@pytest.mark.parametrize("text", [b"", b"[]", b'{"format": "other"}', b"\xff\x00"])
def test_a_damaged_owners_file_is_refused_by_name(text: bytes, tmp_path: Path) -> None:
    trained(tmp_path / "a", tmp_path / "disk")
    (only_root(tmp_path / "disk") / "owner.json").write_bytes(text)
    with pytest.raises(OverspillError, match=r"OVS404.*owner\.json.*Remove the file"):
        DiskStore.open(tmp_path / "a")


def test_a_process_that_uses_the_state_keeps_others_out_though_it_reached_it_by_another_path(tmp_path: Path) -> None:
    trained(tmp_path / "a", tmp_path / "disk")
    with DiskStore.open(tmp_path / "a"):
        (tmp_path / "a").rename(tmp_path / "c")
        shutil.copytree(tmp_path / "c", tmp_path / "d")
        with pytest.raises(OverspillError, match=f"OVS405.*process {os.getpid()} "):
            DiskStore.open(tmp_path / "d")
    DiskStore.open(tmp_path / "d").close()


def test_a_fork_does_not_keep_the_locks_of_other_disks(tmp_path: Path) -> None:
    trained(tmp_path / "a", tmp_path / "disk")
    with DiskStore.open(tmp_path / "a"):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write_end, b"1")
            time.sleep(30)
            os._exit(0)
        assert os.read(read_end, 1) == b"1"
    DiskStore.open(tmp_path / "a").close()  # although the child lives
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read_end)
    os.close(write_end)


def test_a_start_in_a_copy_of_a_half_made_store_leaves_the_originals_state_alone(tmp_path: Path) -> None:
    with create(tmp_path / "a", directories=[tmp_path / "disk"]) as store:
        root = only_root(tmp_path / "disk")
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        (tmp_path / "b" / "manifest.json").unlink()
        (tmp_path / "b" / "creating.json").write_text(json.dumps([str(root)]))
        create(tmp_path / "b").close()
        content = commit(store, 1)
        assert read(store) == content
    (tmp_path / "a" / "manifest.json").unlink()  # its own killed start is undone
    (tmp_path / "a" / "creating.json").write_text(json.dumps([str(root)]))
    create(tmp_path / "a").close()
    assert not root.exists()


def test_a_missing_manifest_offers_the_newest_checkpoint_and_no_new_store_is_made_over_it(tmp_path: Path) -> None:
    with create(tmp_path / "a", pins=2) as store:
        content = commit(store, 1)
        store.pin("step-1")
        write(store, random_content(SLOTS, 2))
        store.commit(store.prepare(2, {}))
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(OverspillError, match=r"OVS404.*manifest is missing.*--from step-1"):
        DiskStore.open(tmp_path / "a")
    with pytest.raises(OverspillError, match=r"OVS604.*step-1.*--from"):
        create(tmp_path / "a")
    with DiskStore.open(tmp_path / "a", from_pin="step-1") as store:
        assert (store.committed_step, read(store)) == (1, content)


def test_a_checkpoint_that_is_dropped_while_it_is_read_is_said_to_be_dropped(tmp_path: Path) -> None:
    with create(tmp_path / "a") as store:
        commit(store, 1)
        store.pin("step-1")
        with store.open_pin("step-1") as reader, store.open_pin("step-1") as other:
            reader.array(SLOTS[0].name)
            store.unpin("step-1")
            for use in (lambda: reader.array(SLOTS[1].name), other.verify):
                with pytest.raises(OverspillError, match=r"OVS601.*dropped meanwhile.*[Tt]ry again"):
                    use()


def test_a_stores_own_directories_are_found_with_a_damaged_manifest_or_none(tmp_path: Path) -> None:
    disk, io = tmp_path / "disk", FileIO()
    trained(tmp_path / "a", disk)
    root = only_root(disk)
    trained(tmp_path / "other", disk)
    assert own_roots(io, tmp_path / "a", [disk]) == ([root], [])
    (tmp_path / "a" / "manifest.json").write_bytes(b"x")
    assert own_roots(io, tmp_path / "a", [disk]) == ([root], [])
    (tmp_path / "a" / "manifest.json").unlink()
    assert own_roots(io, tmp_path / "a", []) == ([root], [])  # by its checkpoint's manifest
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    # Now nothing says that it is not an earlier run's of the same path, which was moved and lives.
    assert own_roots(io, tmp_path / "a", [disk]) == ([], [root])


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_an_error_in_any_single_call_of_a_take_over_is_named_and_can_be_tried_again(error: int, tmp_path: Path) -> None:
    content = trained(tmp_path / "a", tmp_path / "disk")
    rehearsal = FaultyIO()
    (tmp_path / "a").rename(tmp_path / "0")
    DiskStore.open(tmp_path / "0", io=rehearsal).close()
    for number in range(0, len(rehearsal.calls), 3):
        (tmp_path / str(number)).rename(tmp_path / str(number + 3))
        with contextlib.suppress(OverspillError):
            DiskStore.open(tmp_path / str(number + 3), io=FaultyIO(at_call(number, error))).close()
        with DiskStore.open(tmp_path / str(number + 3)) as store:
            assert read(store) == content
        facts = json.loads((only_root(tmp_path / "disk") / "owner.json").read_text())
        assert facts["home"] == str(tmp_path / str(number + 3))
