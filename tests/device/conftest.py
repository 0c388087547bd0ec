"""Tests of device code: on the CPU, on the emulated accelerator (in a process of its own), and on CUDA if present."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from testing import emulated_accelerator
from testing.devices import ACCELERATORS, DEVICES
from testing.emulated_accelerator import device_process
from testing.emulated_accelerator.device_process import is_device_process

HERE = Path(__file__).parent


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Tests of this folder alone: pytest asks this hook about every test of the session, wherever it lies."""
    return device_process.pytest_runtest_protocol(item, nextitem) if HERE in item.path.parents else None


@pytest.fixture(scope="session")
def _registered() -> ModuleType:
    assert is_device_process()
    if not emulated_accelerator.has_compiler():
        pytest.skip("the emulated accelerator is built from C++, and there is no compiler here")
    emulated_accelerator.register()
    return emulated_accelerator


@pytest.fixture
def emulated(_registered: ModuleType) -> Iterator[ModuleType]:
    """The emulated accelerator's switches and counters, as after a fresh start but poisoned; the device is "emulated".

    Registered once for the process. A test that leaves an error of the device unheard fails, and so does one that
    plants a failure which nothing meets.
    """
    _registered.reset()
    _registered.poison(True)
    yield _registered
    _registered._finish()
    stats = _registered.stats()
    _registered.reset()
    assert not stats.error_pending, "a stream met an error that the test did not ask about; synchronise at its end"
    assert stats.planted_failures_left == 0, "a planted failure was never met"


def _prepared(device: str, request: pytest.FixtureRequest) -> Iterator[str]:
    if device == "emulated":
        request.getfixturevalue("emulated")
    yield device
    if device == "cuda":
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a device: the CPU, the emulated accelerator, CUDA. See testing/devices.py."""
    yield from _prepared(request.param, request)


@pytest.fixture(params=ACCELERATORS)
def accelerator(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a device with memory and streams of its own: the emulated accelerator, CUDA."""
    yield from _prepared(request.param, request)
