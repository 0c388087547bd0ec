"""The device's time: lengths that are known beforehand, links of two speeds, and transfers hidden behind computing.

Times are those of the streams' clocks, in which a late thread does not count; where the machine was so late that a
clock had to be put right (``late_seconds``), that time is allowed for.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

KB = 1000
MB = 1000 * KB


def timer() -> torch.Event:
    return torch.Event("emulated", enable_timing=True)


def seconds_between(first: torch.Event, last: torch.Event) -> float:
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def test_computing_takes_the_sum_of_its_operations_lengths_whatever_the_kernels_take(emulated: ModuleType) -> None:
    x = torch.zeros(250 * KB, device="emulated")
    torch.accelerator.synchronize()
    emulated.reset()
    emulated.set_compute_delay(seconds_per_op=0.004, bytes_per_s=500 * MB)
    begin, end = timer(), timer()
    with emulated.hold("compute"):
        x.add_(1)  # stands still until all is queued: the host's time is not part of what follows
        begin.record()
        for _ in range(20):
            x.add_(1)  # 2 MB, one read and one written: 4 ms
        end.record()
    seconds = seconds_between(begin, end)
    stats = emulated.stats()
    assert 20 * 0.008 <= seconds + 1e-6 <= 20 * 0.008 + stats.late_seconds + 1e-4
    assert stats.compute_seconds == pytest.approx(21 * 0.008, rel=1e-4)


def test_streams_share_the_computing_units(emulated: ModuleType) -> None:
    x, y = torch.zeros(4, device="emulated"), torch.zeros(4, device="emulated")
    other = torch.Stream("emulated")
    torch.accelerator.synchronize()
    emulated.reset()
    emulated.set_compute_delay(seconds_per_op=0.005)
    with emulated.record_operations() as operations, emulated.hold("compute"):
        for _ in range(5):
            x.add_(1)
            with other:
                y.add_(1)
    assert len({operation.stream for operation in operations}) == 2
    first = min(operation.began_seconds for operation in operations)
    last = max(operation.finished_seconds for operation in operations)
    assert last - first >= 10 * 0.005 - 1e-6


def test_computing_can_take_a_multiple_of_the_kernels_own_time(emulated: ModuleType) -> None:
    x = torch.randn(400, 400, device="emulated")
    torch.accelerator.synchronize()

    def seconds(times: float) -> float:
        emulated.reset()
        emulated.set_compute_delay(times=times)
        for _ in range(10):
            x @ x
        torch.accelerator.synchronize()
        return float(emulated.stats().compute_seconds)

    assert seconds(20.0) > 5 * seconds(1.0)
    with pytest.raises(ValueError, match="made faster"):
        emulated.set_compute_delay(times=0.5)


def test_each_direction_has_its_own_rate_and_its_own_count_of_bytes_also_at_once(emulated: ModuleType) -> None:
    up, down = torch.Stream("emulated"), torch.Stream("emulated")
    source, target = torch.ones(500 * KB).pin_memory(), torch.zeros(100 * KB).pin_memory()
    arriving, leaving = torch.zeros(500 * KB, device="emulated"), torch.ones(100 * KB, device="emulated")
    torch.accelerator.synchronize()
    emulated.reset()
    emulated.set_link(h2d_bytes_per_s=20 * MB, d2h_bytes_per_s=5 * MB)
    with emulated.record_operations() as operations, emulated.hold("h2d"), emulated.hold("d2h"):
        with up:
            arriving.copy_(source, non_blocking=True)  # 2 MB: 100 ms
        with down:
            target.copy_(leaving, non_blocking=True)  # 0.4 MB: 80 ms
    stats = emulated.stats()
    by_lane = {operation.lane: operation for operation in operations}
    assert by_lane["h2d"].overlaps(by_lane["d2h"])
    took = {lane: operation.finished_seconds - operation.began_seconds for lane, operation in by_lane.items()}
    assert 0.1 <= took["h2d"] + 1e-6 <= 0.1 + stats.late_seconds + 1e-4
    assert 0.08 <= took["d2h"] + 1e-6 <= 0.08 + stats.late_seconds + 1e-4
    assert (stats.h2d_nbytes, stats.d2h_nbytes) == (2 * MB, 400 * KB)
    assert (stats.h2d_seconds, stats.d2h_seconds) == (pytest.approx(0.1), pytest.approx(0.08))
    assert arriving.eq(1).all().item()
    assert target.eq(1).all()


def test_a_stream_that_waits_for_an_event_takes_over_its_time(emulated: ModuleType) -> None:
    side = torch.Stream("emulated")
    x, y = torch.zeros(4, device="emulated"), torch.zeros(4, device="emulated")
    torch.accelerator.synchronize()
    emulated.reset()
    emulated.set_compute_delay(seconds_per_op=0.01)
    begin, end = timer(), timer()
    with emulated.hold("compute"):
        x.add_(1)
        begin.record()
        x.add_(1)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y.add_(1)
            end.record(side)
    assert 0.02 <= seconds_between(begin, end) + 1e-6 <= 0.02 + emulated.stats().late_seconds + 1e-4


def stream_blocks(emulated: ModuleType, *, ahead: int, blocks: int = 8) -> tuple[float, float]:
    """Blocks come up the link, each is computed with. Gives the seconds in all and those in which nothing computed.

    A block's copy takes 8 ms and its computing 10. ``ahead``: how many blocks may be on their way at once.
    """
    buffers = [torch.zeros(20 * KB, device="emulated") for _ in range(ahead)]
    source = torch.ones(20 * KB).pin_memory()
    total = torch.zeros(20 * KB, device="emulated")
    torch.accelerator.synchronize()
    emulated.reset()
    emulated.set_link(h2d_bytes_per_s=10 * MB)
    emulated.set_compute_delay(seconds_per_op=0.01)
    compute, link = torch.accelerator.current_stream(), torch.Stream("emulated")
    free: list[torch.Event | None] = [None] * ahead
    with emulated.record_operations() as operations, emulated.hold("h2d"):
        for block in range(blocks):
            at = block % ahead
            used = free[at]
            if used is not None:
                link.wait_event(used)
            with link:
                buffers[at].copy_(source, non_blocking=True)
                arrived = link.record_event()
            compute.wait_event(arrived)
            total.add_(buffers[at])
            free[at] = compute.record_event()
    assert total.eq(blocks).all().item()
    began = min(operation.began_seconds for operation in operations)
    finished = max(operation.finished_seconds for operation in operations)
    return finished - began, emulated.idle_seconds(operations, "compute")


def test_transfers_of_four_fifths_of_the_computing_time_are_hidden_by_one_buffer_more(emulated: ModuleType) -> None:
    seconds, idle = stream_blocks(emulated, ahead=2)
    late = emulated.stats().late_seconds
    assert idle <= late + 1e-4
    assert seconds == pytest.approx(0.008 + 8 * 0.01, abs=late + 1e-3)  # the first copy has nothing to hide behind
    seconds, idle = stream_blocks(emulated, ahead=1)
    late = emulated.stats().late_seconds
    assert idle == pytest.approx(7 * 0.008, abs=late + 1e-3)
    assert seconds == pytest.approx(8 * 0.018, abs=late + 1e-3)
