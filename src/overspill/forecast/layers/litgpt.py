"""A layer as LitGPT writes it: one matrix for queries, keys and values, its own LoRA for it, norms through fp32.

Read in litgpt/model.py and litgpt/lora.py (2023-11 to 0.5.x): LoRAQKVLinear pads the update with zeros to the width of
the projection; rotary embedding is a cat of the rotated and the passed part; keys and values are copied to all heads
where a model groups them.
"""

from __future__ import annotations

from overspill.forecast.layers import parts
from overspill.forecast.layers.parts import FP32, Layer
from overspill.forecast.layers.roles import roles_of
from overspill.forecast.layers.run import Run
from overspill.forecast.tape import Parameter, Tape, Tensor, ops
from overspill.model.facts import AttentionFacts, LayerKind, LinearShape, NormKind

__all__ = ["forward"]


def forward(layer: Layer, kind: LayerKind, x: Tensor, run: Run) -> Tensor:
    """One block. Raises KeyError for a layer without attention or MLP, which LitGPT has not."""
    tape = layer.tape
    roles = roles_of(kind)
    facts = kind.attention
    assert facts is not None and kind.mlp is not None
    mlp_names = {role: linear.name for role, linear in roles["mlp"].items()}

    def mlp(h: Tensor) -> Tensor:
        assert kind.mlp is not None
        if kind.mlp.kind == "plain":
            return parts.plain_mlp(layer, h, mlp_names, kind.mlp.intermediate, kind.mlp.activation)
        if "gate_up" in mlp_names:  # LitGPT splits Phi-3's
            return _split_gated(layer, h, mlp_names, kind.mlp.intermediate)
        return parts.gated_mlp(layer, h, mlp_names, kind.mlp.intermediate)

    h = _norm(layer, x, "norm_1", kind.norm, kind.hidden)
    attended = _attention(layer, h, facts, roles["attention"])
    if kind.norms > 2:
        attended = _norm(layer, attended, "norm_1_after", kind.norm, kind.hidden)
    if kind.parallel_residual:
        second = h if kind.norms < 2 else _norm(layer, x, "norm_2", kind.norm, kind.hidden)
        del h
        return ops.add(tape, ops.add(tape, mlp(second), attended), x)
    del h
    x = ops.add(tape, attended, x)
    del attended
    h = mlp(_norm(layer, x, "norm_2", kind.norm, kind.hidden))
    if kind.norms > 2:
        h = _norm(layer, h, "norm_2_after", kind.norm, kind.hidden)
    return ops.add(tape, h, x)


def _norm(layer: Layer, x: Tensor, name: str, kind: NormKind, width: int) -> Tensor:
    """RMSNorm: x.float(); mean(x * x); x * rsqrt; (x * weight.float()).to(dtype). LayerNorm is torch's."""
    if kind in ("layer", "layer_fp32", "none"):
        return parts.norm(layer, x, name, "layer" if kind == "layer_fp32" else kind, width)
    tape = layer.tape
    rows = x.numel // width
    # Before 2024 it ran in the input's dtype.
    wide = ops.cast(tape, x, FP32) if layer.style.norm_fp32 else x
    square = ops.mul(tape, wide, wide)
    factor = ops.elementwise(tape, _mean(tape, square, rows), saves_output=True)
    del square
    wide = ops.mul(tape, wide, factor)
    return ops.cast(tape, ops.mul_weight(tape, wide, layer.parameter(name, width, wide.itemsize)), x.itemsize)


def _mean(tape: Tape, x: Tensor, rows: int) -> Tensor:
    numel, size = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.new(numel, size),)

    return tape.record((x,), (), backward, tape.new(rows, size))


def _split_gated(layer: Layer, x: Tensor, names: dict[str, str], intermediate: int) -> Tensor:
    tape, shape = layer.tape, layer.linears[names["gate_up"]]
    half = LinearShape(names["gate_up"], shape.in_features, intermediate, shape.bias)
    layer.linears[names["gate_up"]] = half
    gate = ops.silu(tape, parts.linear(layer, x, names["gate_up"], intermediate))
    up = parts.linear(layer, x, names["gate_up"], intermediate)
    layer.linears[names["gate_up"]] = shape
    inner = ops.mul(tape, gate, up)
    del gate, up
    return parts.linear(layer, inner, names["down"], layer.linears[names["down"]].out_features)


def _attention(layer: Layer, x: Tensor, facts: AttentionFacts, roles: dict[str, LinearShape]) -> Tensor:
    tape, tokens = layer.tape, layer.tokens
    query, key, value = facts.query_width, facts.key_width, facts.value_width
    packed = _qkv(layer, x, facts, roles)
    del x
    q, k, v = (tape.view(packed, tokens * width) for width in (query, key, value))
    del packed
    if (facts.kv_heads < facts.heads and facts.kv_heads > 1) or facts.kv_heads == 1:
        k = parts.repeat(tape, k, facts.heads // facts.kv_heads)
        v = parts.repeat(tape, v, facts.heads // facts.kv_heads)
    if facts.qk_norm != "none":
        q = _norm(layer, q, "q_norm", facts.norm, facts.head_dim)
        k = _norm(layer, k, "k_norm", facts.norm, facts.head_dim)
    if facts.rotary_dim:
        q, k = _rope(layer, q, facts), _rope(layer, k, facts)
    out = parts.scores(layer, q, k, v, facts, facts.heads, facts.heads)
    del q, k, v
    return parts.linear(layer, out, roles["o"].name, roles["o"].out_features)


def _rope(layer: Layer, q: Tensor, facts: AttentionFacts) -> Tensor:
    """apply_rope on the rotated share, then cat with what passes (also when that is empty)."""
    tape = layer.tape
    share = facts.rotary_dim / facts.head_dim
    rotated = tape.view(q, int(q.numel * share))
    straight = ops.elementwise(tape, rotated)
    half = tape.new(rotated.numel // 2, rotated.itemsize)
    turned = ops.elementwise(tape, rotated)
    del half
    turned = ops.elementwise(tape, turned)
    roped = ops.add(tape, straight, turned)
    del straight, turned, rotated
    numel, size = q.numel, q.itemsize
    part = roped.numel

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.new(part, size),)

    return tape.record((roped,), (), backward, tape.new(numel, size))


def _qkv(layer: Layer, x: Tensor, facts: AttentionFacts, roles: dict[str, LinearShape]) -> Tensor:
    tape, style, adapter = layer.tape, layer.style, layer.style.adapter
    widths = {"q": facts.query_width, "k": facts.key_width, "v": facts.value_width}
    total = sum(widths.values())
    in_features = x.numel // layer.tokens
    fused = LinearShape("qkv", in_features, total, facts.bias)
    layer.linears["qkv"] = fused
    out = parts.base_linear(layer, x, "qkv", total)
    if adapter is None:
        return out
    chosen = [role for role in widths if layer.targeted(f"litgpt.{role}")]
    if not chosen:
        return out
    rank = adapter.rank * len(chosen)
    width = sum(widths[role] for role in chosen)
    down = Parameter(in_features * rank, adapter.itemsize, trained=True, keeps_grad=layer.keeps_grads)
    up = Parameter(width * adapter.rank, adapter.itemsize, trained=True, keeps_grad=layer.keeps_grads)
    source = ops.dropout(tape, x, adapter.dropout)
    a = ops.linear(tape, source, down, layer.tokens * rank)
    del source
    b = ops.linear(tape, ops.elementwise(tape, a), up, layer.tokens * width)  # conv1d on the transposed product
    b = ops.scale(tape, b)
    if len(chosen) < 3:
        numel, size = b.numel, b.itemsize

        def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
            return (tape.new(numel, size),)

        b = tape.record((b,), (), backward, tape.new(layer.tokens * total, size))
    return ops.add(tape, out, b)
