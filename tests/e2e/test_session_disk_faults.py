"""What a disk can do to a run: each fault gives its error or its stated fallback, and the last commit stays good."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from overspill.errors import OverspillError
from overspill.plan import Durability
from overspill.tiers.disk import store as store_module
from testing.faultyio import FaultyIO
from tests.e2e.session_cases import (
    make_model,
    make_plan,
    one_step,
    open_session,
    same_weights,
    train,
    undisturbed,
    weights_of,
)

STEPS = 8
UseDisk = Callable[[FaultyIO], FaultyIO]


@pytest.fixture
def use_disk(monkeypatch: pytest.MonkeyPatch) -> UseDisk:
    """Stores made from now on talk to this disk."""

    def use(disk: FaultyIO) -> FaultyIO:
        monkeypatch.setattr(store_module, "FileIO", lambda: disk)
        return disk

    return use


class Fault:
    """Every call of one kind on slot files fails with ``error``, from the moment that it is armed."""

    def __init__(self, kind: str, error: int) -> None:
        self.kind, self.error = kind, error
        self.armed = threading.Event()

    def __call__(self, kind: str, path: Path) -> None:
        if self.armed.is_set() and kind == self.kind and (kind == "rename" or path.suffix != ".json"):
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("overlap", ["step", "forward"])
@pytest.mark.parametrize(
    ("kind", "error", "code"),
    [
        ("read", errno.EIO, "OVS403"),
        ("write", errno.EIO, "OVS403"),
        ("sync", errno.EIO, "OVS403"),
        ("rename", errno.EIO, "OVS403"),
        ("write", errno.ENOSPC, "OVS401"),
    ],
)
def test_an_error_of_the_disk_fails_the_session_and_a_resume_repeats_the_undisturbed_run(
    kind: str, error: int, code: str, overlap: str, tmp_path: Path, use_disk: UseDisk
) -> None:
    fault = Fault(kind, error)
    use_disk(FaultyIO(fault))
    plan = make_plan("mixed", overlap=overlap)
    model = make_model()
    session = open_session(model, tmp_path / "state", plan)
    losses = train(session, model, 3)
    assert session.committed_step == 3
    fault.armed.set()
    with pytest.raises(OverspillError, match=code):
        for _ in range(3):
            one_step(session, model)
    # From here on the session stays failed, and says the same cause each time.
    for use in (session.flush, session.optimizer.step, lambda: session.checkpoint("late")):
        with pytest.raises(OverspillError, match=code):
            use()
    committed = session.committed_step
    assert committed is not None and 3 <= committed <= 4
    session.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("overspill-")]

    use_disk(FaultyIO())
    wanted_losses, wanted_weights = undisturbed(STEPS)
    assert losses == wanted_losses[:3]
    again = make_model()
    with open_session(again, tmp_path / "state", plan, resume=True) as session:
        assert session.step == committed
        assert train(session, again, STEPS) == wanted_losses[committed:]
        assert same_weights(weights_of(again), wanted_weights)


def test_too_little_space_is_known_before_a_weight_is_moved(tmp_path: Path, use_disk: UseDisk) -> None:
    use_disk(FaultyIO(free_nbytes=100_000))
    model = make_model()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(OverspillError, match=r"OVS401.*97\.7 KiB are free"):
        open_session(model, tmp_path / "state", make_plan())
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MiB, enough for the small model's state four times."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_others_fill_during_the_run_does_not_stop_it(tmp_path: Path, small_disk: Path) -> None:
    model = make_model()
    with open_session(model, small_disk / "state", make_plan("disk")) as session:
        losses = train(session, model, 2)
        with suppress(OSError):
            (small_disk / "filler").write_bytes(bytes(8 << 20))
        assert os.statvfs(small_disk).f_bavail * 4096 < 16384
        losses += train(session, model, STEPS)
        assert session.committed_step == STEPS
        assert (losses, same_weights(weights_of(model), undisturbed(STEPS)[1])) == (undisturbed(STEPS)[0], True)


def test_a_disk_that_is_full_is_refused_with_need_and_free(small_disk: Path) -> None:
    with suppress(OSError):
        (small_disk / "filler").write_bytes(bytes(8 << 20))
    with pytest.raises(OverspillError, match="OVS401"):
        open_session(make_model(), small_disk / "state", make_plan("disk"))


def test_a_file_system_mounted_read_only_is_refused_by_name(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OverspillError, match=rf"OVS402.*{small_disk}"):
        open_session(make_model(), small_disk / "state", make_plan("disk"))


def test_a_directory_without_write_permission_is_refused_at_attach(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
import torch
from overspill import attach
from overspill.errors import OverspillError
from tests.e2e.session_cases import make_model, make_plan
place = Path(sys.argv[1])
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())  # imports what this user may not be able to read
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
try:
    attach(model, optimizer=optimizer, plan=make_plan(), directory=place / "state")
except OverspillError as error:
    print(error)
"""
    place = tmp_path / "closed"
    place.mkdir(mode=0o555)
    root = Path(__file__).resolve().parent.parent.parent
    command = [sys.executable, "-c", code, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=root)
    assert "[OVS402]" in done.stdout, done.stderr
    assert str(place) in done.stdout


@pytest.mark.parametrize(
    ("missing", "word"), [({"direct": False}, "O_DIRECT"), ({"links": False}, "hard links")], ids=["direct", "links"]
)
def test_what_a_file_system_lacks_is_said_and_changes_no_bit(
    missing: dict[str, bool], word: str, tmp_path: Path, use_disk: UseDisk
) -> None:
    use_disk(FaultyIO(**missing))  # type: ignore[arg-type]
    model = make_model()
    with open_session(model, tmp_path / "state", make_plan("mixed")) as session:
        train(session, model, 4)
        session.checkpoint("four")
        train(session, model, 6)
        session.checkpoint("six")
        notes = [*session.notes, *session.store.notes]  # type: ignore[union-attr]
        assert [note for note in notes if word in note], notes
    for name in ("four", True):
        again = make_model()
        with open_session(again, tmp_path / "state", make_plan("disk"), resume=name) as session:
            train(session, again, STEPS)
            assert same_weights(weights_of(again), undisturbed(STEPS)[1])


def test_a_second_run_in_one_directory_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    model, other = make_model(), make_model()
    with open_session(model, tmp_path / "state", make_plan()) as session:
        losses = train(session, model, 2)
        for resume in (False, True):
            with pytest.raises(OverspillError, match=f"OVS405.*process {os.getpid()} "):
                open_session(other, tmp_path / "state", make_plan(), resume=resume)
        losses += train(session, model, STEPS)
        assert losses == undisturbed(STEPS)[0]
    with pytest.raises(OverspillError, match="OVS604"):
        open_session(other, tmp_path / "state", make_plan())


def test_a_truncated_or_flipped_slot_is_refused_by_name_and_the_good_checkpoint_leads_on(tmp_path: Path) -> None:
    model = make_model()
    with open_session(model, tmp_path / "state", make_plan(durability=Durability())) as session:
        train(session, model, 4)
        session.checkpoint("four")
        train(session, model, 6)
        session.checkpoint("six")
    committed = max((tmp_path / "state" / "checkpoints" / "six").rglob("f*"))
    data = bytearray(committed.read_bytes())
    data[100] ^= 1
    committed.write_bytes(data)  # through the hard link: the committed version and checkpoint six, both
    with pytest.raises(OverspillError, match=r"OVS404.*four"):
        open_session(make_model(), tmp_path / "state", make_plan(), resume=True)
    again = make_model()
    with open_session(again, tmp_path / "state", make_plan(), resume="four") as session:
        assert session.step == 4
        train(session, again, STEPS)
        assert same_weights(weights_of(again), undisturbed(STEPS)[1])
