"""Device memory: the host cannot read it, it ends, and a use after its release is noticed."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
MIB = 1 << 20


def run_in_fresh_process(body: str) -> subprocess.CompletedProcess[str]:
    """Registers the device in a new process and runs `body` there."""
    start = "import ctypes, os, torch\nfrom testing import emulated_accelerator\nemulated_accelerator.register()\n"
    return subprocess.run(
        [sys.executable, "-c", start + body],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_host_read_of_device_memory_is_a_segmentation_fault(emulated: ModuleType) -> None:
    ran = run_in_fresh_process("ctypes.string_at(torch.ones(4, device='emulated').data_ptr(), 4)")
    assert ran.returncode == -signal.SIGSEGV


def test_device_memory_cannot_be_read_while_the_device_works_on_it_either(emulated: ModuleType) -> None:
    ran = run_in_fresh_process(
        "x = torch.ones(4, device='emulated')\n"
        "emulated_accelerator.set_compute_delay(seconds_per_op=5)\n"
        "x.add_(1)\n"
        "ctypes.string_at(x.data_ptr(), 4)\n"
    )
    assert ran.returncode == -signal.SIGSEGV


def test_a_host_read_of_freed_device_memory_is_a_segmentation_fault(emulated: ModuleType) -> None:
    ran = run_in_fresh_process(
        "address = torch.ones(4, device='emulated').data_ptr()\n"
        "torch.accelerator.synchronize()\n"
        "again = [torch.ones(4, device='emulated') for _ in range(50)]\n"
        "assert address not in [x.data_ptr() for x in again]\n"
        "print('reading', flush=True)\n"
        "ctypes.string_at(address, 4)\n"
    )
    assert "reading" in ran.stdout
    assert ran.returncode == -signal.SIGSEGV


def test_more_than_the_capacity_is_an_out_of_memory_error_that_says_how_much(emulated: ModuleType) -> None:
    emulated.set_capacity(10 * MIB)
    kept = torch.empty(4 * MIB, dtype=torch.uint8, device="emulated")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(8 * MIB, dtype=torch.uint8, device="emulated")
    assert "out of memory. Tried to allocate 8.00 MiB" in str(caught.value)
    assert "total capacity of 10.00 MiB of which 6.00 MiB is free" in str(caught.value)
    assert torch.accelerator.memory_stats()["num_ooms"] >= 1
    del kept
    torch.empty(8 * MIB, dtype=torch.uint8, device="emulated")


def test_memory_statistics_follow_allocations(emulated: ModuleType) -> None:
    accelerator = torch.accelerator
    emulated.set_capacity(64 * MIB)
    gc.collect()
    accelerator.synchronize()
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="emulated")
    y = torch.empty(1000, dtype=torch.uint8, device="emulated")
    assert accelerator.memory_allocated() - before == 3 * MIB + 1024  # rounded up to 512 bytes
    assert accelerator.get_memory_info() == (64 * MIB - accelerator.memory_reserved(), 64 * MIB)
    del x
    assert accelerator.memory_allocated() - before == 1024
    assert accelerator.max_memory_allocated() - before == 3 * MIB + 1024
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() - before == 1024
    accelerator.empty_cache()
    del y
    assert accelerator.memory_allocated() == before
    assert accelerator.memory_reserved() == accelerator.memory_allocated()


def test_each_block_is_a_segment_of_its_own_so_nothing_is_reserved_but_what_is_in_use(emulated: ModuleType) -> None:
    before = torch.accelerator.memory_stats()
    kept = [torch.empty(nbytes, dtype=torch.uint8, device="emulated") for nbytes in (700, MIB + 1)]
    after = torch.accelerator.memory_stats()
    added = {name: after[name] - before[name] for name in after}
    assert added["segment.small_pool.current"] == added["segment.large_pool.current"] == 1
    assert added["reserved_bytes.small_pool.current"] == 1024
    assert added["reserved_bytes.all.current"] == 1024 + MIB + 512
    assert len(kept) == added["num_device_alloc"] == 2


def test_memory_named_by_record_stream_stays_taken_until_that_stream_has_passed(emulated: ModuleType) -> None:
    side = torch.Stream("emulated")
    host = torch.zeros(MIB, dtype=torch.uint8).pin_memory()
    before = torch.accelerator.memory_reserved()
    with emulated.hold("d2h"):
        x = torch.ones(MIB, dtype=torch.uint8, device="emulated")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            host.copy_(x, non_blocking=True)
        x.record_stream(side)
        del x
        torch.accelerator.current_stream().synchronize()
        assert torch.accelerator.memory_reserved() == before + MIB
    side.synchronize()
    assert torch.accelerator.memory_reserved() == before
    assert host.eq(1).all()


def test_an_allocation_waits_for_memory_that_a_stream_is_about_to_give_back(emulated: ModuleType) -> None:
    emulated.set_capacity(torch.accelerator.memory_reserved() + MIB)
    side = torch.Stream("emulated")
    host = torch.zeros(MIB, dtype=torch.uint8).pin_memory()
    x = torch.ones(MIB, dtype=torch.uint8, device="emulated")
    side.wait_stream(torch.accelerator.current_stream())
    emulated.set_delays(emulated.Delays(d2h=(0.05,)))
    with side:
        host.copy_(x, non_blocking=True)
    x.record_stream(side)
    del x
    retries = torch.accelerator.memory_stats()["num_alloc_retries"]
    torch.empty(MIB, dtype=torch.uint8, device="emulated")
    assert torch.accelerator.memory_stats()["num_alloc_retries"] == retries + 1
    assert host.eq(1).all()


def test_a_forgotten_record_stream_is_an_error_that_names_it(emulated: ModuleType) -> None:
    side = torch.Stream("emulated")
    host = torch.zeros(4).pin_memory()
    with emulated.hold("d2h"):
        x = torch.ones(4, device="emulated")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            host.copy_(torch.zeros(4, device="emulated"), non_blocking=True)  # holds the stream
            host.copy_(x, non_blocking=True)
        del x
        torch.accelerator.current_stream().synchronize()
    with pytest.raises(RuntimeError, match="record_stream"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()  # told once


def test_memory_mapped_by_somebody_else_is_pinned_while_it_is_registered(emulated: ModuleType) -> None:
    with mmap.mmap(-1, 4096) as mapping:
        x = torch.frombuffer(mapping, dtype=torch.float32)
        assert not x.is_pinned()
        emulated.register_host_memory(x.data_ptr(), 4096)
        assert x.is_pinned()
        assert x[100:].is_pinned()
        with pytest.raises(RuntimeError, match="already pinned"):
            emulated.register_host_memory(x.data_ptr(), 4096)
        x.copy_(torch.ones(1024, device="emulated"), non_blocking=True)
        emulated.unregister_host_memory(x.data_ptr())  # waits for the copy
        assert x.sum().item() == 1024
        assert not x.is_pinned()
        with pytest.raises(RuntimeError, match="not registered"):
            emulated.unregister_host_memory(x.data_ptr())
        del x


def test_a_forked_child_is_told_that_it_has_no_device(emulated: ModuleType) -> None:
    ran = run_in_fresh_process(
        "x = torch.ones(4, device='emulated')\n"
        "pinned = torch.ones(4).pin_memory()\n"
        "event = torch.Event('emulated'); event.record()\n"
        "torch.accelerator.synchronize()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    torch.manual_seed(1)\n"  # a DataLoader worker does this first
        "    for use in (lambda: x + 1, lambda: x.cpu(), lambda: torch.empty(1, device='emulated'), event.record,\n"
        "                torch.accelerator.synchronize, event.synchronize):\n"
        "        try:\n"
        "            use()\n"
        "        except RuntimeError as error:\n"
        "            assert \"'spawn'\" in str(error), error\n"
        "        else:\n"
        "            os._exit(1)\n"
        "    assert pinned.tolist() == [1, 1, 1, 1]\n"
        "    del x, pinned, event\n"
        "    os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "assert (x + 1).tolist() == [2, 2, 2, 2]\n"
        "print('done')\n"
    )
    assert ran.stdout == "done\n", ran.stderr
    assert ran.returncode == 0
