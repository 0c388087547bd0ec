"""doctor: what this machine has, what is wrong with it, and what to do about it, as a list of findings.

Each check looks at one thing and gives one Finding; it repairs nothing, and none of them raises: a check that cannot
look says so. Printing is the command line's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from overspill.machine import Disk, Machine
from overspill.probe.disk import nearest_existing
from overspill.probe.machine import probe, simd_level
from overspill.probe.memory import read_memory
from overspill.schema import Frozen
from overspill.units import GiB, MiB, format_bytes_per_s, format_nbytes

__all__ = ["Finding", "doctor", "findings_of"]

#: A choice: 135M parameters hold 0.5 GiB of weights and gradients, and need activations and libraries beside them.
_LEAST_MEMORY_NBYTES = 2 * GiB
#: At this rate a step of 135M parameters takes 5.4 s to move its state, 20 bytes a parameter.
_SLOW_DISK_BYTES_PER_S = 500e6
_SMALL_PINNED_NBYTES = 64 * MiB
_IN_MEMORY = ("tmpfs", "ramfs")
_LIBRARIES = {
    "torch": "training (pip install 'overspill[train]')",
    "transformers": "Hugging Face models (pip install 'overspill[hf]')",
}


class Finding(Frozen):
    """One thing looked at. what: what is here; why: why it matters; what_to_do: empty when all is well."""

    name: str
    status: Literal["ok", "warn", "fail"]
    what: str
    why: str
    what_to_do: str = ""


def doctor(directories: Sequence[str | Path] = (".",), *, measure: bool = True) -> list[Finding]:
    """Probe this machine and judge it. ``directories``: where disk state would live."""
    return findings_of(probe(directories, measure=measure, accelerators=importlib.util.find_spec("torch") is not None))


def findings_of(machine: Machine) -> list[Finding]:
    """The findings about a machine that was probed, in the order of the checks."""
    checks: list[Callable[[Machine], Finding]] = [_python, _native, _threads, _memory, _swap, _pinned, _gpu]
    findings = [check(machine) for check in checks]
    findings += [_library(name) for name in _LIBRARIES]
    for disk in machine.disks:
        findings += [_writable(disk), _direct(disk), _speed(disk), _links(disk), _space(disk)]
    return findings


def _python(machine: Machine) -> Finding:
    return Finding(
        name="python", status="ok", what=f"Python {sys.version.split()[0]}, {machine.cpu}", why="3.11 or newer runs it."
    )


def _native(machine: Machine) -> Finding:
    level = simd_level()
    why = "The fused kernels update optimizer state in one pass over memory."
    if level is None:
        return Finding(
            name="kernels",
            status="fail",
            what="the native core is not built",
            why=why,
            what_to_do="Install the package (`pip install .`, or `make setup`); it needs a C++ compiler.",
        )
    if level == "baseline":
        return Finding(
            name="kernels",
            status="warn",
            what="kernels without AVX2",
            why=why,
            what_to_do="Nothing is wrong; updates are slower on this processor.",
        )
    return Finding(name="kernels", status="ok", what=f"SIMD {level}", why=why)


def _threads(machine: Machine) -> Finding:
    what = f"{machine.threads} threads on {machine.physical_cores} cores"
    why = "One thread reads, one writes and the rest compute."
    asked = os.environ.get("OMP_NUM_THREADS")
    if asked is not None and asked.isdigit() and int(asked) < machine.physical_cores:
        return Finding(
            name="threads",
            status="warn",
            what=f"{what}, but OMP_NUM_THREADS={asked}",
            why="torch computes with that many threads (torchrun sets it to 1).",
            what_to_do="Unset OMP_NUM_THREADS, or set train.threads in the job.",
        )
    if machine.threads < 2:
        return Finding(
            name="threads", status="warn", what=what, why=why, what_to_do="Disk and compute will take turns."
        )
    return Finding(name="threads", status="ok", what=what, why=why)


def _memory(machine: Machine) -> Finding:
    memory = read_memory()
    limited = f", limited by {memory.limited_by}" if memory.limited_by else ""
    what = f"{format_nbytes(machine.available_nbytes)} free of {format_nbytes(machine.memory_nbytes)}{limited}"
    why = "plan.memory comes out of it, on top of what Python and its libraries hold."
    if machine.available_nbytes < _LEAST_MEMORY_NBYTES:
        return Finding(
            name="memory",
            status="warn",
            what=what,
            why=why,
            what_to_do=f"Free some: under {format_nbytes(_LEAST_MEMORY_NBYTES)} only small models train.",
        )
    return Finding(name="memory", status="ok", what=what, why=why)


def _swap(machine: Machine) -> Finding:
    swap = read_memory().swap_nbytes
    why = "A budget that swaps is no budget: state would go to disk twice, and slowly."
    if swap:
        return Finding(
            name="swap",
            status="warn",
            what=f"{format_nbytes(swap)} of swap",
            why=why,
            what_to_do="Leave plan.memory below what is free, or switch swap off for the run.",
        )
    return Finding(name="swap", status="ok", what="no swap", why=why)


def _pinned(machine: Machine) -> Finding:
    limit = machine.pinned_limit_nbytes
    what = "no limit on locked memory" if limit is None else f"locked memory limited to {format_nbytes(limit)}"
    why = "It matters with a GPU only: pinned host memory lets copies run beside the compute."
    if machine.accelerators and limit is not None and limit < _SMALL_PINNED_NBYTES:
        return Finding(
            name="pinned memory",
            status="warn",
            what=what,
            why=why,
            what_to_do="Raise it (`ulimit -l unlimited`, or memlock in limits.conf); else pageable memory is used.",
        )
    return Finding(name="pinned memory", status="ok", what=what, why=why)


def _gpu(machine: Machine) -> Finding:
    why = "Without one, training computes on the CPU."
    if not machine.accelerators:
        return Finding(name="gpu", status="ok", what="none found", why=why)
    listed = ", ".join(f"{one.name} ({format_nbytes(one.memory_nbytes)})" for one in machine.accelerators)
    return Finding(name="gpu", status="ok", what=listed, why=why)


def _library(name: str) -> Finding:
    why = f"Needed for {_LIBRARIES[name]}."
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            name=name,
            status="warn",
            what=f"{name} is not installed",
            why=why,
            what_to_do="Install it as named; forecast and plan work without it.",
        )
    return Finding(name=name, status="ok", what=f"{name} {version}", why=why)


def _writable(disk: Disk) -> Finding:
    directory = Path(disk.directory).expanduser()
    at = nearest_existing(directory)
    why = "Optimizer state and checkpoints are written there."
    name, what = f"disk {disk.directory}", f"{disk.filesystem or 'unknown file system'} at {at}"
    if directory.exists() and not directory.is_dir():
        return Finding(
            name=name,
            status="fail",
            what="this is no directory",
            why=why,
            what_to_do="Give the directory that holds it.",
        )
    if os.access(at, os.W_OK | os.X_OK):
        if disk.filesystem in _IN_MEMORY:
            return Finding(
                name=name,
                status="warn",
                what=what,
                why="This file system is memory: state put there comes out of the same DRAM, and is gone after a boot.",
                what_to_do="Set plan.directories to a directory on a drive.",
            )
        if not directory.is_dir():
            return Finding(
                name=name,
                status="warn",
                what=f"the directory does not exist; what follows is that of {at}, the nearest one that does ({what})",
                why=why,
                what_to_do="A run makes it. If it should be there, correct the path or mount its disk.",
            )
        return Finding(name=name, status="ok", what=what, why=why)
    return Finding(
        name=f"disk {disk.directory}",
        status="fail",
        what=f"{at} cannot be written",
        why=why,
        what_to_do="Choose another directory in plan.directories, or change its permission.",
    )


def _direct(disk: Disk) -> Finding:
    name, why = f"O_DIRECT {disk.directory}", "It keeps disk state out of the page cache, where it would push out data."
    if disk.odirect:
        return Finding(name=name, status="ok", what="works", why=why)
    return Finding(
        name=name,
        status="warn",
        what=f"not on this {disk.filesystem or 'file system'}",
        why=why,
        what_to_do="Put plan.directories on ext4 or xfs on an NVMe drive; else buffered I/O is used, and said.",
    )


def _speed(disk: Disk) -> Finding:
    name, why = f"speed {disk.directory}", "Each step moves up to 20 bytes a parameter; a slow disk makes it wait."
    mixed = disk.mixed_bytes_per_s
    if not mixed:
        return Finding(name=name, status="ok", what="not measured", why=why)
    what = (
        f"read {format_bytes_per_s(disk.read_bytes_per_s)}, write {format_bytes_per_s(disk.write_bytes_per_s)}, "
        f"mixed {format_bytes_per_s(mixed)}"
    )
    if mixed < _SLOW_DISK_BYTES_PER_S:
        return Finding(
            name=name,
            status="warn",
            what=what,
            why=why,
            what_to_do="Use a faster drive, raise plan.memory, or take larger steps (train.accumulation).",
        )
    return Finding(name=name, status="ok", what=what, why=why)


def _links(disk: Disk) -> Finding:
    name, why = f"hard links {disk.directory}", "A checkpoint is a pin and hard links: it copies no state."
    if disk.hard_links:
        return Finding(name=name, status="ok", what="work", why=why)
    return Finding(
        name=name,
        status="warn",
        what="not on this file system",
        why=why,
        what_to_do="Checkpoints are copied instead; ext4, xfs and btrfs have hard links.",
    )


def _space(disk: Disk) -> Finding:
    name, why = f"space {disk.directory}", "State takes three versions of 12 bytes a parameter, made when a run starts."
    fits = disk.free_nbytes // 36
    what = f"{format_nbytes(disk.free_nbytes)} free: state of {fits / 1e9:.1f} billion parameters"
    if disk.free_nbytes < 5 * GiB:
        return Finding(
            name=name, status="warn", what=what, why=why, what_to_do="Free space, or choose another directory."
        )
    return Finding(name=name, status="ok", what=what, why=why)
