"""Takes operators apart the way the traced device would, before PyTorch takes them apart for meta.

[Note: A key above autograd] Meta tensors make PyTorch choose other ways than an accelerator: dropout with a mask of the
input's dtype, attention with all S × S scores, no autocast at all (`torch.autocast("meta")` raises). All of that is
decided before autograd, where a TorchDispatchMode sees nothing of it any more, and below functions, where a
TorchFunctionMode sees calls from Python only. The dispatcher has a key for just this place: an autocast key of a
device that this build does not have. Kernels registered for it run for the threads that switch it on, in forward
and in backward, and for no one else; with it switched off the process is as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from overspill.trace.autocast import CASTS, ELIGIBLE, Cast, CastCache, casting
from overspill.trace.rules import AttentionKernel, DeviceRules

__all__ = ["Interception", "active", "intercepting"]

_KEY_NAME: Final = "AutocastIPU"
_KEY: Final = getattr(torch._C.DispatchKey, _KEY_NAME)
_KEY_SET: Final = torch._C.DispatchKeySet(_KEY)


@dataclass
class Interception:
    """What one trace's intercepted operators need to know."""

    rules: DeviceRules
    attention: AttentionKernel
    cache: CastCache = field(default_factory=CastCache)
    on_product: Callable[[], None] = lambda: None
    """Called before each matrix product: cuBLAS takes its workspace at the first."""


_active: list[Interception] = []
_libraries: list[torch.library.Library] = []


def active() -> Interception:
    """The trace that is running in this process."""
    assert _active, "no trace is running"
    return _active[-1]


def _below() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(_KEY_SET)


def _register() -> None:
    """Once per process: kernels for the key; see [Note: A key above autograd]."""
    if _libraries:
        return
    from overspill.trace import attention

    fallback = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    fallback.fallback(torch.library.fallthrough_kernel, _KEY_NAME)  # type: ignore[no-untyped-call]
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    kernels: dict[str, Callable[..., Any]] = {
        "dropout": _dropout,
        "rms_norm": _rms_norm,
        "softmax.int": _softmax_kernel(torch.ops.aten.softmax.int, torch.ops.aten._softmax.default),
        "log_softmax.int": _softmax_kernel(torch.ops.aten.log_softmax.int, torch.ops.aten._log_softmax.default),
        "scaled_dot_product_attention": attention.scaled_dot_product_attention,
    }
    for name, cast in CASTS.items():
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if name in kernels:
            continue
        kernels[name] = _casting_kernel(operator, cast)
    for name, kernel in kernels.items():
        library.impl(name, kernel, _KEY_NAME)  # type: ignore[no-untyped-call]
    _libraries.extend((fallback, library))


_PRODUCTS: Final = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "einsum", "mv", "addmv"})


def _casting_kernel(operator: Any, cast: Cast) -> Callable[..., Any]:
    product = operator._schema.name.removeprefix("aten::") in _PRODUCTS

    def kernel(*args: Any, **kwargs: Any) -> Any:
        running = active()
        with _below():
            if product:
                running.on_product()
            if torch.is_autocast_enabled("cpu"):
                args, kwargs = casting(operator, cast, args, kwargs, running.cache)
            return operator(*args, **kwargs)

    return kernel


def _softmax_kernel(operator: Any, from_half: Any) -> Callable[..., Any]:
    def kernel(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        with _below():
            if dtype is None and torch.is_autocast_enabled("cpu") and input.dtype in ELIGIBLE:
                dtype = torch.float32
            if active().rules.softmax_from_half and input.dtype is torch.float16 and dtype is torch.float32:
                return from_half(input, dim, True)
            return operator(input, dim, dtype)

    return kernel


def _dropout(input: torch.Tensor, p: float, train: bool) -> Any:
    with _below():
        if active().rules.fused_dropout and train and 0 < p < 1 and input.numel():
            return torch.ops.aten.native_dropout.default(input, p, train)[0]
        return torch.ops.aten.dropout.default(input, p, train)


class _RmsNorm(torch.autograd.Function):
    """aten::_fused_rms_norm, which meta takes apart: keeps its input and a fp32 value for each row."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, dimensions: int) -> torch.Tensor:
        rows = input.shape[: input.dim() - dimensions]
        ctx.save_for_backward(input, weight, input.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        return torch.empty_like(input), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    running = active()
    with _below():
        if torch.is_autocast_enabled("cpu"):
            input = running.cache.cast(input, torch.float32)
            weight = None if weight is None else running.cache.cast(weight, torch.float32)
        if running.rules.fused_rms_norm:
            return _RmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
        return torch.ops.aten.rms_norm.default(input, normalized_shape, weight, eps)


@contextmanager
def intercepting(interception: Interception) -> Iterator[Interception]:
    """Switches the interception on in this thread, and for the backwards that it starts."""
    _register()
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY_NAME)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY_NAME, False)
    _active.append(interception)
    try:
        with torch._C._IncludeDispatchKeyGuard(_KEY):
            yield interception
    finally:
        _active.pop()
        interception.cache.clear()
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY_NAME, excluded)
