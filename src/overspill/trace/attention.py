"""Attention on meta: what each kernel keeps and takes, without its arithmetic.

`scaled_dot_product_attention` stands in for torch's operator while a trace runs, whoever calls it: models built with
"sdpa" need nothing else. For kernels that take no mask (flash, flex) `attention_registered` adds an attention function
and a mask function that returns None to transformers, under the name that it returns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch

from overspill.trace.rules import AttentionFootprint, AttentionKernel

__all__ = ["HF_NAME", "attention_registered", "scaled_dot_product_attention", "without_values"]

HF_NAME: Final = "overspill_traced"


class _Fused(torch.autograd.Function):
    """A kernel that keeps q, k, v, the output and a logsumexp, as `footprint` says."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        footprint: AttentionFootprint,
        dropout: bool,
    ) -> torch.Tensor:
        # Kernels work on (batch, sequence, heads, width) and the result is handed out with two dimensions swapped.
        batch, heads, queries, _ = query.shape
        by_token = query.transpose(1, 2)
        shape = (*by_token.shape[:-1], value.shape[-1])
        dense = torch.empty_like(by_token) if shape == by_token.shape else by_token.new_empty(shape)
        output = dense.transpose(1, 2)
        multiple = footprint.queries_multiple
        rows = -(-queries // multiple) * multiple
        logsumexp = query.new_empty((batch, heads, rows), dtype=torch.float32)
        random = query.new_empty((2,), dtype=torch.int64) if dropout else None
        ctx.save_for_backward(query, key, value, output, logsumexp, *(x for x in (bias, random) if x is not None))
        ctx.footprint = footprint
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, _output, _logsumexp, *_ = ctx.saved_tensors
        footprint: AttentionFootprint = ctx.footprint
        batch, heads, queries, width = query.shape
        rows = -(-queries // footprint.tile) * footprint.tile
        kept: list[torch.Tensor] = []
        if footprint.delta:
            kept.append(query.new_empty((batch, heads, rows), dtype=torch.float32))
        if footprint.accumulator:
            wide = -(-width // 32) * 32
            kept.append(query.new_empty((batch, rows, heads, wide), dtype=torch.float32))
        d_query = torch.empty_like(query)
        d_key, d_value = torch.empty_like(key), torch.empty_like(value)
        if footprint.expands_gradients and key.shape[1] != heads:
            for tensor in (key, value):
                kept.append(tensor.new_empty((batch, tensor.shape[2], heads, tensor.shape[3])))
        return d_query, d_key, d_value, None, None, None


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's operator with the footprint of the kernel that the trace was told. Shapes (batch, heads, length, width).

    ``sdpa`` chooses as torch does on CUDA: flash for 16-bit operands without a mask and heads up to 256 wide,
    memory-efficient otherwise.
    """
    from overspill.trace.interception import _below, active

    running = active()
    rules, kernel = running.rules, running.attention
    with _below():
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = (running.cache.cast(t, dtype) for t in (query, key, value))
            if attn_mask is not None:
                attn_mask = running.cache.cast(attn_mask, dtype)
        if kernel in (AttentionKernel.MATH, AttentionKernel.EAGER):
            running.on_product()
            plain: torch.Tensor = torch.ops.aten.scaled_dot_product_attention.default(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return plain
        footprint = {AttentionKernel.FLEX: rules.flex}.get(kernel, rules.flash)
        if kernel is AttentionKernel.SDPA:
            flash = attn_mask is None and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256
            footprint = rules.flash if flash else rules.efficient
        bias = None
        if attn_mask is not None and kernel is AttentionKernel.SDPA:
            bias = attn_mask
            if attn_mask.dtype is torch.bool:
                bias = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
        if footprint.repeats_heads and key.shape[1] != query.shape[1]:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        output: torch.Tensor = _Fused.apply(query, key, value, bias, footprint, dropout_p > 0)  # type: ignore[no-untyped-call]
        return output


def _hf_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def _hf_mask(*_: Any, **__: Any) -> None:
    return None


def attention_registered() -> str:
    """Registers both functions with transformers (again and again if asked) and returns their name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(HF_NAME, _hf_attention)
    AttentionMaskInterface.register(HF_NAME, _hf_mask)
    return HF_NAME


@contextmanager
def without_values(*, padded: bool) -> Iterator[None]:
    """Answers what transformers asks of tensors' values, which meta tensors do not have.

    Whether positions start anew within a row (packed sequences): no. Whether a 2-D mask is all ones, so that no 4-D
    mask is needed: it is, unless the batch is said to be ``padded``. Whether the grouped product of experts takes a
    dtype: for meta torch knows it in bf16; for others transformers' own loop of products has the same footprint.
    """
    masking, experts = (sys.modules.get(f"transformers.{name}") for name in ("masking_utils", "integrations.moe"))
    with ExitStack() as stack:
        if masking is not None:
            stack.enter_context(mock.patch.object(masking, "find_packed_sequence_indices", lambda *_, **__: None))
            stack.enter_context(mock.patch.object(masking, "fast_all", lambda _: not padded))
        if experts is not None:
            can_use = experts._can_use_grouped_mm

            def bf16_only(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
                return weight.dtype is torch.bfloat16 and bool(can_use(input, weight, offs))

            stack.enter_context(mock.patch.object(experts, "_can_use_grouped_mm", bf16_only))
        yield
