"""Token mixers of decoder layers: grouped-query attention, latent attention (MLA), and the gated delta rule.

Each function returns the module's parts, named inside the mixer, and its facts. Which one a family uses, and with which
of the options in ``Attend``, is in llama_line.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from overspill.model.build import Parts
from overspill.model.config import Config
from overspill.model.facts import AttentionFacts, AttentionKind, NormKind

__all__ = ["Attend", "Mixer", "delta", "grouped", "head_dim_of", "indexed", "latent", "rotary_dim_of", "window_of"]

Mixer = tuple[Parts, AttentionFacts]


@dataclass(frozen=True, slots=True)
class Attend:
    """How a family's attention differs from Llama's.

    qkv_bias, o_bias: a config key that says so, or the answer. qk_norm: over each head, the whole projection, or by a
    key: ``cohere`` and ``stablelm`` and ``phi`` name the three modules that read one. fused: one q, k, v projection.
    rotary: share of a head's dimensions that is rotated where the config does not say.
    """

    qkv_bias: str | bool = "attention_bias"
    o_bias: str | bool = "attention_bias"
    o_name: str = "o_proj"
    qk_norm: Literal["none", "head", "full", "cohere", "stablelm", "phi", "glm4_moe", "llama4"] = "none"
    fused: bool = False
    rotary: float = 1.0
    head_dim: Literal["stated", "hidden/heads"] = "stated"
    softcap: bool = False
    sinks: bool = False
    output_gate: bool = False
    dropout_key: str = "attention_dropout"


def says(config: Config, answer: str | bool) -> bool:
    return config.flag(answer) if isinstance(answer, str) else answer


def head_dim_of(config: Config) -> int:
    return config.integer("head_dim", 0) or config.number("hidden_size") // config.number("num_attention_heads")


def rotary_dim_of(config: Config, head_dim: int, share: float) -> int:
    """Dimensions of a head that are rotated; the share stands at the top or, in newer files, in rope_parameters."""
    if config.says("rotary_dim"):
        return config.integer("rotary_dim", head_dim)
    parameters: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    stated = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
    return int(head_dim * float(stated or config.get("partial_rotary_factor", share)))


def window_of(config: Config, kind: str) -> int | None:
    if kind == "sliding":
        return config.integer("sliding_window", 0) or None
    if kind == "chunked":
        return config.integer("attention_chunk_size", 8192)
    return None


def grouped(config: Config, style: Attend, norm: NormKind, kind: AttentionKind, rope: bool) -> Mixer:
    """Softmax attention with grouped keys and values."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    head_dim = head_dim_of(config) if style.head_dim == "stated" else hidden // heads
    query, kv = heads * head_dim, kv_heads * head_dim
    qkv_bias, o_bias = says(config, style.qkv_bias), says(config, style.o_bias)
    parts = Parts()
    if style.sinks:
        parts.parameter("sinks", heads)
    if style.fused:
        parts.linear("o_proj", query, hidden, o_bias).linear("qkv_proj", hidden, query + 2 * kv, qkv_bias)
    else:
        parts.linear("q_proj", hidden, query * (2 if style.output_gate else 1), qkv_bias)
        parts.linear("k_proj", hidden, kv, qkv_bias).linear("v_proj", hidden, kv, qkv_bias)
        parts.linear(style.o_name, query, hidden, o_bias)
    normed, norm_kind = _qk_norm(parts, config, style, norm, heads, kv_heads, head_dim, rope)
    return parts, AttentionFacts(
        kind=kind,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        window=window_of(config, kind),
        qk_norm=normed,
        norm=norm_kind,
        rotary_dim=rotary_dim_of(config, head_dim, style.rotary) if rope else 0,
        softcap=config.get("attn_logit_softcapping") if style.softcap else None,
        sinks=style.sinks,
        output_gate=style.output_gate,
        fused_qkv=style.fused,
        bias=qkv_bias,
        dropout=config.ratio(style.dropout_key),
    )


def _qk_norm(
    parts: Parts, config: Config, style: Attend, norm: NormKind, heads: int, kv_heads: int, head_dim: int, rope: bool
) -> tuple[Literal["none", "head", "full"], NormKind]:
    """Adds the norms on q and k, and says over what they go."""
    if style.qk_norm == "full":
        parts.norm("q_norm", heads * head_dim).norm("k_norm", kv_heads * head_dim)
        return "full", norm
    if style.qk_norm == "head" or (style.qk_norm == "glm4_moe" and config.flag("use_qk_norm")):
        parts.norm("q_norm", head_dim).norm("k_norm", head_dim)
        return "head", norm
    if style.qk_norm == "llama4" and config.flag("use_qk_norm") and rope:
        return "head", "rms"  # an L2 norm, which has no weight
    if style.qk_norm == "cohere" and config.flag("use_qk_norm"):
        parts.weight("q_norm", heads, head_dim).weight("k_norm", kv_heads, head_dim)
        return "head", norm
    if style.qk_norm in ("stablelm", "phi") and config.flag("qk_layernorm"):
        if style.qk_norm == "phi":
            parts.norm("q_layernorm", head_dim, bias=True).norm("k_layernorm", head_dim, bias=True)
        else:
            for name, count in (("q_layernorm", heads), ("k_layernorm", kv_heads)):
                for head in range(count):
                    parts.norm(f"{name}.norms.{head}", head_dim)
        return "head", "layer"
    return "none", norm


def latent(config: Config, style: Attend, norm: NormKind, kind: AttentionKind, rope: bool) -> Mixer:
    """Multi-head latent attention: queries and keys/values pass a low rank; a part of each head is rotated."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    q_rank, kv_rank = config.integer("q_lora_rank", 0), config.number("kv_lora_rank")
    nope, rotated = config.number("qk_nope_head_dim"), config.number("qk_rope_head_dim")
    value = config.integer("v_head_dim", 0) or hidden // heads
    bias = says(config, style.qkv_bias)
    parts = Parts()
    if q_rank:
        parts.linear("q_a_proj", hidden, q_rank, bias).norm("q_a_layernorm", q_rank)
        parts.linear("q_b_proj", q_rank, heads * (nope + rotated))
    else:
        parts.linear("q_proj", hidden, heads * (nope + rotated))
    parts.linear("kv_a_proj_with_mqa", hidden, kv_rank + rotated, bias).norm("kv_a_layernorm", kv_rank)
    parts.linear("kv_b_proj", kv_rank, heads * (nope + value)).linear("o_proj", heads * value, hidden, bias)
    return parts, AttentionFacts(
        kind=kind,
        heads=heads,
        kv_heads=heads,
        head_dim=nope + rotated,
        v_head_dim=value,
        norm=norm,
        rotary_dim=rotated,
        bias=bias,
        dropout=config.ratio(style.dropout_key),
        q_lora_rank=q_rank,
        kv_lora_rank=kv_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
    )


def indexed(config: Config, style: Attend, norm: NormKind, *, shared: bool) -> Mixer:
    """Latent attention over tokens that an indexer selects (DeepSeek-V3.2); shared: the layer before has selected."""
    parts, facts = latent(config, style, norm, "sparse", True)
    heads, dim = config.number("index_n_heads"), config.number("index_head_dim")
    if not shared:
        hidden = config.number("hidden_size")
        parts.linear("indexer.wq_b", facts.q_lora_rank, heads * dim).linear("indexer.wk", hidden, dim)
        parts.norm("indexer.k_norm", dim, bias=True).linear("indexer.weights_proj", hidden, heads)
    chosen = replace(
        facts, index_heads=0 if shared else heads, index_head_dim=dim, index_topk=config.number("index_topk")
    )
    return parts, chosen


def delta(config: Config, *, fused: bool) -> Mixer:
    """Gated delta rule (Qwen3-Next): linear attention with a short convolution; fused: q, k, v, z in one projection."""
    hidden = config.number("hidden_size")
    key_heads, value_heads = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
    key_dim, value_dim = config.number("linear_key_head_dim"), config.number("linear_value_head_dim")
    kernel = config.number("linear_conv_kernel_dim")
    keys, values = key_heads * key_dim, value_heads * value_dim
    parts = Parts().parameter("dt_bias", value_heads).parameter("A_log", value_heads)
    parts.weight("conv1d", 2 * keys + values, 1, kernel)
    if fused:
        parts.linear("in_proj_qkvz", hidden, 2 * keys + 2 * values).linear("in_proj_ba", hidden, 2 * value_heads)
        parts.norm("norm", value_dim).linear("out_proj", values, hidden)
    else:
        parts.norm("norm", value_dim).linear("out_proj", values, hidden)
        parts.linear("in_proj_qkv", hidden, 2 * keys + values).linear("in_proj_z", hidden, values)
        parts.linear("in_proj_b", hidden, value_heads).linear("in_proj_a", hidden, value_heads)
    return parts, AttentionFacts(
        kind="linear",
        heads=value_heads,
        kv_heads=key_heads,
        head_dim=key_dim,
        v_head_dim=value_dim,
        fused_qkv=True,
        output_gate=True,
        conv_kernel=kernel,
        state_dim=key_dim,
    )
