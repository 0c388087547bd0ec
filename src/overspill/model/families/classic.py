"""Decoders with layer norms and plain MLPs that are built in their own ways: GPT-2 to MPT and Falcon.

One function a family, in the order of its transformers module. Source: `modeling_<family>.py` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from overspill.model.build import Assembly, Built, Parts
from overspill.model.config import Config
from overspill.model.facts import AttentionFacts, LayerKind, MlpFacts
from overspill.model.families.attend import rotary_dim_of
from overspill.model.families.feed import activation_of

__all__ = ["BUILDERS"]


def _layer(parts: Parts, hidden: int, attention: AttentionFacts, mlp: MlpFacts, **more: Any) -> LayerKind:
    norms = int(more.pop("norms", 2))
    return LayerKind(
        name=f"{attention.kind} attention + MLP", positions=(), hidden=hidden, parameters=tuple(parts.named),
        linears=tuple(parts.linears), norm="layer", norms=norms, attention=attention, mlp=mlp, **more,
    )  # fmt: skip


def _head(
    config: Config, assembly: Assembly, embedding: str, width: int, *, name: str = "lm_head", bias: bool = False
) -> dict[str, Any]:
    assembly.outer().linear(name, width, config.number("vocab_size"), bias)
    tied = config.flag("tie_word_embeddings")
    return {
        "family": config.model_type, "kind": "decoder", "head": name, "vocab": config.number("vocab_size"),
        "tied": {f"{name}.weight": embedding} if tied else {},
    }  # fmt: skip


def _hidden(config: Config) -> int:
    """BLOOM's and Falcon's hidden size, which old files call n_embed."""
    return config.number("n_embed" if config.says("n_embed") else "hidden_size")


def _same(count: int, kinds: Sequence[str] = ("full",)) -> list[str]:
    return [kinds[index % len(kinds)] for index in range(count)]


def _gpt2(config: Config) -> Built:
    hidden, heads, layers = config.number("n_embd"), config.number("n_head"), config.number("n_layer")
    width = config.integer("n_inner", 4 * hidden)
    multi_query = config.model_type == "gpt_bigcode" and config.flag("multi_query")
    kv_heads, head_dim = (1 if multi_query else heads), hidden // heads
    attention = AttentionFacts(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim, fused_qkv=True, bias=True,
        dropout=config.ratio("attn_pdrop"), softmax_fp32=config.model_type != "gpt2",
    )  # fmt: skip

    def layer(_: object) -> LayerKind:
        parts = Parts().norm("ln_1", hidden, bias=True)
        if config.model_type == "gpt2":
            parts.conv1d("attn.c_attn", hidden, 3 * hidden).conv1d("attn.c_proj", hidden, hidden)
        else:
            parts.linear("attn.c_attn", hidden, hidden + 2 * kv_heads * head_dim, True)
            parts.linear("attn.c_proj", hidden, hidden, True)
        parts.norm("ln_2", hidden, bias=True)
        if config.model_type == "gpt2":
            parts.conv1d("mlp.c_fc", hidden, width).conv1d("mlp.c_proj", width, hidden)
        else:
            parts.linear("mlp.c_fc", hidden, width, True).linear("mlp.c_proj", width, hidden, True)
        mlp = MlpFacts("plain", width, activation_of(config), True)
        return _layer(parts, hidden, attention, mlp, residual_dropout=config.ratio("resid_pdrop"))

    assembly = Assembly()
    assembly.outer("transformer.").weight("wte", config.number("vocab_size"), hidden)
    assembly.outer("transformer.").weight("wpe", config.integer("n_positions"), hidden)
    assembly.stack("decoder", "transformer.h", hidden, _same(layers), layer, final_norm="layer")
    assembly.outer("transformer.").norm("ln_f", hidden, bias=True)
    facts = _head(config, assembly, "transformer.wte.weight", hidden)
    return assembly.finish(
        hidden=hidden, positions="learned", max_positions=config.integer("n_positions"),
        embedding_dropout=config.ratio("embd_pdrop"), **facts,
    )  # fmt: skip


def _gpt_neo(config: Config) -> Built:
    hidden, heads, layers = config.number("hidden_size"), config.number("num_heads"), config.number("num_layers")
    width = config.integer("intermediate_size", 4 * hidden)
    kinds: list[str] = []
    for names, count in config.get("attention_types", [[["global", "local"], layers // 2]]):
        kinds += [str(name) for name in names] * int(count)

    def layer(kind: str) -> LayerKind:
        attention = AttentionFacts(
            kind="sliding" if kind == "local" else "full", heads=heads, kv_heads=heads, head_dim=hidden // heads,
            v_head_dim=hidden // heads, window=config.integer("window_size", 256) if kind == "local" else None,
            dropout=config.ratio("attention_dropout"),
        )  # fmt: skip
        parts = Parts().norm("ln_1", hidden, bias=True)
        for name in ("k_proj", "v_proj", "q_proj"):
            parts.linear(f"attn.attention.{name}", hidden, hidden)
        parts.linear("attn.attention.out_proj", hidden, hidden, True).norm("ln_2", hidden, bias=True)
        parts.linear("mlp.c_fc", hidden, width, True).linear("mlp.c_proj", width, hidden, True)
        mlp = MlpFacts("plain", width, activation_of(config), True)
        return _layer(parts, hidden, attention, mlp, residual_dropout=config.ratio("resid_dropout"))

    assembly = Assembly()
    positions = config.integer("max_position_embeddings")
    assembly.outer("transformer.").weight("wte", config.number("vocab_size"), hidden).weight("wpe", positions, hidden)
    if len(kinds) != layers:
        raise ValueError(f"attention_types describes {len(kinds)} layers and num_layers says {layers}")
    assembly.stack("decoder", "transformer.h", hidden, kinds, layer, final_norm="layer")
    assembly.outer("transformer.").norm("ln_f", hidden, bias=True)
    facts = _head(config, assembly, "transformer.wte.weight", hidden)
    return assembly.finish(
        hidden=hidden, positions="learned", max_positions=positions, embedding_dropout=config.ratio("embed_dropout"),
        **facts,
    )  # fmt: skip


def _gptj(config: Config) -> Built:
    hidden, heads, layers = config.number("n_embd"), config.number("n_head"), config.number("n_layer")
    width = config.integer("n_inner", 4 * hidden)
    attention = AttentionFacts(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, v_head_dim=hidden // heads,
        rotary_dim=config.integer("rotary_dim", hidden // heads), dropout=config.ratio("attn_pdrop"),
    )  # fmt: skip

    def layer(_: object) -> LayerKind:
        parts = Parts().norm("ln_1", hidden, bias=True)
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            parts.linear(f"attn.{name}", hidden, hidden)
        parts.linear("mlp.fc_in", hidden, width, True).linear("mlp.fc_out", width, hidden, True)
        mlp = MlpFacts("plain", width, activation_of(config), True)
        dropout = config.ratio("resid_pdrop")
        return _layer(parts, hidden, attention, mlp, norms=1, parallel_residual=True, residual_dropout=dropout)

    assembly = Assembly()
    assembly.outer("transformer.").weight("wte", config.number("vocab_size"), hidden)
    assembly.stack("decoder", "transformer.h", hidden, _same(layers), layer, final_norm="layer")
    assembly.outer("transformer.").norm("ln_f", hidden, bias=True)
    facts = _head(config, assembly, "transformer.wte.weight", hidden, bias=True)
    return assembly.finish(
        hidden=hidden, positions="rotary", max_positions=config.integer("n_positions"),
        embedding_dropout=config.ratio("embd_pdrop"), **facts,
    )  # fmt: skip


def _gpt_neox(config: Config) -> Built:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    width, head_dim, bias = config.number("intermediate_size"), hidden // heads, config.flag("attention_bias", True)
    attention = AttentionFacts(
        heads=heads, kv_heads=heads, head_dim=head_dim, v_head_dim=head_dim, fused_qkv=True, bias=bias,
        rotary_dim=rotary_dim_of(config, head_dim, config.ratio("rotary_pct", 0.25)),
        dropout=config.ratio("attention_dropout"),
    )  # fmt: skip

    def layer(_: object) -> LayerKind:
        parts = Parts().norm("input_layernorm", hidden, bias=True).norm("post_attention_layernorm", hidden, bias=True)
        parts.linear("attention.query_key_value", hidden, 3 * hidden, bias)
        parts.linear("attention.dense", hidden, hidden, bias)
        parts.linear("mlp.dense_h_to_4h", hidden, width, True).linear("mlp.dense_4h_to_h", width, hidden, True)
        return _layer(
            parts, hidden, attention, MlpFacts("plain", width, activation_of(config), True),
            parallel_residual=config.flag("use_parallel_residual", True),
            residual_dropout=config.ratio("hidden_dropout"),
        )  # fmt: skip

    assembly = Assembly()
    assembly.outer("gpt_neox.").weight("embed_in", config.number("vocab_size"), hidden)
    layers = _same(config.number("num_hidden_layers"))
    assembly.stack("decoder", "gpt_neox.layers", hidden, layers, layer, final_norm="layer")
    assembly.outer("gpt_neox.").norm("final_layer_norm", hidden, bias=True)
    facts = _head(config, assembly, "gpt_neox.embed_in.weight", hidden)
    return assembly.finish(
        hidden=hidden, positions="rotary", max_positions=config.integer("max_position_embeddings"),
        embedding_dropout=config.ratio("hidden_dropout"), **facts,
    )  # fmt: skip


def _opt(config: Config) -> Built:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    width, bias = config.number("ffn_dim"), config.flag("enable_bias", True)
    affine = config.flag("layer_norm_elementwise_affine", True)
    embedded = config.integer("word_embed_proj_dim", hidden) if config.says("word_embed_proj_dim") else hidden
    positions = config.integer("max_position_embeddings")
    attention = AttentionFacts(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, v_head_dim=hidden // heads, bias=bias,
        dropout=config.ratio("attention_dropout"),
    )  # fmt: skip

    def layer(_: object) -> LayerKind:
        parts = Parts()
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            parts.linear(f"self_attn.{name}", hidden, hidden, bias)
        if affine:
            parts.norm("self_attn_layer_norm", hidden, bias=True)
        parts.linear("fc1", hidden, width, bias).linear("fc2", width, hidden, bias)
        if affine:
            parts.norm("final_layer_norm", hidden, bias=True)
        mlp = MlpFacts("plain", width, activation_of(config), bias)
        return _layer(parts, hidden, attention, mlp, residual_dropout=config.ratio("dropout"))

    assembly = Assembly()
    outer = assembly.outer("model.decoder.").weight("embed_tokens", config.number("vocab_size"), embedded)
    outer.weight("embed_positions", positions + 2, hidden)
    if embedded != hidden:
        outer.linear("project_out", hidden, embedded).linear("project_in", embedded, hidden)
    last = config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm")
    if last and affine:
        outer.norm("final_layer_norm", hidden, bias=True)
    layers = _same(config.number("num_hidden_layers"))
    norm: Any = "layer" if last else "none"
    assembly.stack("decoder", "model.decoder.layers", hidden, layers, layer, final_norm=norm)
    facts = _head(config, assembly, "model.decoder.embed_tokens.weight", embedded)
    return assembly.finish(hidden=hidden, positions="learned", max_positions=positions, **facts)


def _bloom(config: Config) -> Built:
    hidden, heads = _hidden(config), config.number("n_head")
    attention = AttentionFacts(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, v_head_dim=hidden // heads, alibi=True, fused_qkv=True,
        bias=True, dropout=config.ratio("attention_dropout"),
    )  # fmt: skip

    def layer(_: object) -> LayerKind:
        parts = Parts().norm("input_layernorm", hidden, bias=True)
        parts.linear("self_attention.query_key_value", hidden, 3 * hidden, True)
        parts.linear("self_attention.dense", hidden, hidden, True)
        parts.norm("post_attention_layernorm", hidden, bias=True)
        parts.linear("mlp.dense_h_to_4h", hidden, 4 * hidden, True).linear(
            "mlp.dense_4h_to_h", 4 * hidden, hidden, True
        )
        mlp = MlpFacts("plain", 4 * hidden, "bloom_gelu", True)
        return _layer(parts, hidden, attention, mlp, residual_dropout=config.ratio("hidden_dropout"))

    assembly = Assembly()
    outer = assembly.outer("transformer.").weight("word_embeddings", config.number("vocab_size"), hidden)
    outer.norm("word_embeddings_layernorm", hidden, bias=True)
    assembly.stack("decoder", "transformer.h", hidden, _same(config.number("n_layer")), layer, final_norm="layer")
    assembly.outer("transformer.").norm("ln_f", hidden, bias=True)
    facts = _head(config, assembly, "transformer.word_embeddings.weight", hidden)
    return assembly.finish(hidden=hidden, positions="alibi", embedding_norm=True, **facts)


def _mpt(config: Config) -> Built:
    """MPT. llm-foundry's own class has biases unless no_bias, and learned positions up to max_seq_len without ALiBi."""
    hidden, heads = config.number("d_model"), config.number("n_heads")
    own = config.model_type == "llmfoundry_mpt"
    table = config.get("attn_config", {})
    table = table if isinstance(table, dict) else {}
    # transformers' class reads neither key: no biases, ALiBi always, the MLP four times as wide.
    bias = own and not config.flag("no_bias")
    alibi = not own or bool(table.get("alibi", False))
    width = (config.integer("expansion_ratio", 4) if own else 4) * hidden
    attention = AttentionFacts(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, v_head_dim=hidden // heads, alibi=alibi, fused_qkv=True,
        bias=bias, dropout=float(table.get("attn_pdrop", 0.0)),
    )  # fmt: skip

    def layer(_: object) -> LayerKind:
        parts = Parts().norm("norm_1", hidden, bias).linear("attn.Wqkv", hidden, 3 * hidden, bias)
        parts.linear("attn.out_proj", hidden, hidden, bias).norm("norm_2", hidden, bias)
        parts.linear("ffn.up_proj", hidden, width, bias).linear("ffn.down_proj", width, hidden, bias)
        mlp = MlpFacts("plain", width, "gelu", bias)
        return _layer(parts, hidden, attention, mlp, residual_dropout=config.ratio("resid_pdrop"))

    assembly = Assembly()
    outer = assembly.outer("transformer.").weight("wte", config.number("vocab_size"), hidden)
    learned = not alibi and config.flag("learned_pos_emb", True)
    if learned:
        outer.weight("wpe", config.number("max_seq_len"), hidden)
    layers = _same(config.number("n_layers"))
    assembly.stack("decoder", "transformer.blocks", hidden, layers, layer, final_norm="layer")
    assembly.outer("transformer.").norm("norm_f", hidden, bias)
    facts = _head(config, assembly, "transformer.wte.weight", hidden)
    if own:
        facts["tied"] = {"lm_head.weight": "transformer.wte.weight"}
    return assembly.finish(
        hidden=hidden, positions="alibi" if alibi else "learned" if learned else "none",
        max_positions=config.integer("max_seq_len"), embedding_dropout=config.ratio("emb_pdrop"), **facts,
    )  # fmt: skip


def _falcon(config: Config) -> Built:
    hidden, heads = _hidden(config), config.number("num_attention_heads")
    new, parallel, bias = (config.flag(key) for key in ("new_decoder_architecture", "parallel_attn", "bias"))
    head_dim, width = hidden // heads, config.integer("ffn_hidden_size", 4 * hidden)
    grouped = config.integer("num_kv_heads", heads) if new else (1 if config.flag("multi_query") else heads)
    alibi = config.flag("alibi")
    two = new and config.integer("num_ln_in_parallel_attn", 2) == 2
    attention = AttentionFacts(
        heads=heads, kv_heads=grouped, head_dim=head_dim, v_head_dim=head_dim, alibi=alibi, fused_qkv=True, bias=bias,
        rotary_dim=0 if alibi else head_dim, dropout=config.ratio("attention_dropout"), softmax_fp32=False,
    )  # fmt: skip

    def layer(_: object) -> LayerKind:
        parts = Parts().linear("self_attention.query_key_value", hidden, (heads + 2 * grouped) * head_dim, bias)
        parts.linear("self_attention.dense", hidden, hidden, bias)
        parts.linear("mlp.dense_h_to_4h", hidden, width, bias).linear("mlp.dense_4h_to_h", width, hidden, bias)
        names = ("ln_attn", "ln_mlp") if two else ("input_layernorm",)
        if not parallel:
            names = ("post_attention_layernorm", "input_layernorm")
        for name in names:
            parts.norm(name, hidden, bias=True)
        return _layer(
            parts, hidden, attention, MlpFacts("plain", width, activation_of(config), bias), norms=len(names),
            parallel_residual=parallel, residual_dropout=config.ratio("hidden_dropout"),
        )  # fmt: skip

    assembly = Assembly()
    assembly.outer("transformer.").weight("word_embeddings", config.number("vocab_size"), hidden)
    layers = _same(config.number("num_hidden_layers"))
    assembly.stack("decoder", "transformer.h", hidden, layers, layer, final_norm="layer")
    assembly.outer("transformer.").norm("ln_f", hidden, bias=True)
    facts = _head(config, assembly, "transformer.word_embeddings.weight", hidden)
    return assembly.finish(
        hidden=hidden, positions="alibi" if alibi else "rotary",
        max_positions=config.integer("max_position_embeddings"), **facts,
    )  # fmt: skip


BUILDERS: Final = {
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt2,
    "gpt_neo": _gpt_neo,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bloom": _bloom,
    "mpt": _mpt,
    "llmfoundry_mpt": _mpt,
    "falcon": _falcon,
}
