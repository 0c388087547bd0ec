"""The store against a model of ten lines, under any order of calls, with kills in between (hypothesis)."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from disk_cases import Content, create, slot
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from overspill.errors import OverspillError
from overspill.tiers.disk import DiskStore, Prepared
from testing.powerloss import UnsyncedIO

SLOTS = [slot("s0", 3000, "uint8"), slot("s1", 2500, "float32"), slot("s2", 1, "float32")]
NAMES = [spec.name for spec in SLOTS]
NBYTES = {spec.name: spec.nbytes for spec in SLOTS}


class StoreMachine(RuleBasedStateMachine):
    """``committed`` and ``working`` are what the store must hold; ``holes``: bytes of the working version to come."""

    @initialize()
    def make(self) -> None:
        self.place = Path(tempfile.mkdtemp())
        self.store = create(self.place / "s", SLOTS, pins=2, io=UnsyncedIO())
        self.committed: Content = {}
        self.step: int | None = None
        self.working: dict[str, bytearray] = {}
        self.written: dict[str, np.ndarray] = {}
        self.prepared: Prepared | None = None
        self.prepared_content: Content = {}
        self.pins: dict[str, tuple[int, Content]] = {}
        self.count = 0

    def base(self, name: str) -> bytes | None:
        return (self.prepared_content if self.prepared else self.committed).get(name)

    @rule(name=st.sampled_from(NAMES), data=st.data(), checksum=st.booleans())
    def write(self, name: str, data: st.DataObject, checksum: bool) -> None:
        start = data.draw(st.integers(0, NBYTES[name] - 1) | st.just(0))
        end = data.draw(st.integers(start + 1, NBYTES[name]) | st.just(NBYTES[name]))
        self.count += 1
        new = np.random.default_rng(self.count).integers(0, 256, end - start, dtype=np.uint8).tobytes()
        self.store.write_from(name, start, bytearray(new), checksum=checksum)
        if name not in self.working:
            self.working[name] = bytearray(self.base(name) or bytes(NBYTES[name]))
            self.written[name] = np.zeros(NBYTES[name], dtype=bool)
        self.working[name][start:end] = new
        self.written[name][start:end] = True

    @rule()
    def write_all(self) -> None:
        for name in NAMES:
            self.count += 1
            data = np.random.default_rng(self.count).integers(0, 256, NBYTES[name], dtype=np.uint8).tobytes()
            self.store.write_from(name, 0, bytearray(data), checksum=True)
            self.working[name] = bytearray(data)
            self.written[name] = np.ones(NBYTES[name], dtype=bool)

    @precondition(lambda self: self.prepared is None)
    @rule()
    def prepare(self) -> None:
        self.count += 1
        if all(written.all() for written in self.written.values()):
            self.prepared = self.store.prepare(self.count, {"count": self.count})
            self.prepared_content = self.committed | {name: bytes(data) for name, data in self.working.items()}
            self.working, self.written = {}, {}
        else:
            with pytest.raises(OverspillError, match="OVS504"):
                self.store.prepare(self.count, {})

    @precondition(lambda self: self.prepared is not None)
    @rule()
    def commit(self) -> None:
        assert self.prepared is not None
        self.store.commit(self.prepared)
        self.committed, self.step, self.prepared = self.prepared_content, self.prepared.step, None

    @precondition(lambda self: self.prepared is not None)
    @rule()
    def abandon(self) -> None:
        assert self.prepared is not None
        self.store.abandon(self.prepared)
        self.forget()

    @rule()
    def rollback(self) -> None:
        self.store.rollback()
        self.forget()

    def forget(self) -> None:
        self.working, self.written, self.prepared = {}, {}, None

    @precondition(lambda self: self.step is not None)
    @rule(name=st.sampled_from(["a", "b", "c"]))
    def pin(self, name: str) -> None:
        assert self.step is not None
        if name in self.pins and self.pins[name] != (self.step, self.committed):
            with pytest.raises(OverspillError, match="OVS604"):
                self.store.pin(name)
        else:
            self.store.pin(name)
            self.pins[name] = self.step, self.committed

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pins)))
        self.store.unpin(name)
        del self.pins[name]

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def restore_pin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pins)))
        self.store.restore_pin(name)
        self.step, self.committed = self.pins[name]
        self.forget()

    @rule(forward=st.booleans())
    def kill_and_open(self, forward: bool) -> None:
        for fd in self.store.fds():  # as the kernel does it; the object itself is simply lost
            self.store._io.close(fd)
        self.store._closed = "closed"
        on_prepared = "commit" if forward else "abandon"
        self.store = DiskStore.open(self.place / "s", slots=SLOTS, on_prepared=on_prepared, io=UnsyncedIO())
        if forward and self.prepared is not None:
            self.committed, self.step = self.prepared_content, self.prepared.step
        self.forget()

    @invariant()
    def holds_what_it_must(self) -> None:
        if not hasattr(self, "store"):
            return
        assert self.store.committed_step == self.step
        for name in NAMES:
            want = bytes(self.working[name]) if name in self.working else self.base(name)
            if want is None or (name in self.working and self.base(name) is None and not self.written[name].all()):
                continue
            found = bytearray(NBYTES[name])
            self.store.read_into(name, 0, found, verify=True)
            assert found == want, name

    @invariant()
    def checkpoints_hold_what_they_held(self) -> None:
        if not hasattr(self, "store"):
            return
        assert {pin.name: pin.step for pin in self.store.pins()} == {
            name: step for name, (step, _) in self.pins.items()
        }
        for name, (_, content) in self.pins.items():
            with self.store.open_pin(name) as reader:
                reader.verify()
                assert {spec: reader.array(spec).tobytes() for spec in content} == content

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.place)


TestStoreAgainstItsModel = StoreMachine.TestCase
TestStoreAgainstItsModel.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
