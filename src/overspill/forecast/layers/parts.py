"""The parts of a decoder layer: norms, rotary embedding, attention, MLP. Its linears: linears.py.

Each follows one code path of the frameworks, operation by operation; the source is named where it is. ``tokens`` is
sequences × length on this rank. What each keeps and needs comes out of the tape, not from here.
"""

from __future__ import annotations

from overspill.forecast.layers.linears import Layer, base_linear, linear
from overspill.forecast.tape import Category, Tape, Tensor, ops
from overspill.model.facts import AttentionFacts

__all__ = [
    "Layer", "attention", "base_linear", "enter", "gated_mlp", "join", "leave", "linear", "norm", "plain_mlp", "repeat",
    "scores",
]  # fmt: skip

FP32 = 4
INT64 = 8


def enter(layer: Layer, x: Tensor) -> Tensor:
    """From the split residual stream to all tokens (all-gather); backward scatters. Nothing happens without a split."""
    if layer.shard == 1:
        return x
    rows, size = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.crosses(tape.new(rows, size, Category.COMMUNICATION)),)

    return layer.tape.record((x,), (), backward, layer.tape.crosses(layer.tape.new(rows * layer.shard, size)))


def leave(layer: Layer, x: Tensor) -> Tensor:
    """To the split residual stream (reduce-scatter); backward gathers."""
    if layer.shard == 1:
        return x
    rows, size = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.crosses(tape.new(rows, size, Category.COMMUNICATION)),)

    layer.tape.crosses(x)
    return layer.tape.record((x,), (), backward, layer.tape.crosses(layer.tape.new(rows // layer.shard, size)))


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
        wide = ops.mul_weight(tape, wide, layer.parameter(name, width, FP32))
        return ops.cast(tape, wide, out_size)
    if style.norm == "wide":  # F.rms_norm(x.float(), weight).to(x.dtype): a weight of another dtype, so no fused kernel
        return ops.cast(tape, ops.mul_weight(tape, wide, weight), out_size)
    narrow = ops.cast(tape, wide, x.itemsize if not style.norm_fp32_output else FP32)
    del wide
    return ops.mul_weight(tape, narrow, weight)


def _rotate(layer: Layer, q: Tensor, share: float = 1.0, held: list[Tensor] | None = None) -> Tensor:
    """Rotary embedding of one of q, k; ``share`` of its elements are rotated. held: what the caller's frame keeps of
    that."""
    tape, style = layer.tape, layer.style
    if style.rope in ("in_place", "none"):
        return q
    if style.rope == "kernel":
        return ops.elementwise(tape, q)
    if style.rope == "complex":  # x.float() viewed as complex × freqs, type_as(x)
        wide = ops.cast(tape, q, FP32)
        return ops.cast(tape, ops.elementwise(tape, wide), q.itemsize)
    # (q * cos) + (rotate_half(q) * sin)
    rotated = q if share == 1 else tape.view(q, int(q.numel * share))
    straight = ops.elementwise(tape, rotated)
    half = tape.new(rotated.numel // 2, q.itemsize)
    turned = ops.elementwise(tape, rotated)
    del half
    turned = ops.elementwise(tape, turned)
    out = ops.add(tape, straight, turned)
    del straight, turned
    if share == 1:
        return out
    if held is not None:
        held += [q, out]
    return join(tape, (out, tape.view(q, q.numel - out.numel)), q.numel)


def attention(layer: Layer, x: Tensor, facts: AttentionFacts, names: dict[str, str]) -> Tensor:
    """Projections, rotary embedding, scores and values, output projection."""
    tape, style, split = layer.tape, layer.style, layer.split
    heads = max(1, facts.heads // split)
    kv_heads = max(1, facts.kv_heads // split)
    query, key, value = heads * facts.head_dim, kv_heads * facts.head_dim, kv_heads * facts.v_head_dim
    tokens = layer.tokens
    held: list[Tensor] = []
    if facts.is_mla:
        q, k, v = _latent(layer, x, facts, names, heads)
        kv_heads = heads
    elif facts.fused_qkv:
        packed = linear(layer, x, names["qkv"], query + key + value)
        slices = style.code == "transformers" and names["qkv"].endswith("qkv_proj")  # Phi-3's
        q, k, v = ops.split(tape, packed, [tokens * width for width in (query, key, value)], slices=slices)
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
        q, k = _rotate(layer, q, share, held), _rotate(layer, k, share, held)
    q, k, v = (ops.cast(tape, one, style.compute) for one in (q, k, v))
    if style.repeat_kv and kv_heads < heads:
        k = repeat(tape, k, heads // kv_heads)
        v = repeat(tape, v, heads // kv_heads)
        kv_heads = heads
    out = scores(layer, q, k, v, facts, heads, kv_heads)
    del q, k, v, held
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
        backward_scratch_nbytes=scratch, attends=True,
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
    weights = ops.softmax(tape, scores, itemsize=FP32 if facts.softmax_fp32 else None)
    del scores
    weights = ops.cast(tape, weights, q.itemsize)
    weights = ops.dropout(tape, weights, facts.dropout)
    out = ops.matmul(tape, weights, v, out_numel)
    layer.frame.append(weights)
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
        gate, up = ops.split(tape, packed, (numel, numel))
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


def plain_mlp(layer: Layer, x: Tensor, names: dict[str, str], intermediate: int, activation: str) -> Tensor:
    """down(act(up(x)))."""
    inner = linear(layer, x, names["up"], intermediate // layer.split)
    del x
    box = [inner]
    del inner
    inner = _activation(layer, box, activation)
    return linear(layer, inner, names["down"], layer.linears[names["down"]].out_features)


def _activation(layer: Layer, box: list[Tensor], name: str) -> Tensor:
    """Of the tensor in the box. One kernel keeps its input; what transformers writes out in Python keeps more."""
    tape, x = layer.tape, box.pop()
    if name in ("relu", "relu2"):
        x = ops.elementwise(tape, x, saves_output=True)
        return x if name == "relu" else ops.elementwise(tape, x, saves_input=True)
    if layer.style.code != "transformers" or name not in ("gelu_new", "gelu_fast", "quick_gelu"):
        return ops.silu(tape, x)
    if name == "quick_gelu":  # x * sigmoid(1.702 * x)
        return ops.mul(tape, x, ops.elementwise(tape, ops.scale(tape, x), saves_output=True))

    def argument() -> Tensor:
        if name == "gelu_new":  # c * (x + 0.044715 * x ** 3)
            return ops.scale(tape, ops.add(tape, x, ops.scale(tape, ops.elementwise(tape, x, saves_input=True))))
        # c * x * (1 + 0.044715 * x * x)
        return ops.mul(tape, ops.scale(tape, x), ops.scale(tape, ops.mul(tape, ops.scale(tape, x), x)))

    half = ops.scale(tape, x)  # 0.5 * x * (1 + tanh(argument))
    return ops.mul(tape, half, ops.scale(tape, ops.elementwise(tape, argument(), saves_output=True)))
