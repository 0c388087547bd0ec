"""What belongs to a step beside weights and optimizer state: random generators, schedules, data position.

A snapshot is plain JSON, so that a manifest can hold it and nothing is ever unpickled. Tensors and arrays inside
tracked ``state_dict()``s are kept bit for bit, as base64 with dtype and shape. JSON has no infinity, which schedulers
begin with as their best value so far: such a float is kept by name.
"""

from __future__ import annotations

import base64
import math
import random
from typing import Any, Protocol

import numpy as np
import torch

from overspill.errors import OverspillError

__all__ = ["Tracked", "decode", "encode", "restore_rng", "take_rng"]

_MARKS = {"__tensor__", "__array__", "__tuple__", "__items__", "__float__"}


class Tracked(Protocol):
    """Anything with torch's two methods: a scheduler, a loader, a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def take_rng() -> dict[str, Any]:
    """The states of torch's, Python's and numpy's generators, and of the accelerator's where there is one."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": encode(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [str(kind), encode(np.asarray(keys)), int(position), int(has_gauss), float(cached)],
    }
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        state["accelerator"] = encode(module.get_rng_state())
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put all generators back to where take_rng() saw them."""
    torch.set_rng_state(decode(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, decode(keys), position, has_gauss, cached))
    if "accelerator" in state and torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        module.set_rng_state(decode(state["accelerator"]))


def encode(value: Any, where: str = "extra") -> Any:
    """Plain JSON for numbers, texts, lists, dicts, tensors and arrays. Raises OverspillError OVS504 for the rest."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        data = base64.b64encode(flat.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
        return {"__tensor__": str(flat.dtype).removeprefix("torch."), "shape": list(flat.shape), "data": data}
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"__array__": value.dtype.str, "shape": list(value.shape), "data": data}
    if isinstance(value, tuple | list):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return {"__tuple__": items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not _MARKS & value.keys():
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[encode(key, where), encode(item, f"{where}.{key}")] for key, item in value.items()]
        return {"__items__": pairs}
    raise OverspillError(
        "OVS504",
        "This value cannot be kept in a checkpoint.",
        field=where,
        value=type(value).__name__,
        next_step="Keep numbers, texts, lists, dicts, tensors and arrays in what you track.",
    )


def decode(value: Any) -> Any:
    """The inverse of encode()."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        raw = bytearray(base64.b64decode(value["data"]))
        dtype = getattr(torch, value["__tensor__"])
        if not raw:
            return torch.empty(value["shape"], dtype=dtype)
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(value["shape"])
    if "__array__" in value:
        data = base64.b64decode(value["data"])
        return np.frombuffer(data, dtype=np.dtype(value["__array__"])).reshape(value["shape"]).copy()
    if "__float__" in value:
        return float(value["__float__"])
    if "__tuple__" in value:
        return tuple(decode(item) for item in value["__tuple__"])
    if "__items__" in value:
        return {decode(key): decode(item) for key, item in value["__items__"]}
    return {key: decode(item) for key, item in value.items()}
