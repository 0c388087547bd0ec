"""The devices that a test of device code runs on, and what makes one of them hostile.

A test that takes the fixture ``device`` runs on each of ``DEVICES``; one that takes ``accelerator`` on all but the
CPU. The emulated accelerator is the hard one: ``make_hostile`` slows its link and its computing, so that every wait
that a program needs is needed, poisons its memory, and delays what it is told to. Elsewhere there is nothing to switch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from testing import emulated_accelerator

__all__ = ["ACCELERATORS", "DEVICES", "make_hostile", "synchronize"]

_CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA or ROCm device"),
    ],
)
ACCELERATORS: list[Any] = ["emulated", _CUDA]
DEVICES: list[Any] = ["cpu", *ACCELERATORS]

LINK_BYTES_PER_S = 5e6
SECONDS_PER_OP = 2e-5


def make_hostile(device: str, delays: emulated_accelerator.Delays | None = None) -> None:
    """Lets a small model on the emulated device meet what a large one meets on a real one."""
    if device != "emulated":
        return
    emulated_accelerator.set_link(h2d_bytes_per_s=LINK_BYTES_PER_S, d2h_bytes_per_s=LINK_BYTES_PER_S)
    emulated_accelerator.set_compute_delay(seconds_per_op=SECONDS_PER_OP)
    emulated_accelerator.poison(True)
    if delays is not None:
        emulated_accelerator.set_delays(delays)


def synchronize(device: str) -> None:
    """Waits for the device, and raises what went wrong on it. The CPU is never behind."""
    if device != "cpu":
        torch.accelerator.synchronize()
