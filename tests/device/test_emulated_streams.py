"""Streams, events, the link: what runs beside what, and what a missing wait does. Order is asserted, never time."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

ELEMENTS = 1 << 20


def pinned(value: float, elements: int = ELEMENTS) -> torch.Tensor:
    return torch.full((elements,), value).pin_memory()


def wait_until(reached: Callable[[Any], bool], emulated: ModuleType) -> None:
    deadline = time.monotonic() + 60
    while not reached(emulated.stats()):
        assert time.monotonic() < deadline, emulated.stats()
        time.sleep(0.001)


@pytest.mark.parametrize("poisoned", [False, True], ids=["plain", "poisoned"])
def test_a_missing_wait_shows_as_wrong_data(emulated: ModuleType, poisoned: bool) -> None:
    emulated.poison_in_flight(poisoned)
    side = torch.Stream("emulated")
    x = torch.zeros(ELEMENTS, device="emulated")
    side.wait_stream(torch.accelerator.current_stream())
    host = pinned(1.0)
    with emulated.hold("h2d"):
        with side:
            x.copy_(host, non_blocking=True)
        wait_until(lambda s: s.h2d_running == 1, emulated)
        early = x.sum()
        torch.accelerator.current_stream().synchronize()
    side.synchronize()
    late = x.sum()
    assert math.isnan(early.item()) if poisoned else early.item() == 0
    assert late.item() == ELEMENTS


def test_a_missing_wait_can_see_half_a_copy(emulated: ModuleType) -> None:
    emulated.poison_in_flight(False)
    emulated.set_link(h2d_bytes_per_s=5e6)
    side = torch.Stream("emulated")
    x = torch.zeros(ELEMENTS, device="emulated")
    side.wait_stream(torch.accelerator.current_stream())
    host = pinned(1.0)
    with side:
        x.copy_(host, non_blocking=True)
    seen = {x.sum().item()}
    while not side.query():
        seen.add(x.sum().item())
    assert any(0 < value < ELEMENTS for value in seen)
    assert x.sum().item() == ELEMENTS


def test_wait_stream_makes_one_stream_wait_for_the_other(emulated: ModuleType) -> None:
    side = torch.Stream("emulated")
    x = torch.zeros(ELEMENTS, device="emulated")
    side.wait_stream(torch.accelerator.current_stream())
    host = pinned(1.0)
    with emulated.hold("h2d"):
        with side:
            x.copy_(host, non_blocking=True)
        torch.accelerator.current_stream().wait_stream(side)
        total = x.sum()
        assert not torch.accelerator.current_stream().query()
    assert total.item() == ELEMENTS


def test_an_event_is_reached_when_what_came_before_it_is_done(emulated: ModuleType) -> None:
    side = torch.Stream("emulated")
    x = torch.zeros(ELEMENTS, device="emulated")
    torch.accelerator.synchronize()
    host = pinned(1.0)
    with emulated.hold("h2d"):
        before, after = torch.Event("emulated"), torch.Event("emulated")
        assert before.query()  # never recorded
        before.record(side)
        before.synchronize()
        with side:
            x.copy_(host, non_blocking=True)
        after.record(side)
        assert before.query()
        assert not after.query()
    after.synchronize()
    assert after.query()
    assert x.sum().item() == ELEMENTS


def test_waiting_is_for_the_record_that_was_newest_when_the_wait_was_asked_for(emulated: ModuleType) -> None:
    side, third = torch.Stream("emulated"), torch.Stream("emulated")
    x = torch.zeros(ELEMENTS, device="emulated")
    torch.accelerator.synchronize()
    host = pinned(1.0)
    with emulated.hold("h2d"):
        event = side.record_event()
        third.wait_event(event)
        with side:
            x.copy_(host, non_blocking=True)
        event.record(side)
        third.synchronize()  # is not held up by the second record
        assert not event.query()
    event.synchronize()


def test_elapsed_time_is_between_two_events_that_may_time(emulated: ModuleType) -> None:
    emulated.set_compute_delay(seconds_per_op=0.01)
    first, second = torch.Event("emulated", enable_timing=True), torch.Event("emulated", enable_timing=True)
    x = torch.zeros(4, device="emulated")
    first.record()
    x.add_(1)
    second.record()
    with pytest.raises(RuntimeError, match="completed"):
        first.elapsed_time(second)
    second.synchronize()
    assert first.elapsed_time(second) >= 10  # a sleep is never shorter than asked for
    with pytest.raises((ValueError, RuntimeError), match="enable_timing"):
        torch.Event("emulated").elapsed_time(second)


def test_events_are_freed_with_their_python_objects(emulated: ModuleType) -> None:
    alive = emulated.stats().events_alive
    side = torch.Stream("emulated")
    events = [side.record_event() for _ in range(100)]
    assert emulated.stats().events_alive == alive + 100
    with emulated.hold("h2d"):
        with side:
            torch.empty(4, device="emulated").copy_(pinned(1.0, 4), non_blocking=True)
        last = side.record_event()
        torch.accelerator.current_stream().wait_event(last)
        del events, last  # although a stream still waits for one
        assert emulated.stats().events_alive == alive
    torch.accelerator.synchronize()


def test_copies_in_both_directions_run_beside_each_other_and_beside_computing(emulated: ModuleType) -> None:
    up, down = torch.Stream("emulated"), torch.Stream("emulated")
    source, target = pinned(1.0), pinned(0.0)
    arriving, leaving = torch.empty(ELEMENTS, device="emulated"), torch.ones(ELEMENTS, device="emulated")
    x = torch.zeros(4, device="emulated")
    torch.accelerator.synchronize()
    with (
        emulated.record_operations() as operations,
        emulated.hold("h2d"),
        emulated.hold("d2h"),
        emulated.hold("compute"),
    ):
        with up:
            arriving.copy_(source, non_blocking=True)
        with down:
            target.copy_(leaving, non_blocking=True)
        x.add_(1)
        wait_until(lambda s: (s.compute_running, s.h2d_running, s.d2h_running) == (1, 1, 1), emulated)
    by_lane = {operation.lane: operation for operation in operations}
    assert set(by_lane) == {"compute", "h2d", "d2h"}
    assert by_lane["h2d"].overlaps(by_lane["d2h"])
    assert by_lane["h2d"].overlaps(by_lane["compute"])
    assert by_lane["d2h"].overlaps(by_lane["compute"])
    assert len({operation.stream for operation in operations}) == 3
    assert emulated.stats().copies_while_computing > 0
    assert target.eq(1).all()
    assert arriving.eq(1).all().item()


def test_operations_of_one_stream_never_overlap(emulated: ModuleType) -> None:
    x, host = torch.zeros(ELEMENTS, device="emulated"), pinned(1.0)
    torch.accelerator.synchronize()
    with emulated.record_operations() as operations:
        for _ in range(5):
            x.copy_(host, non_blocking=True)
            x.add_(1)
    assert len(operations) == 10
    assert not any(a.overlaps(b) for a, b in itertools.combinations(operations, 2))


def test_computing_goes_on_while_the_link_is_held(emulated: ModuleType) -> None:
    side = torch.Stream("emulated")
    x = torch.zeros(4, device="emulated")
    arriving = torch.empty(ELEMENTS, device="emulated")
    torch.accelerator.synchronize()
    host = pinned(1.0)
    with emulated.hold("h2d"):
        with side:
            arriving.copy_(host, non_blocking=True)
        for _ in range(10):
            x.add_(1)
        torch.accelerator.current_stream().synchronize()  # the ten are done
        assert not side.query()
    side.synchronize()
    assert x.tolist() == [10, 10, 10, 10]


def test_copies_in_one_direction_share_the_link(emulated: ModuleType) -> None:
    emulated.set_link(h2d_bytes_per_s=100e6)
    streams = [torch.Stream("emulated") for _ in range(2)]
    targets = [torch.empty(ELEMENTS, device="emulated") for _ in range(2)]
    source = pinned(1.0)
    begin, end = torch.Event("emulated", enable_timing=True), torch.Event("emulated", enable_timing=True)
    torch.accelerator.synchronize()
    with emulated.hold("h2d"):
        begin.record()
        for stream, target in zip(streams, targets, strict=True):
            stream.wait_event(begin)
            with stream:
                target.copy_(source, non_blocking=True)
            torch.accelerator.current_stream().wait_stream(stream)
        end.record()
        wait_until(lambda s: s.h2d_running == 2, emulated)
    end.synchronize()
    assert emulated.stats().h2d_most_at_once == 2
    nbytes = 2 * ELEMENTS * 4
    assert emulated.stats().h2d_nbytes == nbytes
    assert begin.elapsed_time(end) >= nbytes / 100e6 * 1e3 * 0.99  # a lower limit: the link is never too fast


def test_a_copy_is_asynchronous_only_if_asked_and_only_with_pinned_memory(emulated: ModuleType) -> None:
    x = torch.empty(8, device="emulated")
    pageable, locked = torch.ones(8), pinned(2.0, 8)
    torch.accelerator.synchronize()
    emulated.reset()

    def host_waited(copy: object) -> bool:
        before = emulated.stats().synchronous_copies
        assert callable(copy)
        copy()
        return emulated.stats().synchronous_copies > before

    assert host_waited(lambda: x.copy_(pageable))
    assert host_waited(lambda: x.copy_(pageable, non_blocking=True))
    assert host_waited(lambda: x.copy_(locked))
    assert not host_waited(lambda: x.copy_(locked, non_blocking=True))
    assert host_waited(lambda: pageable.copy_(x, non_blocking=True))
    assert not host_waited(lambda: locked.copy_(x, non_blocking=True))
    torch.accelerator.synchronize()


def test_pinned_memory_freed_while_a_copy_reads_it_stays_until_the_copy_is_done(emulated: ModuleType) -> None:
    x = torch.zeros(ELEMENTS, device="emulated")
    torch.accelerator.synchronize()
    with emulated.hold("h2d"):
        host = pinned(3.0)
        x.copy_(host, non_blocking=True)
        del host
        pinned(4.0)
    assert x.eq(3).all().item()


def test_a_planted_failure_is_raised_where_the_host_synchronises(emulated: ModuleType) -> None:
    x = torch.zeros(8, device="emulated")
    host = pinned(1.0, 8)
    emulated.fail("h2d", after=1, message="cable pulled")
    x.copy_(host, non_blocking=True)
    torch.accelerator.synchronize()
    x.copy_(host, non_blocking=True)
    with pytest.raises(RuntimeError, match="cable pulled"):
        torch.accelerator.synchronize()
    x.copy_(host, non_blocking=True)  # the link works again
    torch.accelerator.synchronize()
    emulated.fail("d2h")
    with pytest.raises(RuntimeError, match="uncorrectable ECC error"):
        x.cpu()


def test_a_delayed_copy_still_keeps_its_place_in_the_stream(emulated: ModuleType) -> None:
    emulated.set_delays(emulated.Delays(h2d=(0.05,)))
    x = torch.zeros(8, device="emulated")
    x.copy_(pinned(1.0, 8), non_blocking=True)
    x.add_(1)
    assert x.tolist() == [2] * 8


def test_another_device_index_is_refused(emulated: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="one device"):
        torch.accelerator.set_device_index(1)
