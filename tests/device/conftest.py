"""Tests that need an accelerator, run on the emulated one, in a process of their own (see device_process.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from testing import emulated_accelerator
from testing.emulated_accelerator import device_process
from testing.emulated_accelerator.device_process import is_device_process

HERE = Path(__file__).parent


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Tests of this folder alone: pytest asks this hook about every test of the session, wherever it lies."""
    return device_process.pytest_runtest_protocol(item, nextitem) if HERE in item.path.parents else None


@pytest.fixture(scope="session")
def _registered() -> ModuleType:
    assert is_device_process()
    try:
        emulated_accelerator.register()
    except emulated_accelerator.BuildError as error:
        pytest.skip(f"the emulated accelerator cannot be built here: {error}")
    return emulated_accelerator


@pytest.fixture
def emulated(_registered: ModuleType) -> Iterator[ModuleType]:
    """The emulated accelerator's switches and counters, all as after a fresh start; the device is "emulated".

    Registered once for the process. A test that leaves an error of the device unheard fails.
    """
    _registered.reset()
    yield _registered
    _registered._finish()
    unheard = _registered.stats().error_pending
    _registered.reset()
    assert not unheard, "a stream met an error that the test did not ask about; synchronise at its end"
