"""Poison: memory that nobody has written, that is freed, or that a copy is on its way to, reads as NaN."""

from __future__ import annotations

import ctypes
import math
from types import ModuleType

import pytest
import torch

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def test_memory_freed_under_a_running_copy_turns_into_nan(emulated: ModuleType) -> None:
    emulated.poison_freed(True)
    emulated.set_link(d2h_bytes_per_s=4e5)
    side = torch.Stream("emulated")
    host = torch.zeros(100_000).pin_memory()
    x = torch.ones(100_000, device="emulated")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(x, non_blocking=True)
    while emulated.stats().d2h_most_at_once == 0:  # until it runs
        pass
    del x
    with pytest.raises(RuntimeError, match="was freed while an operation on another stream was using it"):
        torch.accelerator.synchronize()
    assert math.isnan(host[-1].item())


def test_fresh_memory_can_be_poisoned_to_show_reads_of_what_was_never_written(emulated: ModuleType) -> None:
    emulated.poison_fresh(True)
    for dtype in FLOATS:
        assert torch.empty(8, dtype=dtype, device="emulated").isnan().all()
    assert not torch.zeros(8, device="emulated").isnan().any()


def test_fresh_pinned_memory_can_be_poisoned_too(emulated: ModuleType) -> None:
    emulated.poison_fresh(True)
    for dtype in FLOATS:
        assert torch.empty(1000, dtype=dtype, pin_memory=True).isnan().all()
    assert torch.empty(5, dtype=torch.int64, pin_memory=True).eq(-1).all()
    assert torch.zeros(5, pin_memory=True).eq(0).all()


def test_freed_memory_is_poisoned_only_after_its_last_operation(emulated: ModuleType) -> None:
    emulated.poison_freed(True)
    side = torch.Stream("emulated")
    target = torch.zeros(1000).pin_memory()
    torch.accelerator.synchronize()
    with emulated.hold("compute"), emulated.hold("d2h"):
        x = torch.ones(1000, device="emulated")
        y = x * 2
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            target.copy_(x, non_blocking=True)
        x.record_stream(side)
        del x  # while both operations still stand in their queues
    torch.accelerator.synchronize()
    assert y.eq(2).all().item()
    assert target.eq(1).all()


def test_a_pointer_kept_to_freed_pinned_memory_reads_poison(emulated: ModuleType) -> None:
    emulated.poison_freed(True)
    host = torch.ones(1000).pin_memory()
    address = host.data_ptr()
    del host
    assert ctypes.string_at(address + 1024, 256) == b"\xff" * 256


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_what_a_copy_is_on_its_way_to_reads_as_poison_also_if_the_same_bytes_lay_there(
    emulated: ModuleType, dtype: torch.dtype, strided: bool
) -> None:
    emulated.poison_in_flight(True)
    side = torch.Stream("emulated")
    all_of_it = torch.zeros(8, 8, dtype=dtype, pin_memory=True)
    host = all_of_it[:, ::2] if strided else all_of_it
    x = torch.zeros(host.shape, dtype=dtype, device="emulated")
    torch.accelerator.synchronize()
    with emulated.hold("d2h"):
        with side:
            host.copy_(x, non_blocking=True)
        while emulated.stats().d2h_running == 0:
            pass
        event = side.record_event()
        torch.zeros(1, device="emulated").add_(1)  # other streams go on
        torch.accelerator.current_stream().synchronize()
        assert not event.query()
        assert (host.isnan() if dtype.is_floating_point else host.ne(0)).all()
        if strided:
            assert all_of_it[:, 1::2].eq(0).all()
    event.synchronize()
    assert host.eq(0).all()


def test_a_buffer_used_again_with_the_same_values_shows_a_missing_wait_only_when_poisoned(emulated: ModuleType) -> None:
    """The gradient of a frozen batch, say: each step brings the bytes that are there already."""
    x, host = torch.full((64,), 3.0, device="emulated"), torch.full((64,), 3.0).pin_memory()
    side = torch.Stream("emulated")
    torch.accelerator.synchronize()

    def read_too_early() -> torch.Tensor:
        with emulated.hold("d2h"):
            with side:
                host.copy_(x, non_blocking=True)
            while emulated.stats().d2h_running == 0:
                pass
            seen = host.clone()
        side.synchronize()
        return seen

    emulated.poison_in_flight(False)
    assert read_too_early().eq(3).all()
    emulated.poison_in_flight(True)
    assert read_too_early().isnan().all()
