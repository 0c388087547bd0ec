"""``torch.emulated``: the functions that PyTorch looks for in the module of a device (as in ``torch.cuda``).

What every accelerator offers through ``torch.accelerator`` is passed on to it. Own code of Overspill uses
``torch.accelerator`` and needs nothing from here.
"""

from __future__ import annotations

from types import ModuleType, TracebackType
from typing import Any

import torch

__all__ = ["make_device_module"]


class _Device:
    """``with torch.emulated.device(0):`` There is one device, so this only checks the index."""

    def __init__(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index not in (None, 0, -1):
            raise ValueError(f"the emulated accelerator has one device, 0; device {index} was asked for")

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        return None


def make_device_module(extension: ModuleType) -> ModuleType:
    """The module to give to ``torch._register_device_module``."""

    def get_rng_state(device: Any = 0) -> torch.Tensor:
        return torch.frombuffer(bytearray(extension.random_state()), dtype=torch.uint8)

    def set_rng_state(state: torch.Tensor, device: Any = 0) -> None:
        extension.set_random_state(bytes(state.cpu().numpy()))

    def manual_seed(seed: int) -> None:
        extension.manual_seed(int(seed) % 2**64)

    module = ModuleType("torch.emulated", __doc__)
    accelerator = torch.accelerator
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_initialized": True,  # what torch.utils.checkpoint asks before it keeps the generator's state
        "device": _Device,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: _Device(device) and None,
        "_is_in_bad_fork": extension.in_forked_child,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "initial_seed": extension.initial_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda: True,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "current_stream": accelerator.current_stream,
        "set_stream": accelerator.set_stream,
        "synchronize": accelerator.synchronize,
        "empty_cache": accelerator.empty_cache,
        "memory_stats": accelerator.memory_stats,
        "memory_allocated": accelerator.memory_allocated,
        "max_memory_allocated": accelerator.max_memory_allocated,
        "memory_reserved": accelerator.memory_reserved,
        "max_memory_reserved": accelerator.max_memory_reserved,
        "reset_peak_memory_stats": accelerator.reset_peak_memory_stats,
        "mem_get_info": accelerator.get_memory_info,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module
