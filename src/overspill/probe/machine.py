"""probe(): this machine as a Machine: processor, memory, disks, and an accelerator when asked for.

It looks and measures for a second or two; it changes nothing and keeps nothing. torch is not imported: accelerators
are looked for only when the caller asks and torch can be imported.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from overspill.machine import Accelerator, Machine
from overspill.probe.disk import SPEED_TEST_NBYTES, probe_disk
from overspill.probe.load import OthersLoad
from overspill.probe.memory import measure_matmul, measure_memory, pinned_limit, read_memory

__all__ = ["find_accelerators", "probe", "simd_level"]


def probe(
    directories: Sequence[str | Path] = (".",),
    *,
    measure: bool = True,
    accelerators: bool = False,
    speed_test_nbytes: int = SPEED_TEST_NBYTES,
) -> Machine:
    """Describe this machine.

    Args:
        directories: where disk state would live; each gives a Disk.
        measure: also measure speeds (disk, DRAM, matrix products), which takes a second or two.
        accelerators: also look for accelerators through torch, where it can be imported.
    """
    memory = read_memory()
    others = OthersLoad()
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    machine = Machine(
        name=platform.node() or "this machine",
        cpu=_cpu_name(),
        simd=simd_level() or "",
        physical_cores=min(_physical_cores(), threads),
        threads=threads,
        memory_nbytes=memory.total_nbytes,
        available_nbytes=memory.available_nbytes,
        memory_bytes_per_s=measure_memory() if measure else 0.0,
        matmul_flops_per_s=measure_matmul() if measure else 0.0,
        pinned_limit_nbytes=pinned_limit(),
        accelerators=find_accelerators() if accelerators else (),
        disks=tuple(probe_disk(one, measure=measure, speed_test_nbytes=speed_test_nbytes) for one in directories),
    )
    return machine.model_copy(update={"busy_cores": others.cores() or 0.0}) if measure else machine


def simd_level() -> str | None:
    """The instruction set that the kernels use here; None where the native core is not built."""
    try:
        from overspill import _native
    except ImportError:
        return None
    return _native.simd_level()


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    return platform.processor() or platform.machine()


def _physical_cores() -> int:
    """Distinct (package, core) pairs in /sys, so that two hardware threads of a core count once."""
    cores = set()
    for cpu in Path("/sys/devices/system/cpu").glob("cpu[0-9]*"):
        with contextlib.suppress(OSError):
            topology = cpu / "topology"
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
    return len(cores) or os.cpu_count() or 1


def find_accelerators() -> tuple[Accelerator, ...]:
    """What torch.accelerator sees; empty without torch or without a device."""
    try:
        import torch
    except ImportError:
        return ()
    if not torch.accelerator.is_available():
        return ()
    kind = torch.accelerator.current_accelerator()
    found = []
    for index in range(torch.accelerator.device_count()):
        _, total = torch.accelerator.get_memory_info(index)
        named = getattr(getattr(torch, kind.type, None), "get_device_name", None) if kind is not None else None
        name = named(index) if named is not None else f"{kind}:{index}"
        found.append(Accelerator(name=name, memory_nbytes=total))
    return tuple(found)
