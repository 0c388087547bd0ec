"""An accelerator made of threads: device and stream code tested on a machine that has no GPU.

``register()`` adds the device "emulated" to this process's PyTorch: memory of its own that the host cannot read,
streams that run beside the host, a link that can be made slow, and faults on demand. What it emulates and what it
does not is in docs/theory/emulated-accelerator.md; README.md says how tests use it. It is never part of the wheel.

A process can register it once and keeps it, and ``torch.accelerator.is_available()`` is True from then on: that is why
the tests that use it run in a process of their own (``device_process.py``).
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from testing.emulated_accelerator._build import BuildError, build, has_compiler, load_extension
from testing.emulated_accelerator._values import (
    DELAYED,
    LANES,
    Delayed,
    Delays,
    Direction,
    Failing,
    Lane,
    Operation,
    Stats,
    idle_seconds,
)

__all__ = [
    "DEFAULT_CAPACITY_NBYTES",
    "DEVICE_NAME",
    "BuildError",
    "Delayed",
    "Delays",
    "Direction",
    "Failing",
    "Lane",
    "Operation",
    "Stats",
    "build",
    "fail",
    "has_compiler",
    "hold",
    "idle_seconds",
    "is_registered",
    "poison",
    "poison_freed",
    "poison_fresh",
    "poison_in_flight",
    "record_operations",
    "register",
    "register_host_memory",
    "reset",
    "set_capacity",
    "set_compute_delay",
    "set_delays",
    "set_launch_blocking",
    "set_link",
    "stats",
    "unregister_host_memory",
]

DEVICE_NAME = "emulated"
DEFAULT_CAPACITY_NBYTES = 1 << 30

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
        for lane in LANES:
            extension.open_gate(lane)
        extension.wait_for_all_streams()


def reset() -> None:
    """Waits for the device, then undoes every switch and fault, forgets errors, and clears the counters.

    A lost device works again afterwards.
    """
    extension = _loaded()
    _finish()
    extension.forget_faults()
    for lane in ("h2d", "d2h"):
        extension.set_link(lane, 0.0)
    extension.set_compute_delay(0.0, 0.0, 1.0)
    extension.set_launch_blocking(False)
    extension.set_capacity(DEFAULT_CAPACITY_NBYTES)
    poison(False)
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


def set_compute_delay(*, seconds_per_op: float = 0.0, bytes_per_s: float | None = None, times: float = 1.0) -> None:
    """Makes each computation slower. The streams share the computing units: what they ask of them takes turns.

    An operation's length is ``seconds_per_op``, plus the bytes of its operands and results at ``bytes_per_s``; the
    CPU's kernel runs within it, so that a step's computing time is known beforehand. ``times`` above 1 adds that many
    times what the kernel took, which is known only afterwards.

    Raises:
        ValueError: ``times`` is below 1, or a time or rate is negative.
    """
    if times < 1 or seconds_per_op < 0 or (bytes_per_s or 0.0) < 0:
        raise ValueError(f"computing cannot be made faster: {seconds_per_op=}, {bytes_per_s=}, {times=}")
    _loaded().set_compute_delay(seconds_per_op, bytes_per_s or 0.0, times)


def set_launch_blocking(on: bool) -> None:
    """Whether the host waits for each operation, as under CUDA_LAUNCH_BLOCKING=1; errors then come at their place."""
    _loaded().set_launch_blocking(on)


def poison(on: bool) -> None:
    """All three kinds of poison at once; what tests run under unless they say otherwise."""
    poison_freed(on)
    poison_fresh(on)
    poison_in_flight(on)


def poison_freed(on: bool) -> None:
    """Whether freed memory, of the device or pinned, is filled with NaN once its last operation is done."""
    _loaded().poison_freed(on)


def poison_fresh(on: bool) -> None:
    """Whether new memory, of the device or pinned, is filled with NaN: a read of what was never written shows."""
    _loaded().poison_fresh(on)


def poison_in_flight(on: bool) -> None:
    """Whether what a copy writes to is filled with NaN from the copy's start until its bytes arrive.

    So a reader that does not wait for the copy finds NaN, even where the same bytes lay there before (a buffer that
    is filled with the same values in each step).
    """
    _loaded().poison_in_flight(on)


def set_delays(delays: Delays) -> None:
    """Delays the operations launched from now on; ``Delays()`` ends it."""
    for kind in DELAYED:
        _loaded().set_delays(kind, list(getattr(delays, kind)))


def fail(what: Failing, *, after: int = 0, times: int = 1, message: str = "", fatal: bool = False) -> None:
    """Makes operations fail as they do on a real device: after ``after`` more good ones, the next ``times``.

    They are counted in the order of the host's calls. A failing kernel (``compute``) does nothing, a failing copy
    moves nothing; both raise ``torch.AcceleratorError`` where the host next synchronises. An ``allocation`` raises
    ``torch.OutOfMemoryError``, and ``pinning`` (allocating or registering pinned memory) ``torch.AcceleratorError``,
    at the call. ``message`` replaces CUDA's text for that error. ``fatal``: the device is lost; from then on it does
    nothing, and every launch, allocation, query and synchronisation raises the same error, until ``reset()``.
    """
    _loaded().fail(what, after, times, message, fatal)


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
