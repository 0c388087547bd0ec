"""A layer as Megatron-Core with TransformerEngine runs it: norms inside the linears, fused SwiGLU, split over ranks.

TE's LayerNormLinear saves its input, the normalised input (for the weight's gradient) and one factor a row; Linear
saves its input. With sequence parallelism both saved inputs are the rank's own rows, gathered again in backward.
bias_swiglu saves the packed gate and up; attention saves q, k, v, its output and one number a row and head.
"""

from __future__ import annotations

from overspill.forecast.layers import parts
from overspill.forecast.layers.moe import mixture
from overspill.forecast.layers.parts import FP32, Layer
from overspill.forecast.layers.roles import roles_of
from overspill.forecast.layers.run import Run
from overspill.forecast.tape import Category, Parameter, Tape, Tensor, ops
from overspill.model.facts import AttentionFacts, LayerKind, LinearShape

__all__ = ["forward"]


def forward(layer: Layer, kind: LayerKind, x: Tensor, run: Run) -> Tensor:
    """One transformer layer with sequence parallelism where the run has it."""
    tape = layer.tape
    roles = roles_of(kind)
    assert kind.attention is not None
    residual = x
    attended = _attention(layer, x, kind.attention, kind.hidden, roles["attention"])
    x = ops.add(tape, attended, residual)
    del attended, residual
    residual = x
    if kind.moe is not None:
        h = _norm(layer, x, "norm_2")
        out = mixture(layer, h, kind.moe, roles, run)
        del h
    else:
        assert kind.mlp is not None
        width = kind.mlp.intermediate // layer.split
        packed = _norm_linear(layer, x, "mlp.fc1", kind.hidden, 2 * width)
        inner = ops.fused(tape, (packed,), layer.tokens * width, packed.itemsize, saves=(packed,))
        del packed
        out = _row_linear(layer, inner, width, kind.hidden)
        del inner
    return ops.add(tape, out, residual)


def _norm(layer: Layer, x: Tensor, name: str) -> Tensor:
    rows = layer.tokens // layer.shard
    weight = layer.parameter(name, x.numel // rows)
    return ops.fused(layer.tape, (x, weight), x.numel, x.itemsize, saves=(x,), extra_saved_nbytes=FP32 * rows)


def _weight(layer: Layer, name: str, numel: int) -> Parameter:
    """Gradients go into a buffer that rests (main_grad): nothing is allocated for them."""
    return Parameter(numel, layer.style.weight, trained=layer.trained(name), keeps_grad=layer.keeps_grads)


def _fused_wgrad(weight: Parameter) -> Parameter:
    """gradient_accumulation_fusion: the weight's gradient is added to main_grad by the matmul itself."""
    return Parameter(weight.numel, weight.itemsize, trained=False)


def _norm_linear(layer: Layer, x: Tensor, name: str, hidden: int, out_width: int) -> Tensor:
    tape = layer.tape
    rows = layer.tokens // layer.shard
    normed = _norm(layer, x, name)
    gathered = tape.new(layer.tokens * hidden, x.itemsize, Category.COMMUNICATION) if layer.shard > 1 else None
    out = tape.new(layer.tokens * out_width, x.itemsize)
    del gathered
    size, tokens, shard = x.itemsize, layer.tokens, layer.shard

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        gathered = tape.new(tokens * hidden, size, Category.COMMUNICATION) if shard > 1 else None
        whole = tape.new(tokens * hidden, size, Category.TEMPORARIES)
        if shard == 1:
            return (whole,)
        part = tape.new(rows * hidden, size, Category.TEMPORARIES)
        del whole, gathered
        return (part,)

    return tape.record((normed,), (normed,), backward, out)


def _row_linear(layer: Layer, x: Tensor, in_width: int, hidden: int) -> Tensor:
    """The output is scattered over the residual's ranks."""
    tape = layer.tape
    rows, tokens, size, shard = layer.tokens // layer.shard, layer.tokens, x.itemsize, layer.shard
    whole = tape.new(tokens * hidden, size, Category.COMMUNICATION) if shard > 1 else None
    out = tape.new(rows * hidden, size)
    del whole

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        gathered = tape.new(tokens * hidden, size, Category.COMMUNICATION) if shard > 1 else None
        result = tape.new(tokens * in_width, size, Category.TEMPORARIES)
        del gathered
        return (result,)

    return tape.record((x,), (x,), backward, out)


def _attention(layer: Layer, x: Tensor, facts: AttentionFacts, hidden: int, roles: dict[str, LinearShape]) -> Tensor:
    tape, split, tokens = layer.tape, layer.split, layer.tokens
    heads, kv_heads = facts.heads // split, max(1, facts.kv_heads // split)
    if facts.is_mla:
        q, k, v = _latent(layer, x, facts, hidden, heads)
        kv_heads = heads
    else:
        query, key = heads * facts.head_dim, kv_heads * facts.head_dim
        packed = _norm_linear(layer, x, "attention.qkv", hidden, query + 2 * key)
        q, k, v = (tape.view(packed, tokens * width) for width in (query, key, key))
        del packed
        q, k = ops.elementwise(tape, q), ops.elementwise(tape, k)  # fused rotary: new tensors, nothing saved
    del x
    out = parts.scores(layer, q, k, v, facts, heads, kv_heads)
    del q, k, v
    return _row_linear(layer, out, heads * facts.v_head_dim, hidden)


def _latent(layer: Layer, x: Tensor, facts: AttentionFacts, hidden: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """MLASelfAttention: down projections of the normalised input, norms inside the up projections."""
    tape, tokens = layer.tape, layer.tokens
    nope, rope, value = facts.qk_nope_head_dim, facts.qk_rope_head_dim, facts.v_head_dim
    normed = _norm(layer, x, "norm_1")

    def project(h: Tensor, out_width: int, name: str) -> Tensor:
        weight = _weight(layer, name, h.numel // tokens * out_width)
        source = (h,)
        numel, size = h.numel, h.itemsize

        def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
            return (tape.new(numel, size, Category.TEMPORARIES),)

        del weight
        return tape.record((h,), source, backward, tape.new(tokens * out_width, size))

    low = project(normed, facts.q_lora_rank, "q_a") if facts.q_lora_rank else normed
    packed = project(normed, facts.kv_lora_rank + rope, "kv_a")
    del normed
    if facts.q_lora_rank:
        low = _norm(layer, low, "q_a_norm") if layer.shard == 1 else low
    q = project(low, heads * (nope + rope), "q_b")
    del low
    kv_low = tape.view(packed, tokens * facts.kv_lora_rank)
    k_rope = tape.view(packed, tokens * rope)
    del packed
    kv_low = ops.fused(
        tape, (kv_low,), kv_low.numel, kv_low.itemsize, saves=(kv_low,), extra_saved_nbytes=FP32 * tokens
    )
    kv = project(kv_low, heads * (nope + value), "kv_b")
    del kv_low
    k_rope = ops.elementwise(tape, k_rope)
    q_rope = ops.elementwise(tape, tape.view(q, tokens * heads * rope))
    q = parts.join(tape, (tape.view(q, tokens * heads * nope), q_rope))
    k = parts.join(tape, (tape.view(kv, tokens * heads * nope), k_rope), tokens * heads * (nope + rope))
    v = ops.elementwise(tape, tape.view(kv, tokens * heads * value))
    return q, k, v
