"""The disk store when something is wrong: errors of the disk, damage, no space, no permission, kills, forks."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from disk_cases import SLOTS, Content, commit, create, random_content, read, slot, write

from overspill.errors import OverspillError
from overspill.tiers.disk import DiskStore, FileIO, StoreReader
from testing.faultyio import FaultyIO, at_call


def scene(path: Path, io: FileIO, reached: list[str], content: dict[int, Content]) -> None:
    """A little of everything; ``reached`` says how far it came, ``content`` what each step holds."""
    content[1] = random_content(SLOTS, 1)
    content[2] = random_content(SLOTS, 2)
    with create(path, io=io) as store:
        reached.append("created")
        write(store, content[1], part_nbytes=20000)
        first = store.prepare(1, {})
        reached.append("prepared 1")
        store.commit(first)
        reached.append("committed 1")
        store.pin("a")
        reached.append("pinned")
        write(store, content[2], part_nbytes=20000, checksum=False)
        read(store)
        second = store.prepare(2, {})
        reached.append("prepared 2")
        store.commit(second)
        reached.append("committed 2")
        store.restore_pin("a")
        reached.append("restored")
        store.unpin("a")
        reached.append("unpinned")


@pytest.mark.parametrize(
    ("error", "code"),
    [(errno.EIO, "OVS403"), (errno.ENOSPC, "OVS401"), (errno.EACCES, "OVS402"), (errno.EROFS, "OVS402")],
)
def test_an_error_in_any_single_call_is_named_and_leaves_a_committed_state(
    error: int, code: str, tmp_path: Path
) -> None:
    rehearsal = FaultyIO()
    scene(tmp_path / "rehearsal", rehearsal, [], {})
    step = 1 if error == errno.EIO else 7
    for number in range(0, len(rehearsal.calls), step):
        path = tmp_path / "s"
        shutil.rmtree(path, ignore_errors=True)
        io = FaultyIO(at_call(number, error))
        reached: list[str] = []
        content: dict[int, Content] = {}
        try:
            scene(path, io, reached, content)
        except OverspillError as caught:
            assert caught.code in (code, "OVS403", "OVS501"), (number, io.calls[-1], str(caught))
        if "created" not in reached:
            with suppress(OverspillError):
                create(path).close()  # nothing was left that prevents another try
                continue
        with DiskStore.open(path) as store:
            allowed = {
                "created": {None, 1},
                "prepared 1": {None, 1},
                "committed 1": {1},
                "pinned": {1},
                "prepared 2": {1, 2},
                "committed 2": {1, 2},
                "restored": {1},
                "unpinned": {1},
            }[reached[-1]]
            assert store.committed_step in allowed, (number, rehearsal.calls[number], reached)
            if store.committed_step is not None:
                assert read(store) == content[store.committed_step]
            for pin in store.pins():
                with StoreReader(pin.path) as reader:
                    reader.verify()
            assert read(store) if store.committed_step else True
            again = commit(store, 9)
            assert read(store) == again


def failing(kind: str, error: int, part: str = "") -> FaultyIO:
    """Armed by ``io.armed = True``: every call of this kind on a path with this part fails."""

    def fail(called: str, path: Path) -> None:
        if getattr(io, "armed", False) and called == kind and part in str(path):
            raise OSError(error, os.strerror(error))

    io = FaultyIO(fail)
    return io


@pytest.mark.parametrize("kind", ["read", "write", "sync"])
def test_an_eio_fails_the_store_until_rollback_and_the_committed_step_stays(kind: str, tmp_path: Path) -> None:
    io = failing(kind, errno.EIO, "slots/f")
    with create(tmp_path / "s", io=io) as store:
        content = commit(store, 1)
        io.armed = True  # type: ignore[attr-defined]
        with pytest.raises(OverspillError, match=r"OVS403.*slots/f"):
            write(store, random_content(SLOTS, 2), checksum=False)
            store.prepare(2, {})
        if kind != "read":
            with pytest.raises(OverspillError, match="OVS501"):
                read(store)
        io.armed = False  # type: ignore[attr-defined]
        store.rollback()
        assert read(store) == content
        content = commit(store, 2)
    with DiskStore.open(tmp_path / "s") as store:
        assert (store.committed_step, read(store)) == (2, content)


def test_short_reads_and_writes_are_finished(tmp_path: Path) -> None:
    for short_nbytes in (512, 4096, 5000):
        path = tmp_path / str(short_nbytes)
        direct = short_nbytes != 5000
        io = FaultyIO(short_nbytes=4096 if short_nbytes == 512 else short_nbytes, direct=direct)
        with create(path, io=io, request_nbytes=16384) as store:
            content = commit(store, 1, part_nbytes=20000)
            assert read(store) == content


def test_a_file_system_without_o_direct_is_said_once_and_works(tmp_path: Path) -> None:
    with create(tmp_path / "s", io=FaultyIO(direct=False)) as store:
        content = commit(store, 1)
        commit(store, 2)
        store.rollback()
        assert not store.odirect
        assert [note for note in store.notes if "O_DIRECT" in note] == store.notes
        assert len(store.notes) == 1
        store.pin("a")
    with DiskStore.open(tmp_path / "s", io=FaultyIO(direct=False)) as store:
        assert read(store) != content


def test_a_file_system_without_hard_links_gets_copies_and_says_so_once(tmp_path: Path) -> None:
    with create(tmp_path / "s", pins=2, io=FaultyIO(links=False)) as store:
        content = commit(store, 1)
        store.pin("a")
        commit(store, 2)
        store.pin("b")
        commit(store, 3)
        assert len(store.notes) == 1
        assert "no hard links" in store.notes[0]
        store.restore_pin("a")
        assert read(store) == content
        store.unpin("a")
        store.unpin("b")
        commit(store, 2)
        assert len(list((tmp_path / "s" / "slots").iterdir())) == 4 * len(SLOTS)


def test_checkpoints_on_another_file_system_are_copies(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if not os.access(other, os.W_OK) or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system at /dev/shm")
    home = other / f"overspill-test-{os.getpid()}"
    try:
        with create(tmp_path / "s", checkpoints=home) as store:
            content = commit(store, 1)
            store.pin("a")
            commit(store, 2)
            assert "no hard links" in store.notes[0]
            store.restore_pin("a")
            assert read(store) == content
            store.unpin("a")
            commit(store, 3)
        with DiskStore.open(tmp_path / "s", checkpoints=home) as store:
            assert store.pins() == []
    finally:
        shutil.rmtree(home, ignore_errors=True)


# space and permission


def test_too_little_space_is_refused_at_creation_with_need_and_free(tmp_path: Path) -> None:
    with pytest.raises(OverspillError) as caught:
        create(tmp_path / "s", [slot("b0000.exp_avg", 1 << 20)], pins=2, io=FaultyIO(free_nbytes=10 << 20))
    assert caught.value.code == "OVS401"
    assert "16.0 MiB" in str(caught.value)
    assert "10.0 MiB" in str(caught.value)
    assert list((tmp_path / "s" / "slots").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 16 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_full_at_creation_leaves_nothing_behind(small_disk: Path) -> None:
    with pytest.raises(OverspillError, match=r"OVS401.*24\.0 MiB.*16\.0 MiB"):
        create(small_disk / "s", [slot("b0000.exp_avg", 2 << 20)], pins=1)
    (small_disk / "filler").write_bytes(bytes(6 << 20))
    io = FaultyIO(free_nbytes=1 << 30)  # as when another process takes the space meanwhile
    with pytest.raises(OverspillError, match="OVS401"):
        create(small_disk / "s", [slot("b0000.exp_avg", 1 << 20)], pins=1, io=io)
    (small_disk / "filler").unlink()
    with create(small_disk / "s", [slot("b0000.exp_avg", 1 << 20)], pins=1) as store:
        commit(store, 1, part_nbytes=1 << 20)


def test_a_disk_that_others_fill_later_cannot_stop_the_run(small_disk: Path) -> None:
    with create(small_disk / "s", [slot("b0000.exp_avg", 1 << 20)], pins=1) as store:
        commit(store, 1, part_nbytes=1 << 20)
        with suppress(OSError):
            (small_disk / "filler").write_bytes(bytes(16 << 20))
        for step in (2, 3):
            content = commit(store, step, part_nbytes=1 << 20)
        with pytest.raises(OverspillError, match="OVS401"):
            for number in range(1000):  # manifests are the only thing that still needs space
                store.commit(store.prepare(4 + number, {"long": "x" * 4096 * number}))
        step = store.committed_step
        store.rollback()
        assert read(store) == content
    (small_disk / "filler").unlink()
    with DiskStore.open(small_disk / "s") as store:
        assert (store.committed_step, read(store)) == (step, content)


def as_nobody(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code as a user without any right here."""
    prologue = f"import os, sys; sys.path[:0] = {sys.path!r}\n"
    prologue += "from pathlib import Path; from disk_cases import *; from overspill.errors import OverspillError\n"
    prologue += "if os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
    command = [sys.executable, "-c", prologue + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_directory_without_write_permission_is_refused_by_name(tmp_path: Path) -> None:
    place = Path("/tmp") / f"overspill-test-{os.getpid()}"
    place.mkdir(mode=0o755)
    try:
        if os.geteuid() != 0:
            place.chmod(0o555)
        code = "try: create(Path(sys.argv[1]) / 's')\nexcept OverspillError as error: print(error)"
        done = as_nobody(code, str(place))
        assert "[OVS402]" in done.stdout, done.stderr
        assert str(place) in done.stdout
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "s"):
        with pytest.raises(OverspillError, match="OVS402"):
            create(path)


# two owners


def test_a_second_owner_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        commit(store, 1)
        for attempt in (lambda: create(tmp_path / "s"), lambda: DiskStore.open(tmp_path / "s")):
            with pytest.raises(OverspillError, match=f"OVS405.*process {os.getpid()} "):
                attempt()
    with pytest.raises(OverspillError, match="OVS604"):
        create(tmp_path / "s")
    with pytest.raises(OverspillError, match="OVS601"):
        DiskStore.open(tmp_path / "nothing")
    DiskStore.open(tmp_path / "s").close()


def test_a_forked_child_is_refused_and_does_not_keep_the_lock(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        commit(store, 1)
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            codes = []
            for use in (lambda: read(store), lambda: store.prepare(2, {}), lambda: store.pin("a"), store.rollback):
                try:
                    use()
                except OverspillError as error:
                    codes.append(error.code)
            os.write(write_end, " ".join(codes).encode())
            time.sleep(30)
            os._exit(0)
        assert os.read(read_end, 100) == b"OVS503 OVS503 OVS503 OVS503"
        assert len(read(store)) == len(SLOTS)  # the parent goes on
    DiskStore.open(tmp_path / "s").close()  # although the child lives
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read_end)
    os.close(write_end)


# kills and damage

KILLED = """
step = 0
store = create(Path(sys.argv[1]))
while True:
    step += 1
    write(store, random_content(SLOTS, step))
    store.commit(store.prepare(step, {}))
    print(step, flush=True)
    if step % 3 == 0:
        store.pin(f"step-{step}")
        for pin in store.pins()[:-1]:
            store.unpin(pin.name)
"""


@pytest.mark.parametrize("seed", range(5))
def test_after_sigkill_the_store_is_at_the_last_step_or_the_one_being_committed(seed: int, tmp_path: Path) -> None:
    prologue = f"import sys; sys.path[:0] = {sys.path!r}\nfrom pathlib import Path; from disk_cases import *\n"
    command = [sys.executable, "-c", prologue + KILLED, str(tmp_path / "s")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(random.Random(seed).uniform(0, 0.5))
        process.kill()
        said = [int(line) for line in process.stdout.read().split()] or [1]
    with DiskStore.open(tmp_path / "s") as store:
        assert store.committed_step in (said[-1], said[-1] + 1)
        assert read(store) == random_content(SLOTS, store.committed_step)
        for pin in store.pins():
            with store.open_pin(pin.name) as reader:
                reader.verify()
        content = commit(store, 1000)
        assert read(store) == content


def test_what_a_killed_run_was_writing_is_named_and_reclaimed(tmp_path: Path) -> None:
    code = "store = create(Path(sys.argv[1])); commit(store, 1)\nimport time; time.sleep(0.05)\n"
    code += "write(store, random_content(SLOTS[:1], 2)); os.kill(os.getpid(), 9)"
    prologue = f"import os, sys; sys.path[:0] = {sys.path!r}\nfrom pathlib import Path; from disk_cases import *\n"
    subprocess.run([sys.executable, "-c", prologue + code, str(tmp_path / "s")], check=False, timeout=60)
    (tmp_path / "s" / "checkpoints" / ".building-x").mkdir()
    (tmp_path / "s" / "slots" / "junk").write_text("not ours")
    with DiskStore.open(tmp_path / "s") as store:
        names = [Path(name).name for name in store.reclaimed]
        assert len([name for name in names if name.startswith("f")]) == 1
        assert {".building-x", "junk"} <= set(names)
        assert len(list((tmp_path / "s" / "slots").iterdir())) == 3 * len(SLOTS)
        commit(store, 2)
    with DiskStore.open(tmp_path / "s") as store:
        assert store.reclaimed == []


def damaged(path: Path, harm: Callable[[bytearray], bytearray]) -> None:
    """Change a file behind the store's back, in a copy of its own (a checkpoint may share it)."""
    data = harm(bytearray(path.read_bytes()))
    path.unlink()
    path.write_bytes(data)


def flip(data: bytearray) -> bytearray:
    data[len(data) // 3] ^= 0x10
    return data


def truncate(data: bytearray) -> bytearray:
    return data[: len(data) // 2]


@pytest.mark.parametrize("harm", [flip, truncate])
@pytest.mark.parametrize("what", ["slot", "manifest"])
def test_a_damaged_file_is_refused_by_name_and_the_newest_good_checkpoint_is_offered(
    harm: Callable[[bytearray], bytearray], what: str, tmp_path: Path
) -> None:
    with create(tmp_path / "s", pins=3) as store:
        content = {step: commit(store, step) for step in (1, 2)}
        store.pin("step-2")
        commit(store, 3)
        pinned = store.pin("step-3")
        with store.open_pin("step-3") as reader:
            damaged(reader.file("b0001.exp_avg"), flip)
        commit(store, 4)
        files = [state.committed.file.path for state in store._states.values() if state.committed]
    assert pinned.exists()
    bad = files[0] if what == "slot" else tmp_path / "s" / "manifest.json"
    damaged(bad, harm)
    with pytest.raises(OverspillError) as caught:
        DiskStore.open(tmp_path / "s", slots=SLOTS)
    assert caught.value.code == "OVS404"
    assert str(bad) in str(caught.value)
    assert "--from step-2" in str(caught.value)
    if what == "slot":
        assert "b0000.exp_avg" in str(caught.value)
    with DiskStore.open(tmp_path / "s", slots=SLOTS, from_pin="step-2") as store:
        assert (store.committed_step, read(store)) == (2, content[2])
        with pytest.raises(OverspillError, match=r"OVS404.*b0001\.exp_avg"):
            store.restore_pin("step-3")
        assert (store.committed_step, read(store)) == (2, content[2])


def test_a_missing_slot_file_is_refused_by_name(tmp_path: Path) -> None:
    with create(tmp_path / "s") as store:
        commit(store, 1)
        file = next(state.committed.file.path for state in store._states.values() if state.committed)
    file.unlink()
    with pytest.raises(OverspillError, match=r"OVS404.*missing.*No checkpoint of this run verifies"):
        DiskStore.open(tmp_path / "s")


def test_damage_that_happens_later_is_found_by_a_verified_read(tmp_path: Path) -> None:
    with create(tmp_path / "s", verify_reads=True) as store:
        commit(store, 1)
        file = next(state.committed.file.path for state in store._states.values() if state.committed)
        with file.open("r+b") as opened:
            opened.seek(4096)
            opened.write(b"\x00\x01\x02\x03")
            os.fsync(opened.fileno())
        store.read_into("b0000.exp_avg", 0, bytearray(4096))
        with pytest.raises(OverspillError, match=r"OVS404.*b0000\.exp_avg.*bytes 4096 to 8192"):
            store.read_into("b0000.exp_avg", 5000, bytearray(100))
