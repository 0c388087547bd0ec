"""Autocast for meta tensors: which operators run in which dtype, and the cache of cast weights.

The lists are those that PyTorch gives to every accelerator (AT_FORALL_… in ATen/autocast_mode.h of torch 2.13; a
test compares them with the header of the installed torch). The state (on or off, dtype, cache) is that of
`torch.autocast("cpu")`, since gradient checkpointing saves and restores that one when it recomputes; during a trace,
code that asks for autocast on meta or cuda gets this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, Final
from unittest import mock

import torch

__all__ = ["CASTS", "ELIGIBLE", "Cast", "CastCache", "casting", "one_autocast_for_all_devices"]


class Cast(Enum):
    """What autocast does to an operator."""

    LOW = "the chosen dtype"
    FP32 = "fp32"
    FP32_RESULT = "fp32 as the result's dtype, unless one is given"
    WIDEST = "the widest dtype among its operands"


_LOW = """_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention"""
_FP32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
upsample_bicubic2d _upsample_bicubic2d_aa"""
_FP32_RESULT = """prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList"""
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"

CASTS: Final[dict[str, Cast]] = {
    **dict.fromkeys(_LOW.split(), Cast.LOW),
    **dict.fromkeys(_FP32.split(), Cast.FP32),
    **dict.fromkeys(_FP32_RESULT.split(), Cast.FP32_RESULT),
    **dict.fromkeys(_WIDEST.split(), Cast.WIDEST),
}
#: Dtypes that autocast casts.
ELIGIBLE: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})


class CastCache:
    """Casts of trained fp32 weights, kept until the outermost autocast ends (cached_cast of ATen/autocast_mode.cpp)."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        self._casts.clear()

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype not in ELIGIBLE or tensor.dtype is dtype:
            return tensor
        cached = (
            dtype is torch.get_autocast_dtype("cpu")
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not cached:
            return tensor.to(dtype)
        found = self._casts.get(id(tensor))
        if found is None:
            found = self._casts[id(tensor)] = (tensor, tensor.to(dtype))
        return found[1]


def casting(
    operator: Any, cast: Cast, args: tuple[Any, ...], kwargs: dict[str, Any], cache: CastCache
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that autocast gives to the operator."""
    if cast is Cast.FP32_RESULT:
        first = args[0]
        if first.dtype not in ELIGIBLE:
            return args, kwargs
        names = [argument.name for argument in operator._schema.arguments]
        at = names.index("dtype")
        given = args[at] if at < len(args) else kwargs.get("dtype")
        if given is None:
            args = args[:at]
            kwargs = {**kwargs, "dtype": torch.float32}
        return args, kwargs
    dtype = torch.float32
    if cast is Cast.LOW:
        dtype = torch.get_autocast_dtype("cpu")
    elif cast is Cast.WIDEST:
        found = {t.dtype for t in _tensors((*args, *kwargs.values())) if t.dtype in ELIGIBLE}
        if torch.float32 not in found:
            return args, kwargs
    return (
        tuple(_each(value, dtype, cache) for value in args),
        {name: _each(value, dtype, cache) for name, value in kwargs.items()},
    )


def _each(value: Any, dtype: torch.dtype, cache: CastCache) -> Any:
    if isinstance(value, torch.Tensor):
        return cache.cast(value, dtype)
    if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return [_each(item, dtype, cache) for item in value]
    return value


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@contextmanager
def one_autocast_for_all_devices(cache: CastCache) -> Iterator[None]:
    """While it lasts, autocast on meta or cuda is the autocast that this module reads, and its end clears the cache."""
    real_autocast = torch.autocast
    real_enabled, real_dtype, real_clear = (
        torch.is_autocast_enabled,
        torch.get_autocast_dtype,
        torch.clear_autocast_cache,
    )

    def device(name: str) -> str:
        return "cpu" if name in ("meta", "cuda") else name

    class Autocast(real_autocast):  # type: ignore[valid-type,misc]
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(device(device_type), *args, **kwargs)

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return real_enabled(device(device_type))

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return real_dtype(device(device_type))

    def clear_autocast_cache() -> None:
        cache.clear()
        real_clear()

    with ExitStack() as stack:
        for target, name, value in (
            (torch, "autocast", Autocast),
            (torch.amp, "autocast", Autocast),
            (torch, "is_autocast_enabled", is_autocast_enabled),
            (torch, "get_autocast_dtype", get_autocast_dtype),
            (torch, "clear_autocast_cache", clear_autocast_cache),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield
