"""A layer as LitGPT writes it: one matrix for queries, keys and values, its own LoRA, LLaMA-Adapter, norms in fp32.

Read and run: litgpt/model.py, lora.py, adapter.py and adapter_v2.py of 0.2.0 to 0.5.12, and lit_gpt of late 2023. What
differs by version is in `LitGpt` (layers/style.py); docs/theory/litgpt.md says what each operation keeps, and
tests/unit/test_forecast_litgpt.py compares with bytes that were measured on the real modules.
"""

from __future__ import annotations

from overspill.forecast.layers import parts
from overspill.forecast.layers.parts import FP32, Layer
from overspill.forecast.layers.roles import roles_of
from overspill.forecast.layers.run import Run
from overspill.forecast.layers.style import LitGpt
from overspill.forecast.tape import Category, Parameter, Tape, Tensor, ops
from overspill.model.facts import AttentionFacts, LayerKind, LinearShape, NormKind

__all__ = ["FIRST_PROMPT", "PROMPT_TOKENS", "forward", "linear", "norm"]

PROMPT_TOKENS = 10  # Config.adapter_prompt_length
FIRST_PROMPT = 2  # Config.adapter_start_layer


def forward(layer: Layer, kind: LayerKind, x: Tensor, run: Run) -> Tensor:
    """One block. LitGPT has none without attention or MLP."""
    tape = layer.tape
    roles = roles_of(kind)
    facts = kind.attention
    assert facts is not None and kind.mlp is not None
    code = _facts(layer)
    # Nothing is deleted here: Block.forward's names, and each module's arguments, hold their tensors to the end.
    h = norm(layer, x, "norm_1", kind.norm, kind.hidden)
    attended = _attention(layer, h, facts, roles["attention"], run)
    if kind.norms > 2:
        attended = norm(layer, attended, "norm_1_after", kind.norm, kind.hidden)
    if code.adds_attention_first:
        if not kind.parallel_residual:
            x = ops.add(tape, attended, x)
            h = norm(layer, x, "norm_2", kind.norm, kind.hidden)
        else:
            if kind.norms > 1:
                h = norm(layer, x, "norm_2", kind.norm, kind.hidden)
            x = ops.add(tape, attended, x)
        if kind.norms > 2:
            return ops.add(
                tape, norm(layer, _mlp(layer, h, kind, roles["mlp"]), "norm_2_after", kind.norm, kind.hidden), x
            )
        return ops.add(tape, _mlp(layer, h, kind, roles["mlp"]), x)
    if kind.parallel_residual:
        _first = h if code.names_both_norms else None  # alive to the end
        if kind.norms > 1:
            h = norm(layer, x, "norm_2", kind.norm, kind.hidden)
        return ops.add(tape, ops.add(tape, _mlp(layer, h, kind, roles["mlp"]), attended), x)
    x = ops.add(tape, attended, x)
    out = _mlp(layer, norm(layer, x, "norm_2", kind.norm, kind.hidden), kind, roles["mlp"])
    if kind.norms > 2:
        out = norm(layer, out, "norm_2_after", kind.norm, kind.hidden)
    return ops.add(tape, out, x)


def _facts(layer: Layer) -> LitGpt:
    assert layer.style.litgpt is not None
    return layer.style.litgpt


def norm(layer: Layer, x: Tensor, name: str, kind: NormKind, width: int) -> Tensor:
    """RMSNorm: x.float(); mean(x * x); x * rsqrt; times the weight, cast back before or after. LayerNorm: torch's."""
    if kind == "none":
        return x
    tape, code = layer.tape, _facts(layer)
    # adapter_v2.adapter_filter names these, and neither the norms after a part nor those of queries and keys
    trained = layer.trained(name) or (code.prompt == "adapter_v2" and name in ("norm_1", "norm_2", "final_norm"))
    weight = Parameter(width, layer.style.weight, trained=trained, keeps_grad=layer.keeps_grads)
    rows = x.numel // width
    if kind in ("layer", "layer_fp32"):
        bias = Parameter(width, layer.style.weight, trained=trained, keeps_grad=layer.keeps_grads)
        return ops.fused(tape, (x, weight, bias), x.numel, x.itemsize, saves=(x,), extra_saved_nbytes=2 * FP32 * rows)
    size = x.itemsize
    wide = ops.cast(tape, x, FP32)
    factor = ops.elementwise(tape, _mean(tape, ops.mul(tape, wide, wide), rows), saves_output=True)
    normed = ops.mul(tape, wide, factor)
    if code.wide_norm_weight:
        return ops.cast(tape, ops.mul_weight(tape, normed, weight), size)
    normed = ops.cast(tape, normed, size)
    return ops.mul_weight(tape, normed, weight)


def _mean(tape: Tape, x: Tensor, rows: int) -> Tensor:
    numel, size = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.new(numel, size, Category.TEMPORARIES),)

    return tape.record((x,), (), backward, tape.new(rows, size))


def _mlp(layer: Layer, x: Tensor, kind: LayerKind, roles: dict[str, LinearShape]) -> Tensor:
    """GptNeoxMLP, LLaMAMLP or GemmaMLP: both projections first, then the activation. Phi-3's packed pair is split."""
    assert kind.mlp is not None
    tape, inner = layer.tape, kind.mlp.intermediate
    out = roles["down"].out_features
    if kind.mlp.kind == "plain":
        h = linear(layer, x, roles["up"], inner)
        h = ops.silu(tape, h)
    else:
        gate = linear(layer, x, roles.get("gate", roles.get("gate_up", roles["down"])), inner)
        up = linear(layer, x, roles.get("up", roles.get("gate_up", roles["down"])), inner)
        h = ops.mul(tape, ops.silu(tape, gate), up)
    return linear(layer, h, roles["down"], out)


def linear(layer: Layer, x: Tensor, shape: LinearShape, width: int) -> Tensor:
    """A linear module by the method: LoRALinear, AdapterV2Linear, or torch's (bitsandbytes' where quantised)."""
    tape, code, adapter = layer.tape, _facts(layer), layer.style.adapter
    if code.prompt == "adapter_v2":
        return _scaled(layer, x, shape, width)
    base = _base(layer, x, shape.name, shape.bias, width)
    if adapter is None or not layer.targeted(shape.name):
        return base
    # (dropout(x) @ A.T @ B.T) * scaling, added to the base's result
    rows, width_in = _rows(x, shape), shape.in_features
    down = Parameter(width_in * adapter.rank, adapter.itemsize, trained=True, keeps_grad=layer.keeps_grads)
    up = Parameter(width * adapter.rank, adapter.itemsize, trained=True, keeps_grad=layer.keeps_grads)
    a = ops.linear(tape, ops.dropout(tape, x, adapter.dropout), down, rows * adapter.rank)
    b = ops.linear(tape, a, up, rows * width)
    del a
    b = ops.scale(tape, b)
    return ops.add(tape, base, b)


def _rows(x: Tensor, shape: LinearShape) -> int:
    return x.numel // shape.in_features


def _scaled(layer: Layer, x: Tensor, shape: LinearShape, width: int) -> Tensor:
    """AdapterV2Linear: adapter_scale * (linear(x) + adapter_bias). The sum is kept for the scale's gradient."""
    tape = layer.tape
    size = layer.style.weight
    base = _base(layer, x, shape.name, shape.bias, width)
    bias = Parameter(width, size, trained=True, keeps_grad=layer.keeps_grads)
    scale = Parameter(width, size, trained=True, keeps_grad=layer.keeps_grads)
    needs, itemsize = base.requires_grad, base.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        return (
            Tensor(grad.storage, grad.numel, itemsize) if needs else None,
            tape.new(width, size, Category.TEMPORARIES),
        )

    shifted = tape.record((base, bias), (), backward, tape.new(base.numel, itemsize))
    del base
    return ops.mul_weight(tape, shifted, scale)


def _base(layer: Layer, x: Tensor, name: str, has_bias: bool, width: int) -> Tensor:
    tape, style = layer.tape, layer.style
    shape = layer.linears[name]
    weight = layer.parameter(name + ".weight", shape.in_features * width)
    out_numel = _rows(x, shape) * width
    if style.quantised:
        return _matmul_4bit(layer, x, weight, out_numel)
    bias = layer.parameter(name + ".bias", width) if has_bias else None
    return ops.linear(tape, x, weight, out_numel, bias=bias)


def _matmul_4bit(layer: Layer, x: Tensor, weight: Parameter, out_numel: int) -> Tensor:
    """bitsandbytes' MatMul4Bit under Lightning's BitsandbytesPrecision.

    The weight was quantised from fp16, so that it is dequantised to fp16 and then cast to the input's dtype. Up to
    bitsandbytes 0.43.0 the input hangs on the context as an attribute, which lives until the graph is dropped.
    """
    tape, size = layer.tape, x.itemsize
    keeps = _facts(layer).keeps_quantised_input

    def dequantised(tape: Tape) -> Tensor:
        half = tape.scratch(weight.numel * 2)
        cast = tape.scratch(weight.numel * size)
        del half
        return cast

    held = dequantised(tape)
    out = tape.new(out_numel, size)
    del held
    numel, needs = x.numel, x.requires_grad

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor | None]:
        if not needs:
            return (None,)
        held = dequantised(tape)
        result = tape.new(numel, size, Category.TEMPORARIES)
        del held
        return (result,)

    out = tape.record((x,), (), backward, out)
    if keeps and out.requires_grad:
        tape.outliving.append(Tensor(x.storage, x.numel, size))
    return out


def _attention(layer: Layer, x: Tensor, facts: AttentionFacts, roles: dict[str, LinearShape], run: Run) -> Tensor:
    """CausalSelfAttention. Grouped keys and values are copied to all heads before the rotation, from 0.5.5 after it."""
    tape, tokens, code = layer.tape, layer.tokens, _facts(layer)
    heads, groups = facts.heads, facts.kv_heads
    all_heads = tokens * facts.query_width
    packed = _qkv(layer, x, facts, roles)
    del x
    grouped = groups < heads
    q = tape.view(packed, all_heads)
    k, v = tape.view(packed, tokens * facts.key_width), tape.view(packed, tokens * facts.value_width)
    if grouped and not code.late_repeat:
        # expand and reshape: a view for one group, else copies, of the queries too as they stand between the others
        if groups == 1:
            k, v = tape.view(k, all_heads), tape.view(v, all_heads)
        else:
            q = ops.elementwise(tape, q)
            k, v = parts.repeat(tape, k, heads // groups), parts.repeat(tape, v, heads // groups)
    if facts.qk_norm != "none":
        q = norm(layer, q, "q_norm", facts.norm, facts.head_dim)
        k = norm(layer, k, "k_norm", facts.norm, facts.head_dim)
    if facts.rotary_dim:
        q_roped, k_roped = _rope(tape, q, facts), _rope(tape, k, facts)
        q = parts.join(tape, (q_roped, _slice(tape, q, q.numel - q_roped.numel)), q.numel)
        k = parts.join(tape, (k_roped, _slice(tape, k, k.numel - k_roped.numel)), k.numel)
    if grouped and code.late_repeat:
        k, v = parts.repeat(tape, k, heads // groups), parts.repeat(tape, v, heads // groups)
    out = _scores(layer, q, k, v, facts)
    if code.prompt != "none" and run.prompted:
        out = _prompt(layer, q, out, facts)
    return linear(layer, _side_by_side(tape, out), roles["o"], roles["o"].out_features)


def _side_by_side(tape: Tape, out: Tensor) -> Tensor:
    """``y.transpose(1, 2).reshape(B, T, -1)``, a copy: queries come out of cat head by head, and flash attention lays
    its result out as its queries (empty_like in flash_api.cpp)."""

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (grad,)

    return tape.record((out,), (), backward, tape.new(out.numel, out.itemsize))


def _prompt(layer: Layer, q: Tensor, out: Tensor, facts: AttentionFacts) -> Tensor:
    """LLaMA-Adapter: attention to the prompt's keys and values besides, times a gate a head, added."""
    tape, width = layer.tape, facts.kv_heads * facts.head_dim
    size = layer.style.weight
    prefix = Parameter(2 * PROMPT_TOKENS * width, size, trained=True, keeps_grad=layer.keeps_grads)
    gate = Parameter(facts.heads, size, trained=True, keeps_grad=layer.keeps_grads)
    keys = ops.fused(tape, (prefix,), 2 * PROMPT_TOKENS * facts.query_width, size)
    lse = FP32 * facts.heads * layer.tokens
    if facts.softcap:  # written out: tanh's result, the softmax in fp32 and its bf16 copy
        lse = (2 * size + FP32) * PROMPT_TOKENS * facts.heads * layer.tokens
    asked = ops.fused(
        tape, (q, keys), out.numel, out.itemsize, saves=(q, keys), extra_saved_nbytes=lse, saves_output=True,
        backward_scratch_nbytes=lse,
    )  # fmt: skip
    return ops.add(tape, out, ops.mul_weight(tape, asked, gate))


def _scores(layer: Layer, q: Tensor, k: Tensor, v: Tensor, facts: AttentionFacts) -> Tensor:
    """F.scaled_dot_product_attention, and written out where scores are capped (Gemma 2)."""
    if not facts.softcap:
        return parts.scores(layer, q, k, v, facts, facts.heads, facts.heads)
    tape, tokens, length = layer.tape, layer.tokens, layer.seq_len
    pairs = tokens * facts.heads * length
    scores = ops.scale(tape, ops.matmul(tape, q, k, pairs))
    scores = ops.scale(tape, scores)
    scores = ops.scale(tape, ops.elementwise(tape, scores, saves_output=True))  # tanh
    _mask = tape.new(length * length, q.itemsize)  # alive to the end
    scores = ops.scale(tape, scores)
    # torch fuses the cast into softmax for fp16 on a GPU alone: bf16 is cast first
    weights = ops.softmax(tape, ops.cast(tape, scores, FP32))
    del scores
    weights = ops.cast(tape, weights, q.itemsize)
    return ops.matmul(tape, weights, v, tokens * facts.query_width)


def _slice(tape: Tape, x: Tensor, numel: int) -> Tensor:
    """A slice of the last dimension: its gradient is written into zeros of the whole (slice_backward)."""
    whole, size = x.numel, x.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.new(whole, size, Category.TEMPORARIES),)

    return tape.record((x,), (), backward, Tensor(x.storage, numel, size))


def _rope(tape: Tape, x: Tensor, facts: AttentionFacts) -> Tensor:
    """apply_rope on the share that is rotated, with an fp32 table: x * cos + cat(-x2, x1) * sin, cast back."""
    numel, size = x.numel, x.itemsize
    rotated = int(numel * facts.rotary_dim / facts.head_dim)
    share = _slice(tape, x, rotated)
    first, second = _slice(tape, share, rotated // 2), _slice(tape, share, rotated // 2)
    turned = parts.join(tape, (ops.scale(tape, second), first), rotated)
    straight = ops.elementwise(tape, share, itemsize=FP32, scratch=2)
    wide = ops.elementwise(tape, turned, itemsize=FP32, scratch=2)
    roped = ops.add(tape, straight, wide)
    del straight, wide
    return ops.cast(tape, roped, size)


def _qkv(layer: Layer, x: Tensor, facts: AttentionFacts, roles: dict[str, LinearShape]) -> Tensor:
    """The packed projection. LoRAQKVLinear: F.linear with A, F.conv1d with B by groups, zero_pad to the whole width."""
    tape, adapter = layer.tape, layer.style.adapter
    widths = {"q": facts.query_width, "k": facts.key_width, "v": facts.value_width}
    total = sum(widths.values())
    in_features, tokens = x.numel // layer.tokens, layer.tokens
    packed = LinearShape("qkv", in_features, total, facts.bias)
    layer.linears["qkv"] = packed
    if adapter is None:
        return linear(layer, x, packed, total)
    chosen = [role for role in widths if layer.targeted(f"litgpt.{role}")]
    out = _base(layer, x, "qkv", facts.bias, total)
    if not chosen:
        return out
    rank, width = adapter.rank * len(chosen), sum(widths[role] for role in chosen)
    down = Parameter(in_features * rank, adapter.itemsize, trained=True, keeps_grad=layer.keeps_grads)
    up = Parameter(width * adapter.rank, adapter.itemsize, trained=True, keeps_grad=layer.keeps_grads)
    a = ops.linear(tape, ops.dropout(tape, x, adapter.dropout), down, tokens * rank)
    b = ops.linear(tape, a, up, tokens * width)
    del a
    if facts.kv_heads < facts.heads and len(chosen) > 1:
        b = ops.elementwise(tape, b)  # each part's convolution is its own, then cat
    padded = b
    if len(chosen) < 3:
        copies = layer.tokens > layer.seq_len and not _facts(layer).pads_in_place
        padded = _zero_pad(tape, b, tokens * total, copies=copies)
    padded = ops.scale(tape, padded)
    return ops.add(tape, out, padded)


def _zero_pad(tape: Tape, b: Tensor, numel: int, *, copies: bool) -> Tensor:
    """index_copy keeps its source (derivatives.yaml: ``source: index_select(...).expand_as(source)``).

    copies: the transposes before it make reshape copy a batch of several sequences (up to 0.3).
    """
    if copies:
        b = ops.elementwise(tape, b)
    width, size = b.numel, b.itemsize

    def backward(tape: Tape, grad: Tensor) -> tuple[Tensor]:
        return (tape.new(width, size, Category.TEMPORARIES),)

    return tape.record((b,), (b,), backward, tape.new(numel, size))
