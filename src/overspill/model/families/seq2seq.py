"""Encoder-decoders (T5, BART), and Mamba, whose layers have no attention at all.

Source: `modeling_<family>.py` of transformers 5.24.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from overspill.model.build import Assembly, Built, Parts
from overspill.model.config import Config
from overspill.model.facts import AttentionFacts, LayerKind, MlpFacts
from overspill.model.families.feed import activation_of

__all__ = ["BUILDERS"]


def _t5(config: Config) -> Built:
    hidden, heads, kv = config.number("d_model"), config.number("num_heads"), config.number("d_kv")
    width, inner, vocab = config.number("d_ff"), heads * kv, config.number("vocab_size")
    projection = str(config.get("feed_forward_proj", "relu"))
    gated = projection.startswith("gated-")
    activation = "gelu_new" if projection == "gated-gelu" else projection.removeprefix("gated-")
    dropout = config.ratio("dropout_rate")
    attention = AttentionFacts(
        heads=heads, kv_heads=heads, head_dim=kv, v_head_dim=kv, relative_bias=True, dropout=dropout, softmax_fp32=False
    )

    def attend(parts: Parts, at: str, bias: bool) -> None:
        for name in ("q", "k", "v"):
            parts.linear(f"{at}.{name}", hidden, inner)
        parts.linear(f"{at}.o", inner, hidden)
        if bias:
            parts.weight(f"{at}.relative_attention_bias", config.integer("relative_attention_num_buckets", 32), heads)

    def layer(signature: tuple[bool, bool]) -> LayerKind:
        decodes, first = signature
        parts = Parts()
        attend(parts, "layer.0.SelfAttention", first)
        parts.norm("layer.0.layer_norm", hidden)
        if decodes:
            attend(parts, "layer.1.EncDecAttention", False)
            parts.norm("layer.1.layer_norm", hidden)
        last = f"layer.{2 if decodes else 1}"
        for name in ("wi_0", "wi_1") if gated else ("wi",):
            parts.linear(f"{last}.DenseReluDense.{name}", hidden, width)
        parts.linear(f"{last}.DenseReluDense.wo", width, hidden).norm(f"{last}.layer_norm", hidden)
        return LayerKind(
            name="full attention" + (" + cross attention" if decodes else "") + " + MLP", positions=(), hidden=hidden,
            parameters=tuple(parts.named), linears=tuple(parts.linears), norm="rms", norms=3 if decodes else 2,
            attention=replace(attention, causal=decodes),
            cross_attention=replace(attention, causal=False, relative_bias=False) if decodes else None,
            mlp=MlpFacts("gated" if gated else "plain", width, activation, dropout=dropout), residual_dropout=dropout,
        )  # fmt: skip

    assembly = Assembly()
    assembly.outer().weight("shared", vocab, hidden)
    tied = {}
    for role, key, decodes in (("encoder", "num_layers", False), ("decoder", "num_decoder_layers", True)):
        count = config.integer(key, 0) or config.number("num_layers")
        assembly.outer(f"{role}.").weight("embed_tokens", vocab, hidden)
        tied[f"{role}.embed_tokens.weight"] = "shared.weight"
        signatures = [(decodes, index == 0) for index in range(count)]
        named: Any = role
        assembly.stack(named, f"{role}.block", hidden, signatures, layer, final_norm="rms")
        assembly.outer(f"{role}.").norm("final_layer_norm", hidden)
    assembly.outer().linear("lm_head", hidden, vocab)
    # T5 v1.1 and Flan-T5 say false and their files hold a head of their own. transformers 5.24's config class says true
    # whatever the file does, and takes the key for "the output is scaled"; the weights decide, so the file does here.
    scaled = config.flag("tie_word_embeddings", True)
    if scaled:
        tied["lm_head.weight"] = "shared.weight"
    return assembly.finish(
        family=config.model_type, kind="encoder-decoder", hidden=hidden, vocab=vocab, positions="relative", tied=tied,
        head="lm_head", embedding_dropout=dropout, logits_scaled=scaled,
    )  # fmt: skip


def _bart(config: Config) -> Built:
    hidden, vocab, dropout = config.number("d_model"), config.number("vocab_size"), config.ratio("dropout")

    def layer(role: str) -> LayerKind:
        heads, width = config.number(f"{role}_attention_heads"), config.number(f"{role}_ffn_dim")
        decodes = role == "decoder"
        attention = AttentionFacts(
            heads=heads, kv_heads=heads, head_dim=hidden // heads, v_head_dim=hidden // heads, causal=decodes,
            bias=True, dropout=config.ratio("attention_dropout"), softmax_fp32=False,
        )  # fmt: skip
        parts = Parts()
        for at in ("self_attn", "encoder_attn") if decodes else ("self_attn",):
            for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
                parts.linear(f"{at}.{name}", hidden, hidden, True)
            parts.norm(f"{at}_layer_norm", hidden, bias=True)
        parts.linear("fc1", hidden, width, True).linear("fc2", width, hidden, True)
        parts.norm("final_layer_norm", hidden, bias=True)
        return LayerKind(
            name="full attention" + (" + cross attention" if decodes else "") + " + MLP", positions=(), hidden=hidden,
            parameters=tuple(parts.named), linears=tuple(parts.linears), norm="layer", norms=3 if decodes else 2,
            attention=attention, cross_attention=replace(attention, causal=False) if decodes else None,
            mlp=MlpFacts("plain", width, activation_of(config), True, config.ratio("activation_dropout")),
            residual_dropout=dropout,
        )  # fmt: skip

    assembly = Assembly()
    assembly.outer("model.").weight("shared", vocab, hidden)
    tied = {"lm_head.weight": "model.shared.weight"}
    positions = config.integer("max_position_embeddings")
    for role in ("encoder", "decoder"):
        named: Any = role
        outer = assembly.outer(f"model.{role}.").weight("embed_tokens", vocab, hidden)
        outer.weight("embed_positions", positions + 2, hidden)
        tied[f"model.{role}.embed_tokens.weight"] = "model.shared.weight"
        signatures = [role] * config.number(f"{role}_layers")
        assembly.stack(named, f"model.{role}.layers", hidden, signatures, layer)
        assembly.outer(f"model.{role}.").norm("layernorm_embedding", hidden, bias=True)
    assembly.outer().linear("lm_head", hidden, vocab)
    if not config.flag("tie_word_embeddings", True):
        raise ValueError("of BART, the shapes with tied embeddings are known")
    return assembly.finish(
        family=config.model_type, kind="encoder-decoder", hidden=hidden, vocab=vocab, positions="learned", tied=tied,
        head="lm_head", max_positions=positions, embedding_dropout=dropout, embedding_norm=True,
        embedding_scaled=config.flag("scale_embedding"),
    )  # fmt: skip


def _mamba(config: Config) -> Built:
    hidden, vocab, state = config.number("hidden_size"), config.number("vocab_size"), config.integer("state_size")
    inner, kernel = config.integer("expand", 2) * hidden, config.integer("conv_kernel", 4)
    if config.model_type == "falcon_mamba" and config.says("intermediate_size"):
        inner = config.number("intermediate_size")
    auto = config.get("time_step_rank", "auto") == "auto"
    rank = math.ceil(hidden / 16) if auto else config.integer("time_step_rank", minimum=1)
    bias, conv_bias = config.flag("use_bias"), config.flag("use_conv_bias", True)

    def layer(_: object) -> LayerKind:
        parts = Parts("mixer.").parameter("A_log", inner, state).parameter("D", inner)
        parts.weight("conv1d", inner, 1, kernel, bias=conv_bias).linear("in_proj", hidden, 2 * inner, bias)
        parts.linear("x_proj", inner, rank + 2 * state).linear("dt_proj", rank, inner, True)
        parts.linear("out_proj", inner, hidden, bias)
        whole = Parts().norm("norm", hidden).extend(parts)
        return LayerKind(
            "state space", (), hidden, tuple(whole.named), tuple(whole.linears), "rms", 1,
            AttentionFacts(
                kind="ssm", heads=1, kv_heads=1, head_dim=inner, v_head_dim=inner, conv_kernel=kernel, state_dim=state,
                output_gate=True,
            ),
        )  # fmt: skip

    assembly = Assembly()
    assembly.outer("backbone.").weight("embeddings", vocab, hidden)
    layers = ["ssm"] * config.number("num_hidden_layers")
    assembly.stack("decoder", "backbone.layers", hidden, layers, layer, final_norm="rms")
    assembly.outer("backbone.").norm("norm_f", hidden)
    assembly.outer().linear("lm_head", hidden, vocab)
    tied = {"lm_head.weight": "backbone.embeddings.weight"} if config.flag("tie_word_embeddings") else {}
    return assembly.finish(
        family=config.model_type, kind="decoder", hidden=hidden, vocab=vocab, positions="none", tied=tied,
        head="lm_head",
    )  # fmt: skip


BUILDERS: Final = {"t5": _t5, "bart": _bart, "mamba": _mamba, "falcon_mamba": _mamba}
