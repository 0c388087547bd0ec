"""Faults on demand: delays by a schedule, and failures that look as they do on a real device."""

from __future__ import annotations

import itertools
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testing.emulated_accelerator import Delays
from testing.emulated_accelerator.schedules import delay_schedules


def pinned(value: float, elements: int = 8) -> torch.Tensor:
    return torch.full((elements,), value).pin_memory()


def started(emulated: ModuleType, delays: Delays) -> list[float]:
    """By how much later each of six computations started than it would have, in seconds, rounded to milliseconds."""
    x = torch.zeros(4, device="emulated")
    torch.accelerator.synchronize()
    emulated.reset()
    emulated.set_compute_delay(seconds_per_op=0.01)
    emulated.set_delays(delays)
    with emulated.record_operations() as operations, emulated.hold("compute"):
        for _ in range(6):
            x.add_(1)
    assert emulated.stats().late_seconds == 0 or pytest.skip("the machine was too busy to tell delays from lateness")
    ends = [operation.finished_seconds for operation in operations]
    return [round(later - earlier - 0.01, 3) for earlier, later in itertools.pairwise(ends)]


def test_delays_come_in_the_order_of_launches_again_and_again(emulated: ModuleType) -> None:
    assert started(emulated, Delays(compute=(0.0, 0.02, 0.03))) == [0.02, 0.03, 0.0, 0.02, 0.03]
    assert started(emulated, Delays(h2d=(0.05,), d2h=(0.05,))) == [0.0] * 5
    assert started(emulated, Delays()) == [0.0] * 5


def test_a_seed_gives_the_same_schedule_each_time_and_another_seed_another_one() -> None:
    first = Delays.seeded(7, most_seconds=0.01)
    assert first == Delays.seeded(7, most_seconds=0.01)
    assert first != Delays.seeded(8, most_seconds=0.01)
    for kind in (first.compute, first.h2d, first.d2h, first.event):
        assert 0 < max(kind) <= 0.01
        assert 0.0 in kind
    with pytest.raises(ValueError, match="negative"):
        Delays(h2d=(-1.0,))


def test_the_record_of_an_event_can_be_late_and_holds_up_its_stream(emulated: ModuleType) -> None:
    first, second, third = (torch.Event("emulated", enable_timing=True) for _ in range(3))
    emulated.set_delays(Delays(event=(0.0, 0.05)))
    for event in (first, second, third):
        event.record()
    third.synchronize()
    assert first.elapsed_time(second) >= 50
    assert first.elapsed_time(third) >= 50


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_wait_that_is_left_out_shows_for_certain_under_a_delay(emulated: ModuleType, direction: str) -> None:
    """The reader sees old data or NaN, never what the copy brings; with the wait it sees that."""
    emulated.poison_in_flight(True)
    side = torch.Stream("emulated")

    def read(*, wait: bool) -> torch.Tensor:
        x, host = torch.full((8,), 2.0, device="emulated"), pinned(1.0)
        torch.accelerator.synchronize()
        emulated.set_delays(Delays(h2d=(0.2,), d2h=(0.2,)))
        with side:
            if direction == "h2d":
                x.copy_(host, non_blocking=True)
            else:
                host.copy_(x, non_blocking=True)
        if wait:
            side.record_event().wait() if direction == "h2d" else side.synchronize()
        seen = x + 0 if direction == "h2d" else host.clone()
        emulated.set_delays(Delays())
        torch.accelerator.synchronize()
        return seen.cpu()

    arriving, old = (1.0, 2.0) if direction == "h2d" else (2.0, 1.0)
    assert read(wait=True).eq(arriving).all()
    seen = read(wait=False)
    assert (seen.eq(old) | seen.isnan()).all()


@given(delays=delay_schedules(most_seconds=0.003), seed=st.integers(0, 2**16))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_schedule_of_delays_changes_what_a_correct_program_computes(
    emulated: ModuleType, delays: Delays, seed: int
) -> None:
    """Double-buffered: up, compute, down, each on a stream of its own, every hand-off by an event."""
    emulated.reset()
    for poison in (emulated.poison_freed, emulated.poison_fresh, emulated.poison_in_flight):
        poison(True)
    emulated.set_delays(delays)
    generator = torch.Generator().manual_seed(seed)
    sources = [torch.randn(64, generator=generator).pin_memory() for _ in range(5)]
    targets = [torch.empty(64, pin_memory=True) for _ in sources]
    up, down, compute = (torch.Stream("emulated") for _ in range(3))
    buffers: list[torch.Tensor | None] = [None, None]
    free: list[torch.Event | None] = [None, None]
    for step, (source, target) in enumerate(zip(sources, targets, strict=True)):
        at = step % 2
        used, buffer = free[at], buffers[at]
        with up:
            if used is not None:
                up.wait_event(used)
            if buffer is None:
                buffer = buffers[at] = torch.empty(64, device="emulated")
            buffer.copy_(source, non_blocking=True)
            arrived = up.record_event()
        with compute:
            compute.wait_event(arrived)
            result = buffer * 3 + step
            free[at] = done = compute.record_event()
        with down:
            down.wait_event(done)
            target.copy_(result, non_blocking=True)
        result.record_stream(down)
        del result
    torch.accelerator.synchronize()
    for step, (source, target) in enumerate(zip(sources, targets, strict=True)):
        assert torch.equal(target, source * 3 + step)


def test_some_schedule_shows_a_race_that_a_quiet_device_hides(emulated: ModuleType) -> None:
    """The copy mostly arrives within the 20 ms of computing before it is used; nothing makes sure that it does."""

    def is_right(delays: Delays) -> bool:
        emulated.reset()
        x, y, host = torch.zeros(8, device="emulated"), torch.zeros(8, device="emulated"), pinned(1.0)
        side = torch.Stream("emulated")
        torch.accelerator.synchronize()
        emulated.set_compute_delay(seconds_per_op=0.02)
        emulated.set_delays(delays)
        with side:
            x.copy_(host, non_blocking=True)
        y.add_(1)
        seen = x + y
        torch.accelerator.synchronize()
        return bool(seen.eq(2).all().item())

    assert any(is_right(Delays()) for _ in range(5))
    assert not all(is_right(Delays.seeded(seed, most_seconds=0.1)) for seed in range(12))


def test_a_kernel_that_fails_raises_a_devices_error_where_the_host_synchronises(emulated: ModuleType) -> None:
    x = torch.zeros(8, device="emulated")
    torch.accelerator.synchronize()
    emulated.fail("compute", after=2)
    x.add_(1)
    x.add_(1)
    torch.accelerator.synchronize()
    x.add_(1)  # fails; nothing is heard of it here
    with pytest.raises(torch.AcceleratorError, match="unspecified launch failure") as caught:
        torch.accelerator.synchronize()
    assert caught.value.error_code == 719
    assert "set_launch_blocking" in str(caught.value)
    assert x.tolist() == [2.0] * 8  # it did nothing
    assert emulated.stats().planted_failures_left == 0


def test_with_blocking_launches_a_planted_failure_is_raised_at_its_call(emulated: ModuleType) -> None:
    x = torch.zeros(8, device="emulated")
    torch.accelerator.synchronize()
    emulated.set_launch_blocking(True)
    emulated.fail("compute")
    with pytest.raises(torch.AcceleratorError, match="launch failure"):
        x.add_(1)
    x.add_(1)
    assert x.tolist() == [1.0] * 8


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copies_that_fail_move_nothing(emulated: ModuleType, direction: str) -> None:
    emulated.poison(False)  # else their targets are NaN
    x, host = torch.zeros(8, device="emulated"), pinned(1.0)
    torch.accelerator.synchronize()
    emulated.fail(direction, after=1, times=2)

    def copy() -> None:
        _ = x.copy_(host, non_blocking=True) if direction == "h2d" else host.copy_(x, non_blocking=True)
        torch.accelerator.synchronize()

    copy()
    x.fill_(5)
    host.fill_(7)
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError, match="uncorrectable ECC error"):
            copy()
    assert host.eq(7).all()
    copy()  # the link works again
    assert x.tolist() == host.tolist() == ([7.0] * 8 if direction == "h2d" else [5.0] * 8)


def test_an_allocation_that_fails_is_an_out_of_memory_error_and_the_next_one_succeeds(emulated: ModuleType) -> None:
    ooms = torch.accelerator.memory_stats()["num_ooms"]
    emulated.fail("allocation", after=1)
    kept = torch.empty(8, device="emulated")
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory. Tried to allocate 0.03 KiB"):
        torch.empty(8, device="emulated")
    assert torch.accelerator.memory_stats()["num_ooms"] == ooms + 1
    assert torch.empty_like(kept).shape == (8,)


def test_pinning_can_fail_for_memory_of_its_own_and_for_memory_that_is_registered(emulated: ModuleType) -> None:
    emulated.fail("pinning", times=2)
    with pytest.raises(torch.AcceleratorError, match="out of memory"):
        torch.empty(8, pin_memory=True)
    host = torch.empty(1024)
    with pytest.raises(torch.AcceleratorError, match="out of memory"):
        emulated.register_host_memory(host.data_ptr(), host.nbytes)
    assert not host.is_pinned()
    assert torch.empty(8, pin_memory=True).is_pinned()


def test_a_lost_device_refuses_everything_until_it_is_reset(emulated: ModuleType) -> None:
    x, host = torch.zeros(8, device="emulated"), pinned(1.0)
    event = torch.Event("emulated")
    torch.accelerator.synchronize()
    emulated.fail("compute", fatal=True, message="an illegal memory access was encountered")
    with emulated.hold("compute"):
        x.add_(1)
        x.add_(1)  # queued behind; never runs
        event.record()
    for use in (
        torch.accelerator.synchronize,
        torch.accelerator.current_stream().synchronize,
        torch.accelerator.current_stream().query,
        event.synchronize,
        event.query,
        lambda: x + 1,
        lambda: x.cpu(),
        lambda: x.copy_(host, non_blocking=True),
        lambda: torch.empty(1, device="emulated"),
    ):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            use()
    del event
    emulated.reset()
    assert x.tolist() == [0.0] * 8
    assert (x + 1).tolist() == [1.0] * 8
