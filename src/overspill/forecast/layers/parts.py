"""The parts of a decoder layer: norms, rotary embedding, attention, MLP, and linears with their adapters.

Each follows one code path of the frameworks, operation by operation; the source is named where it is. ``tokens`` is
sequences × length on this rank. What each keeps and needs comes out of the tape, not from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from overspill.forecast.layers.style import Style
from overspill.forecast.tape import Category, Parameter, Tape, Tensor, ops
from overspill.model.facts import AttentionFacts, LinearShape

__all__ = [
    "Layer", "attention", "base_linear", "enter", "gated_mlp", "join", "leave", "linear", "norm", "plain_mlp", "repeat",
    "scores",
]  # fmt: skip

FP32 = 4
INT64 = 8


@dataclass(frozen=True)
class Layer:
    """What the parts need to know of the layer that they stand in. trained, targeted: by a linear's name.

    split: tensor-parallel ranks; widths are divided by it. shard: ranks that the residual stream is split over.
    """

    tape: Tape
    style: Style
    tokens: int
    seq_len: int
    trained: Callable[[str], bool]
    targeted: Callable[[str], bool]
    linears: dict[str, LinearShape]
    split: int = 1
    shard: int = 1
    keeps_grads: bool = True

    def parameter(self, name: str, numel: int, itemsize: int | None = None) -> Parameter:
        size = self.style.weight if itemsize is None else itemsize
        return Parameter(numel, size, trained=self.trained(name), keeps_grad=self.keeps_grads)


def enter(layer: Layer, x: Tensor) -> Tensor:
    """From the split residual stream to all tokens (all-gather); backward scatters. Nothing happens without a split."""
    if layer.shard == 1:
        return x
    rows, size = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.new(rows, size, Category.COMMUNICATION),)

    return layer.tape.record((x,), (), backward, layer.tape.new(rows * layer.shard, size))


def leave(layer: Layer, x: Tensor) -> Tensor:
    """To the split residual stream (reduce-scatter); backward gathers."""
    if layer.shard == 1:
        return x
    rows, size = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.new(rows, size, Category.COMMUNICATION),)

    return layer.tape.record((x,), (), backward, layer.tape.new(rows // layer.shard, size))


def norm(layer: Layer, x: Tensor, name: str, kind: str, width: int) -> Tensor:
    """One normalisation of rows of ``width``; x may hold several rows a token (per-head norms)."""
    tape, style = layer.tape, layer.style
    if kind == "none":
        return x
    weight = layer.parameter(name, width)
    rows = x.numel // width
    out_size = FP32 if style.norm_fp32_output else x.itemsize
    if style.norm == "kernel":
        return ops.fused(tape, (x, weight), x.numel, out_size, saves=(x,), extra_saved_nbytes=FP32 * rows)
    if style.norm == "composite" and kind != "layer":
        # torch's rms_norm before 2.8: upcast, pow, mean, rsqrt, mul, type_as, mul
        kind = "rms"
    if kind == "layer":
        source = ops.cast(tape, x, FP32) if style.autocast else x  # layer_norm is on autocast's fp32 list
        return ops.fused(
            tape, (source, weight), x.numel, source.itemsize, saves=(source,), extra_saved_nbytes=2 * FP32 * rows
        )
    # LlamaRMSNorm of transformers: hidden.to(fp32); pow(2).mean; hidden * rsqrt(variance + eps); weight * hidden.to(…)
    wide = ops.cast(tape, x, FP32)
    variance = ops.mean_of_square(tape, wide, rows)
    factor = ops.elementwise(tape, ops.scale(tape, variance), saves_output=True)
    del variance
    wide = ops.mul(tape, wide, factor)
    del factor
    if kind == "rms_fp32":  # Gemma: (1 + weight) in fp32, cast afterwards
        return ops.cast(tape, ops.mul_weight(tape, wide, layer.parameter(name, width, FP32)), out_size)
    if style.norm == "wide":  # F.rms_norm(x.float(), weight).to(x.dtype): a weight of another dtype, so no fused kernel
        return ops.cast(tape, ops.mul_weight(tape, wide, weight), out_size)
    narrow = ops.cast(tape, wide, x.itemsize if not style.norm_fp32_output else FP32)
    del wide
    return ops.mul_weight(tape, narrow, weight)


def linear(layer: Layer, x: Tensor, name: str, out_width: int) -> Tensor:
    """A linear module, quantised or not, with its adapter if it is targeted."""
    style = layer.style
    out = base_linear(layer, x, name, out_width)
    if style.adapter is None or not layer.targeted(name):
        return out
    return _with_adapter(layer, x, out, name, out_width)


def base_linear(layer: Layer, x: Tensor, name: str, out_width: int) -> Tensor:
    tape, style = layer.tape, layer.style
    shape = layer.linears[name]
    weight = layer.parameter(name + ".weight", shape.in_features * shape.out_features // layer.split)
    out_numel = layer.tokens * out_width
    if style.quantised:
        return _quantised_linear(tape, style, x, weight, out_numel)
    narrow = ops.cast(tape, x, style.compute)
    if style.autocast and style.weight != style.compute:
        weight = _cast_weight(tape, weight, style.compute)
    bias = layer.parameter(name + ".bias", out_width) if shape.bias else None
    return ops.linear(tape, narrow, weight, out_numel, bias=bias)


def _cast_weight(tape: Tape, weight: Parameter, itemsize: int) -> Parameter:
    """Under autocast: the matmul's gradient is in the compute dtype and is cast to the weight's (forecast/phases.py
    counts the cached copy)."""
    return Parameter(weight.numel, weight.itemsize, trained=weight.trained, keeps_grad=weight.keeps_grad)


def _quantised_linear(tape: Tape, style: Style, x: Tensor, weight: Parameter, out_numel: int) -> Tensor:
    """bitsandbytes MatMul4Bit, auto-gptq's QuantLinear: the weight is dequantised for each use, nothing is saved."""
    back = x.itemsize
    narrow = ops.cast(tape, x, style.compute)
    dequantised = _dequantised(tape, style, weight)
    out = tape.new(out_numel, narrow.itemsize)
    saved = (dequantised,) if style.saves_dequantised else ()
    del dequantised
    x_numel, x_size, needs = narrow.numel, narrow.itemsize, narrow.requires_grad

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor | None]:
        held = None if style.saves_dequantised else _dequantised(tape, style, weight)
        result = tape.new(x_numel, x_size, Category.TEMPORARIES) if needs else None
        del held
        return (result,)

    out = tape.record((narrow,), saved, backward, out)
    del narrow
    return ops.cast(tape, out, back)  # bitsandbytes answers in the dtype of what it got


def _dequantised(tape: Tape, style: Style, weight: Parameter) -> Tensor:
    """One kernel writes it (bitsandbytes, a compiled torchao), or a chain of operations with int64 indices does."""
    if style.dequantise_itemsize > style.compute:
        burst = tape.scratch(weight.numel * style.dequantise_itemsize)
        del burst
    return tape.scratch(weight.numel * style.compute)


def _with_adapter(layer: Layer, x: Tensor, out: Tensor, name: str, out_width: int) -> Tensor:
    tape, style, adapter = layer.tape, layer.style, layer.style.adapter
    assert adapter is not None
    shape = layer.linears[name]
    down = Parameter(shape.in_features * adapter.rank, adapter.itemsize, trained=True, keeps_grad=layer.keeps_grads)
    up = Parameter(shape.out_features * adapter.rank, adapter.itemsize, trained=True, keeps_grad=layer.keeps_grads)
    inner, outer = layer.tokens * adapter.rank, layer.tokens * out_width
    if adapter.code == "fused":
        # LoRA_W and LoRA_QKV as in Unsloth's fast_lora: the input is saved, with dropout its dropped copy besides; the
        # inner product is recomputed.
        dropped = (tape.new(x.numel, x.itemsize),) if adapter.dropout > 0 else ()
        return ops.fused(
            tape, (x, down, up, out), outer, out.itemsize, saves=(x, *dropped), backward_scratch_nbytes=inner * 2
        )
    size = style.compute if style.autocast else adapter.itemsize
    source = x
    if adapter.code == "peft":
        source = ops.cast(tape, source, adapter.itemsize)  # x.to(lora_A.weight.dtype)
    source = ops.dropout(tape, source, adapter.dropout)
    source = ops.cast(tape, source, size)  # autocast
    a = ops.linear(tape, source, down, inner)
    del source
    b = ops.linear(tape, a, up, outer)
    del a
    b = ops.scale(tape, b)
    result = ops.add(tape, out, b)
    del b
    return ops.cast(tape, result, out.itemsize)


def _rotate(layer: Layer, q: Tensor, share: float = 1.0) -> Tensor:
    """Rotary embedding of one of q, k; ``share`` of its elements are rotated."""
    tape, style = layer.tape, layer.style
    if style.rope in ("in_place", "none"):
        return q
    if style.rope == "kernel":
        return ops.elementwise(tape, q)
    if style.rope == "complex":  # x.float() viewed as complex × freqs, type_as(x)
        wide = ops.cast(tape, q, FP32)
        return ops.cast(tape, ops.elementwise(tape, wide), q.itemsize)
    # (q * cos) + (rotate_half(q) * sin)
    straight = ops.elementwise(tape, q)
    half = tape.new(q.numel // 2, q.itemsize)
    turned = ops.elementwise(tape, q)
    del half
    turned = ops.elementwise(tape, turned)
    out = ops.add(tape, straight, turned)
    if share < 1:
        del straight, turned
        return ops.elementwise(tape, out)  # cat of the rotated and the passed part
    return out


def attention(layer: Layer, x: Tensor, facts: AttentionFacts, names: dict[str, str]) -> Tensor:
    """Projections, rotary embedding, scores and values, output projection."""
    tape, style, split = layer.tape, layer.style, layer.split
    heads = max(1, facts.heads // split)
    kv_heads = max(1, facts.kv_heads // split)
    query, key, value = heads * facts.head_dim, kv_heads * facts.head_dim, kv_heads * facts.v_head_dim
    tokens = layer.tokens
    if facts.is_mla:
        q, k, v = _latent(layer, x, facts, names, heads)
        kv_heads = heads
    elif facts.fused_qkv:
        packed = linear(layer, x, names["qkv"], query + key + value)
        q, k, v = (tape.view(packed, tokens * width) for width in (query, key, value))
        del packed
    else:
        q = linear(layer, x, names["q"], query)
        k = linear(layer, x, names["k"], key)
        v = linear(layer, x, names["v"], value)
    del x
    if facts.qk_norm != "none":
        q = norm(layer, q, "q_norm", facts.norm, facts.head_dim if facts.qk_norm == "head" else query)
        k = norm(layer, k, "k_norm", facts.norm, facts.head_dim if facts.qk_norm == "head" else key)
    if facts.rotary_dim and not facts.is_mla:
        share = facts.rotary_dim / facts.head_dim
        q, k = _rotate(layer, q, share), _rotate(layer, k, share)
    q, k, v = (ops.cast(tape, one, style.compute) for one in (q, k, v))
    if style.repeat_kv and kv_heads < heads:
        k = repeat(tape, k, heads // kv_heads)
        v = repeat(tape, v, heads // kv_heads)
        kv_heads = heads
    out = scores(layer, q, k, v, facts, heads, kv_heads)
    del q, k, v
    if facts.output_gate:
        gate = linear(layer, out, names["gate"], heads * facts.v_head_dim) if "gate" in names else out
        out = ops.mul(tape, out, ops.elementwise(tape, gate, saves_output=True))
    return linear(layer, out, names["o"], layer.linears[names["o"]].out_features)


def _latent(
    layer: Layer, x: Tensor, facts: AttentionFacts, names: dict[str, str], heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Multi-head latent attention as DeepSeek's code: down projections are not split, up projections are."""
    tape, tokens = layer.tape, layer.tokens
    nope, rope, value = facts.qk_nope_head_dim, facts.qk_rope_head_dim, facts.v_head_dim
    if facts.q_lora_rank:
        low = linear(layer, x, names["q_a"], facts.q_lora_rank)
        low = norm(layer, low, "q_a_norm", "rms", facts.q_lora_rank)
        q = linear(layer, low, names["q_b"], heads * (nope + rope))
        del low
    else:
        q = linear(layer, x, names["q"], heads * (nope + rope))
    packed = linear(layer, x, names["kv_a"], facts.kv_lora_rank + rope)
    low = tape.view(packed, tokens * facts.kv_lora_rank)
    k_rope = tape.view(packed, tokens * rope)
    del packed
    low = norm(layer, low, "kv_a_norm", "rms", facts.kv_lora_rank)
    kv = linear(layer, low, names["kv_b"], heads * (nope + value))
    del low
    k_rope = _rotate(layer, k_rope)
    q_rope = _rotate(layer, tape.view(q, tokens * heads * rope))
    q = join(tape, (tape.view(q, tokens * heads * nope), q_rope))
    k = join(tape, (tape.view(kv, tokens * heads * nope), k_rope), tokens * heads * (nope + rope))
    v = tape.view(kv, tokens * heads * value)
    return q, k, v


def join(tape: Tape, parts: tuple[Tensor, ...], numel: int | None = None) -> Tensor:
    """cat, or writing into a fresh tensor: nothing saved; each part's gradient is a view or a small copy."""
    out_numel = sum(part.numel for part in parts) if numel is None else numel
    sizes = tuple((part.numel, part.itemsize) for part in parts)

    def backward(tape: Tape, grad: Tensor) -> list[Tensor | None]:
        return [Tensor(grad.storage, numel, size) for numel, size in sizes]

    return tape.record(parts, (), backward, tape.new(out_numel, parts[0].itemsize))


def repeat(tape: Tape, x: Tensor, times: int) -> Tensor:
    """repeat_kv: expand and reshape, a copy; backward sums."""
    numel, size = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.new(numel, size, Category.TEMPORARIES),)

    return tape.record((x,), (), backward, tape.new(x.numel * times, x.itemsize))


def scores(layer: Layer, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts, heads: int, kv_heads: int) -> Tensor:
    tape, style, tokens = layer.tape, layer.style, layer.tokens
    out_numel = tokens * heads * facts.v_head_dim
    if style.attention in ("eager", "math"):
        return _eager(layer, q, k, v, heads, kv_heads, facts, out_numel)
    lse = FP32 * heads * tokens
    # flash-attn 2's backward accumulates dq in fp32, and keeps one fp32 number a row and head beside it; with fewer
    # key heads it computes dk and dv for all heads, then sums (flash_api.cpp, 2.0 to 2.7).
    scratch = lse
    if style.flash_accumulates_fp32:
        scratch += FP32 * tokens * heads * facts.head_dim
    if kv_heads < heads:
        scratch += style.compute * tokens * heads * (facts.head_dim + facts.v_head_dim)
    return ops.fused(
        tape, (q, k, v), out_numel, style.compute, saves=(q, k, v), extra_saved_nbytes=lse, saves_output=True,
        backward_scratch_nbytes=scratch,
    )  # fmt: skip


def _eager(
    layer: Layer, q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, facts: AttentionFacts, out_numel: int
) -> Tensor:
    """eager_attention_forward of transformers: scores, softmax in fp32, cast, dropout, values."""
    tape, tokens = layer.tape, layer.tokens
    if kv_heads < heads:
        k, v = repeat(tape, k, heads // kv_heads), repeat(tape, v, heads // kv_heads)
    pairs = tokens * heads * layer.seq_len
    scores = ops.scale(tape, ops.matmul(tape, q, k, pairs))
    if facts.softcap:
        scores = ops.scale(tape, ops.elementwise(tape, ops.scale(tape, scores), saves_output=True))
    scores = ops.scale(tape, scores)  # + mask
    weights = ops.softmax(tape, scores, itemsize=FP32)
    del scores
    weights = ops.cast(tape, weights, q.itemsize)
    weights = ops.dropout(tape, weights, facts.dropout)
    out = ops.matmul(tape, weights, v, out_numel)
    del weights
    return ops.scale(tape, out)  # transpose and contiguous


def gated_mlp(layer: Layer, x: Tensor, names: dict[str, str], intermediate: int) -> Tensor:
    """down(act(gate(x)) * up(x)); one projection for both when ``gate_up`` is named."""
    tape, style, width = layer.tape, layer.style, intermediate // layer.split
    numel = layer.tokens * width
    if "gate_up" in names:
        packed = linear(layer, x, names["gate_up"], 2 * width)
        if style.mlp == "kernel":
            del x
            inner = ops.fused(tape, (packed,), numel, packed.itemsize, saves=(packed,))
            del packed
            return linear(layer, inner, names["down"], layer.linears[names["down"]].out_features)
        gate, up = tape.view(packed, numel), tape.view(packed, numel)
        del packed
    else:
        gate = linear(layer, x, names["gate"], width)
        up = None
    if style.mlp in ("recompute", "kernel_pair"):
        up = up if up is not None else linear(layer, x, names["up"], width)
        del x
        inner = ops.fused(
            tape,
            (gate, up),
            numel,
            gate.itemsize,
            saves=(gate, up),
            in_place_grads=2 if style.mlp == "recompute" else 0,
        )
        del gate, up
    else:
        active = ops.silu(tape, gate)
        del gate
        up = up if up is not None else linear(layer, x, names["up"], width)
        del x
        inner = ops.mul(tape, active, up)
        del active, up
    return linear(layer, inner, names["down"], layer.linears[names["down"]].out_features)


#: Tensors as wide as the MLP that a plain activation keeps beside its input: functions written in Python keep more.
_PYTHON_ACTIVATIONS = ("gelu_new", "gelu_fast", "quick_gelu", "relu2", "laplace")


def plain_mlp(layer: Layer, x: Tensor, names: dict[str, str], intermediate: int, activation: str) -> Tensor:
    """down(act(up(x)))."""
    tape, width = layer.tape, intermediate // layer.split
    inner = linear(layer, x, names["up"], width)
    del x
    if activation == "relu":
        inner = ops.elementwise(tape, inner, saves_output=True)
    elif activation in _PYTHON_ACTIVATIONS and layer.style.code == "transformers":
        cube = ops.elementwise(tape, inner, saves_input=True)
        inner = ops.mul(tape, inner, ops.scale(tape, ops.elementwise(tape, cube, saves_output=True)))
        del cube
    else:
        inner = ops.silu(tape, inner)
    return linear(layer, inner, names["down"], layer.linears[names["down"]].out_features)
