"""An accelerator made of threads: device and stream code tested on a machine that has no GPU.

``register()`` adds the device "emulated" to this process's PyTorch: memory of its own that the host cannot read,
streams that run beside the host, a link that can be made slow, and faults on demand. README.md says what it emulates
and what it does not. It is never part of the wheel.

A process can register it once and keeps it, and ``torch.accelerator.is_available()`` is True from then on: that is why
the tests that use it run in a process of their own (``device_process.py``).
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, NamedTuple

from testing.emulated_accelerator._build import BuildError, build, load_extension

__all__ = [
    "DEFAULT_CAPACITY_NBYTES",
    "DEVICE_NAME",
    "BuildError",
    "Direction",
    "Lane",
    "Operation",
    "Stats",
    "build",
    "delay_copies",
    "fail_copy",
    "hold",
    "is_registered",
    "poison_freed",
    "poison_fresh",
    "record_operations",
    "register",
    "register_host_memory",
    "reset",
    "set_capacity",
    "set_compute_delay",
    "set_launch_blocking",
    "set_link",
    "stats",
    "unregister_host_memory",
]

DEVICE_NAME = "emulated"
DEFAULT_CAPACITY_NBYTES = 1 << 30

Direction = Literal["h2d", "d2h"]
Lane = Literal["compute", "h2d", "d2h"]


class Operation(NamedTuple):
    """One operation that the device has done. Ticks count its starts and ends; they are no time."""

    name: str
    lane: Lane
    stream: int
    nbytes: int
    started: int
    ended: int

    def overlaps(self, other: Operation) -> bool:
        """Whether both were under way at some moment."""
        return self.started < other.ended and other.started < self.ended


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What the device has done since the last ``reset()``, by lane, and what it is doing (``…_running``)."""

    compute_operations: int
    compute_nbytes: int
    compute_running: int
    compute_most_at_once: int
    h2d_operations: int
    h2d_nbytes: int
    h2d_running: int
    h2d_most_at_once: int
    d2h_operations: int
    d2h_nbytes: int
    d2h_running: int
    d2h_most_at_once: int
    copies_while_computing: int
    """How often an operation started that made a copy and a computation run side by side."""
    synchronous_copies: int
    """Copies for which the host waited: asked to be blocking, or from or to memory that is not pinned."""
    events_alive: int
    error_pending: bool
    """A stream has met an error that no synchronisation has raised yet."""
    host_synchronous_operators: tuple[str, ...]
    """Operators that ran with the host waiting since their result's shape depends on data (ever, in this process)."""


_extension: ModuleType | None = None


def _loaded() -> ModuleType:
    if _extension is None:
        raise RuntimeError("the emulated accelerator is not registered in this process; call register() first")
    return _extension


def is_registered() -> bool:
    return _extension is not None


def register() -> None:
    """Builds the device if need be and adds it to this process's PyTorch, for good. Calling it again does nothing."""
    global _extension
    if _extension is not None:
        return
    library = build()
    import torch
    from torch.utils import backend_registration

    from testing.emulated_accelerator._device_module import make_device_module

    backend_registration.rename_privateuse1_backend(DEVICE_NAME)
    extension = load_extension(library)
    torch._register_device_module(DEVICE_NAME, make_device_module(extension))  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend()
    # Python's exit must not pull PyTorch away from under a stream that still works.
    atexit.register(_finish)
    _extension = extension


def _finish() -> None:
    extension = _loaded()
    if not extension.in_forked_child():
        for lane in ("compute", "h2d", "d2h"):
            extension.open_gate(lane)
        extension.wait_for_all_streams()


def reset() -> None:
    """Waits for the device, then undoes every switch and fault, forgets a pending error, and clears the counters."""
    extension = _loaded()
    _finish()
    extension.forget_faults()
    for lane in ("h2d", "d2h"):
        extension.set_link(lane, 0.0)
    extension.set_compute_delay(0.0, 0.0)
    extension.set_launch_blocking(False)
    extension.set_capacity(DEFAULT_CAPACITY_NBYTES)
    extension.poison_freed(False)
    extension.poison_fresh(False)
    extension.record_operations(False)
    extension.take_operations()
    extension.forget_error()
    extension.reset_stats()


def set_link(*, h2d_bytes_per_s: float | None = None, d2h_bytes_per_s: float | None = None) -> None:
    """The link's rate in each direction, shared by all copies in that direction; None is as fast as memory."""
    _loaded().set_link("h2d", h2d_bytes_per_s or 0.0)
    _loaded().set_link("d2h", d2h_bytes_per_s or 0.0)


def set_capacity(nbytes: int) -> None:
    """How much device memory there is; more is a ``torch.OutOfMemoryError``."""
    _loaded().set_capacity(nbytes)


def set_compute_delay(*, seconds_per_op: float = 0.0, bytes_per_s: float | None = None) -> None:
    """Makes each computation slower: by a fixed time, and by the bytes of its operands and results at a rate."""
    _loaded().set_compute_delay(seconds_per_op, bytes_per_s or 0.0)


def set_launch_blocking(on: bool) -> None:
    """Whether the host waits for each operation, as under CUDA_LAUNCH_BLOCKING=1; errors then come at their place."""
    _loaded().set_launch_blocking(on)


def poison_freed(on: bool) -> None:
    """Whether freed memory is filled with NaN, for operations that read it while it is freed."""
    _loaded().poison_freed(on)


def poison_fresh(on: bool) -> None:
    """Whether new memory is filled with NaN, so that a read of memory never written shows."""
    _loaded().poison_fresh(on)


def delay_copies(direction: Direction, seconds: float) -> None:
    """Each copy in this direction starts that much later."""
    _loaded().delay_copies(direction, seconds)


def fail_copy(direction: Direction, *, after: int = 0, message: str = "the link failed") -> None:
    """The next copy in this direction after ``after`` good ones fails, once; raised where the host synchronises."""
    _loaded().fail_copy(direction, after, message)


@contextmanager
def hold(lane: Lane) -> Iterator[None]:
    """Stops a lane while the block runs: each operation on it starts and stands still. For tests of order.

    A wait for held work ends after 60 s with an error.
    """
    _loaded().close_gate(lane)
    try:
        yield
    finally:
        _loaded().open_gate(lane)


@contextmanager
def record_operations() -> Iterator[list[Operation]]:
    """Collects the operations that run within the block. The list is filled, by end, when the block is left."""
    extension = _loaded()
    operations: list[Operation] = []
    extension.wait_for_all_streams()
    extension.take_operations()
    extension.record_operations(True)
    try:
        yield operations
        extension.wait_for_all_streams()
    finally:
        extension.record_operations(False)
        operations.extend(Operation(*row) for row in extension.take_operations())


def register_host_memory(address: int, nbytes: int) -> None:
    """Declares host memory pinned that somebody else mapped (``cudaHostRegister``)."""
    _loaded().register_host_memory(address, nbytes)


def unregister_host_memory(address: int) -> None:
    """Ends that, after all copies have finished; call it before the memory is unmapped."""
    _loaded().unregister_host_memory(address)


def stats() -> Stats:
    """Counts since the last ``reset()``. Operations still queued are not in them; synchronise first."""
    row = dict(_loaded().stats())
    row["host_synchronous_operators"] = tuple(row["host_synchronous_operators"])
    return Stats(**row)
