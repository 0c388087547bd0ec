"""The store against a power loss at every point of scripted runs, and against mutants that lack one sync.

At each cut the surviving tree is rebuilt and opened: it must be at the last committed step (or the one being
committed), with every byte right, and so must every checkpoint. SIGKILL alone keeps the page cache and could not
find a missing fsync; see testing/powerloss.py for the model.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from overspill.errors import OverspillError
from overspill.tiers.disk import DiskStore, SlotSpec, StoreReader
from overspill.tiers.disk.owner import Owner, read_owner
from testing.powerloss import (
    Op,
    RecordingIO,
    UnsyncedIO,
    choosers,
    replay,
    with_rename_earlier,
    with_rename_later,
    without_sync,
    write_image,
)

SOURCE = Path(__file__).parents[2] / "src" / "overspill" / "tiers" / "disk"
SLOTS = [
    SlotSpec("b0000.exp_avg", "float32", (3000,), 12000, "moments"),
    SlotSpec("b0000.master", "int16", (3000,), 6000, "master"),
    SlotSpec("b0001.exp_avg", "float32", (3000,), 12000, "moments"),
]
Content = dict[str, bytes]


@dataclass
class Scenario:
    """Drives a store and marks in the log what must be found after a cut there."""

    base: Path
    directories: tuple[str, ...] = ()
    links: bool = True
    content: dict[int, Content] = field(default_factory=dict)  # by commit id, unlike steps never used twice
    log: list[Op] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.io = RecordingIO(self.base, links=self.links)
        self.commits = 0

    @property
    def home(self) -> Path:
        """The run's directory, before or after `move`, whichever is there."""
        moved = self.base / "moved"
        return moved if moved.exists() else self.base / "run"

    @property
    def store_path(self) -> Path:
        return self.home / "state"

    @property
    def checkpoints(self) -> Path:
        return self.home / "checkpoints"

    def create(self, pins: int = 1) -> None:
        self.io.mark(("create",))
        self.store = DiskStore.create(
            self.store_path,
            SLOTS,
            identity={},
            pins=pins,
            directories=[self.base / name for name in self.directories],
            checkpoints=self.checkpoints,
            piece_nbytes=4096,
            request_nbytes=4096,
            io=self.io,
        )
        self.run_id = self.store.run_id
        self.io.mark(("created",))

    def write(self, *names: str, checksum: bool = True) -> None:
        """New bytes for these slots (all by default), on top of what is there."""
        if not hasattr(self, "next"):
            self.next: Content = {}
        rng = np.random.default_rng(1000 + self.commits)
        for slot in SLOTS:
            if not names or slot.name in names:
                data = rng.integers(0, 256, slot.nbytes, dtype=np.uint8).tobytes()
                for start in range(0, slot.nbytes, 8192):
                    part = bytearray(data[start : start + 8192])
                    self.store.write_from(slot.name, start, part, checksum=checksum)
                self.next[slot.name] = data

    def prepare(self, step: int) -> None:
        self.commits += 1
        self.content[self.commits] = self.now | self.next
        self.io.mark(("prepare", self.commits))
        self.prepared = self.store.prepare(step, {"commit": self.commits})
        self.io.mark(("prepared", self.commits))

    @property
    def now(self) -> Content:
        return self.content.get(self.committed, {})

    committed = 0

    def decide(self) -> None:
        self.io.mark(("commit", self.commits))
        self.store.commit(self.prepared)
        self.committed, self.next = self.commits, {}
        self.io.mark(("committed", self.commits))

    def commit(self, step: int, *names: str, checksum: bool = True) -> None:
        self.write(*names, checksum=checksum)
        self.prepare(step)
        self.decide()

    def abandon(self) -> None:
        self.io.mark(("abandon",))
        self.store.abandon(self.prepared)
        self.next = {}
        self.io.mark(("abandoned",))

    def pin(self, name: str) -> None:
        self.io.mark(("pin", name, self.committed))
        self.store.pin(name)
        self.io.mark(("pinned", name, self.committed))

    def unpin(self, name: str) -> None:
        self.io.mark(("unpin", name))
        self.store.unpin(name)
        self.io.mark(("unpinned", name))

    def restore(self, name: str, commit: int) -> None:
        self.io.mark(("commit", commit))
        self.store.restore_pin(name)
        self.committed, self.next = commit, {}
        self.io.mark(("committed", commit))

    def kill(self) -> None:
        """As a kill: nothing is flushed or removed, only the descriptors go."""
        self.store.close()

    def move(self) -> None:
        """The user gives the run's directory another name; the next open takes over the directories elsewhere."""
        self.kill()
        self.io.mark(("move",))
        self.io.rename(self.base / "run", self.base / "moved", "move")
        self.io.sync_directory(self.base, "move-name")
        self.reopen()
        self.io.mark(("moved",))

    def reopen(self, *, forward: bool = False) -> None:
        if forward:
            self.io.mark(("commit", self.commits))
        self.store = DiskStore.open(
            self.store_path,
            checkpoints=self.checkpoints,
            request_nbytes=4096,
            io=self.io,
            on_prepared="commit" if forward else "abandon",
        )
        self.next = {}
        if forward:
            self.committed = self.commits
            self.io.mark(("committed", self.commits))

    def finish(self) -> Scenario:
        self.store.close()
        self.log = self.io.log
        return self


def life_of_a_run(base: Path) -> Scenario:
    run = Scenario(base)
    run.create()
    run.commit(0)
    run.commit(1)
    run.pin("step-1")
    run.commit(2, "b0000.exp_avg", "b0000.master")
    run.commit(3, checksum=False)
    run.write("b0001.exp_avg")
    run.kill()
    run.reopen()
    run.commit(4)
    run.pin("step-4")
    run.unpin("step-1")
    run.commit(5)
    run.commit(6)
    run.write()
    run.prepare(7)
    run.abandon()
    run.commit(7)
    run.write()
    run.prepare(8)
    run.kill()
    run.reopen(forward=True)
    run.commit(9)
    run.restore("step-4", 5)
    run.commit(5)
    run.unpin("step-4")
    run.commit(6)
    run.commit(7)
    return run.finish()


def several_disks(base: Path) -> Scenario:
    run = Scenario(base, directories=("disk1", "disk2"))
    run.create()
    run.commit(1)
    run.pin("a")
    run.commit(2)
    run.commit(3)
    run.pin("b")
    run.unpin("a")
    run.commit(4)
    run.kill()
    run.reopen()
    run.commit(5)
    run.restore("b", 3)
    run.commit(6)
    return run.finish()


def a_moved_run(base: Path) -> Scenario:
    run = Scenario(base, directories=("disk1", "disk2"))
    run.create()
    run.commit(1)
    run.pin("a")
    run.commit(2)
    run.move()
    run.commit(3)
    run.unpin("a")
    run.commit(4)
    return run.finish()


def no_hard_links(base: Path) -> Scenario:
    run = Scenario(base, links=False)
    run.create()
    run.commit(1)
    run.pin("a")
    run.commit(2)
    run.restore("a", 1)
    run.commit(3)
    run.unpin("a")
    run.commit(4)
    run.pin("b")
    run.commit(5)
    return run.finish()


SCENARIOS: dict[str, Callable[[Path], Scenario]] = {
    "life of a run": life_of_a_run,
    "several disks": several_disks,
    "a moved run": a_moved_run,
    "no hard links": no_hard_links,
}


@dataclass
class Expected:
    """What a cut here may and must leave."""

    created: bool = False
    commits: frozenset[int] = frozenset({0})
    pins: dict[str, int] = field(default_factory=dict)
    maybe: dict[str, int] = field(default_factory=dict)
    prepared: int | None = None
    maybe_prepared: int | None = None
    abandoned: bool = False
    owners: frozenset[str] = frozenset()  # which of the run's names the directories elsewhere may have as owner's

    def note(self, mark: tuple[object, ...]) -> None:
        kind, *facts = mark
        number = facts[-1] if facts else 0
        assert isinstance(number, int | str)
        if kind == "created":
            self.created, self.owners = True, frozenset({"run"})
        elif kind == "move":
            self.owners |= {"moved"}
        elif kind == "moved":
            self.owners = frozenset({"moved"})
        elif kind == "prepare":
            self.abandoned, self.maybe_prepared = False, int(number)
        elif kind == "prepared":
            self.maybe_prepared, self.prepared = None, int(number)
        elif kind == "commit":
            self.commits |= {int(number)}
            self.prepared = None
        elif kind == "committed":
            self.commits = frozenset({int(number)})
        elif kind == "abandon":
            self.maybe_prepared, self.prepared = self.prepared, None
        elif kind == "abandoned":
            self.maybe_prepared, self.abandoned = None, True
        elif kind == "pin":
            self.maybe[str(facts[0])] = int(number)
        elif kind == "pinned":
            self.pins[str(facts[0])] = self.maybe.pop(str(facts[0]))
        elif kind == "unpin":
            self.maybe[str(number)] = self.pins.pop(str(number))
        elif kind == "unpinned":
            del self.maybe[str(number)]


def problem(run: Scenario, expected: Expected, *, forward: bool) -> str | None:
    """Open what the power loss left; None when it is as it must be, else what is wrong."""
    if expected.created and (wrong := _wrong_owner(run, expected.owners)):
        return wrong
    try:
        store = DiskStore.open(
            run.store_path,
            slots=SLOTS,
            checkpoints=run.checkpoints,
            on_prepared="commit" if forward else "abandon",
            io=UnsyncedIO(),
        )
    except OverspillError as error:
        if not expected.created and error.code == "OVS601":
            DiskStore.create(run.store_path, SLOTS, identity={}, pins=1, io=UnsyncedIO()).close()
            return None
        return f"open: {error}"
    if wrong := _wrong_owner(run, frozenset({run.home.name})):
        store.close()
        return f"after open: {wrong}"
    with store:
        commit = store.extra.get("commit", 0)
        allowed = expected.commits
        if forward and expected.prepared is not None:
            allowed = frozenset({expected.prepared})
        elif forward and expected.maybe_prepared is not None:
            allowed |= {expected.maybe_prepared}
        if commit not in allowed:
            return f"at commit {commit}, not {sorted(allowed)}"
        try:
            if commit and (wrong := _differs(store, run.content[commit])):
                return f"commit {commit}: {wrong}"
            if wrong := _wrong_pins(store, run, expected):
                return wrong
            new = {slot.name: bytes([1 + number]) * slot.nbytes for number, slot in enumerate(SLOTS)}
            for _ in range(2):  # a file that was recycled though something needs it shows now
                for name, data in new.items():
                    store.write_from(name, 0, bytearray(data), checksum=True)
                store.commit(store.prepare(99, {}))
            return _differs(store, new) or _wrong_pins(store, run, expected)
        except OverspillError as error:
            return f"after open: {error}"


def _wrong_owner(run: Scenario, names: frozenset[str]) -> str | None:
    """Without its owner, or with half of one, a directory on another disk is anybody's: a copy of the run's, say."""
    owners = [Owner(run.base / name / "state", run.run_id) for name in names]
    for place in run.directories:
        for root in (run.base / place).iterdir():
            try:
                found = read_owner(UnsyncedIO(), root)
            except OverspillError as error:
                return f"{root.name} in {place}: {error}"
            if found not in owners:
                return f"{root.name} in {place} belongs to {found}, not to one of {owners}"
    return None


def _differs(store: DiskStore, content: Content) -> str | None:
    for name, data in content.items():
        found = bytearray(len(data))
        store.read_into(name, 0, found, verify=True)
        if found != data:
            return f"slot {name} holds other bytes"
    return None


def _wrong_pins(store: DiskStore, run: Scenario, expected: Expected) -> str | None:
    found = {pin.name: pin for pin in store.pins()}
    if not expected.pins.keys() <= found.keys() <= expected.pins.keys() | expected.maybe.keys():
        return f"checkpoints {sorted(found)}, not {sorted(expected.pins)} and perhaps {sorted(expected.maybe)}"
    for name, pin in found.items():
        with StoreReader(pin.path, io=UnsyncedIO()) as reader:
            damage = reader.damage()
            if damage is not None:
                return f"checkpoint {name}: {damage}"
            commit = reader.manifest.extra["commit"]
            if commit != (expected.pins | expected.maybe)[name]:
                return f"checkpoint {name} is of commit {commit}"
            for slot, data in run.content[commit].items():
                if reader.array(slot).tobytes() != data:
                    return f"checkpoint {name}: slot {slot} holds other bytes"
    return None


@cache
def record(name: str, base: Path) -> Scenario:
    clear(base)
    return SCENARIOS[name](base)


def clear(base: Path) -> None:
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()


def problems(run: Scenario, log: list[Op]) -> Iterator[str]:
    """Every wrong outcome over all cuts of ``log`` and all ways in which they may end."""
    expected = Expected()
    seen: set[int] = set()
    for cut, disk in replay(log):
        if cut and log[cut - 1].kind == "mark":
            expected.note(log[cut - 1].mark)
            seen.clear()
        look_forward = expected.abandoned or (expected.prepared or expected.maybe_prepared) is not None
        for chooser in choosers(seed=cut):
            image = disk.image(chooser)
            signature = hash(tuple(image.items()))
            if signature in seen:
                continue
            seen.add(signature)
            for forward in (False, True) if look_forward else (False,):
                clear(run.base)
                write_image(image, run.base)
                if wrong := problem(run, expected, forward=forward):
                    yield f"cut {cut} ({chooser.name}{', forward' if forward else ''}): {wrong}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Thousands of small trees are made here: in memory where the system has a place for that, ten times as fast."""
    shared_memory = Path("/dev/shm")
    if not os.access(shared_memory, os.W_OK):
        yield tmp_path_factory.mktemp("power") / "machine"
        return
    with tempfile.TemporaryDirectory(dir=shared_memory) as place:
        yield Path(place) / "machine"


@pytest.mark.parametrize("name", SCENARIOS)
def test_after_a_power_loss_at_any_point_the_store_is_at_its_last_committed_step(name: str, base: Path) -> None:
    run = record(name, base)
    assert list(problems(run, run.log)) == []


def test_the_scenarios_cut_the_power_at_500_points_and_more(base: Path) -> None:
    assert sum(len(record(name, base).log) for name in SCENARIOS) >= 500


def sync_labels() -> list[str]:
    """The label of every sync in the store's source."""
    text = "\n".join(path.read_text() for path in sorted(SOURCE.glob("*.py")))
    calls = re.findall(
        r'(?:fsync|fdatasync|sync_directory|sync_names|write_file|_copy)\([^()]*(?:\([^()]*\)[^()]*)*"([a-z-]+)"\s*\)',
        text,
    )
    return sorted(set(calls))


def finds_a_loss(base: Path, mutate: Callable[[list[Op]], list[Op]]) -> bool:
    for name in SCENARIOS:
        run = record(name, base)
        mutant = mutate(run.log)
        if mutant != run.log and next(problems(run, mutant), None) is not None:
            return True
    return False


@pytest.mark.parametrize("label", sync_labels())
def test_a_store_that_lacks_one_sync_is_caught(label: str, base: Path) -> None:
    assert finds_a_loss(base, lambda log: without_sync(log, label))


@pytest.mark.parametrize(
    ("rename", "sync"),
    [("commit", "manifest"), ("pin", "pin-manifest"), ("roll-forward", "manifest"), ("owner", "owner")],
)
def test_a_store_that_renames_before_it_syncs_is_caught(rename: str, sync: str, base: Path) -> None:
    assert finds_a_loss(base, lambda log: with_rename_earlier(log, rename, sync))


def test_a_store_that_recycles_a_checkpoint_before_it_is_dropped_is_caught(base: Path) -> None:
    assert finds_a_loss(base, lambda log: with_rename_later(log, "unpin", "manifest"))
