"""Encoders (BERT and its relatives, ViT) and encoder-decoders (T5, BART).

An encoder's config names its head in ``architectures``: the bare model, the masked language model, or a classifier over
``num_labels`` classes. Source: `modeling_<family>.py` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from overspill.model.build import Assembly, Built, Parts
from overspill.model.config import Config
from overspill.model.facts import AttentionFacts, LayerKind, MlpFacts, VisionFacts
from overspill.model.families.feed import activation_of

__all__ = ["BUILDERS", "side_of"]


def _attention(config: Config, heads_key: str = "num_attention_heads", **more: Any) -> AttentionFacts:
    hidden, heads = config.number("hidden_size"), config.number(heads_key)
    return AttentionFacts(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, v_head_dim=hidden // heads, causal=False, bias=True,
        softmax_fp32=False, **more,
    )  # fmt: skip


def _bert_layer(config: Config, names: tuple[str, str, str], **more: Any) -> LayerKind:
    hidden, width = config.number("hidden_size"), config.number("intermediate_size")
    parts = Parts()
    for name in names:
        parts.linear(f"attention.self.{name}", hidden, hidden, True)
    parts.linear("attention.output.dense", hidden, hidden, True).norm("attention.output.LayerNorm", hidden, bias=True)
    parts.linear("intermediate.dense", hidden, width, True).linear("output.dense", width, hidden, True)
    parts.norm("output.LayerNorm", hidden, bias=True)
    return LayerKind(
        name="full attention + MLP", positions=(), hidden=hidden, parameters=tuple(parts.named),
        linears=tuple(parts.linears), norm="layer", norms=2,
        attention=_attention(config, dropout=config.ratio("attention_probs_dropout_prob"), **more),
        mlp=MlpFacts("plain", width, activation_of(config), True), residual_dropout=config.ratio("hidden_dropout_prob"),
    )  # fmt: skip


def _task(config: Config) -> str:
    """``""`` for the bare model, or what the first of ``architectures`` is for."""
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    for task in ("ForMaskedLM", "ForSequenceClassification"):
        if name.endswith(task):
            return task
    if name and not name.endswith("Model"):
        raise ValueError(f"the shapes of {name} are not known, those of its Model, ForMaskedLM and "
                         "ForSequenceClassification are")  # fmt: skip
    return ""


def _labels(config: Config) -> int:
    names = config.get("id2label")
    return len(names) if isinstance(names, dict) and names else config.integer("num_labels", 2)


def _bert_like(root: str, *, positions_first: bool, head_first: bool = False) -> Callable[[Config], Built]:
    """BERT; RoBERTa lists positions last and counts two more; XLM-RoBERTa lists its head before its body."""

    def build(config: Config) -> Built:
        hidden, vocab, task = config.number("hidden_size"), config.number("vocab_size"), _task(config)
        at = f"{root}." if task else ""
        positions = config.integer("max_position_embeddings")
        assembly = Assembly()
        tied: dict[str, str] = {}
        if head_first:
            tied = _task_head(config, assembly, task, at, roberta=True)
            # Of two names for one matrix, the one that is listed first owns it.
            tied = {owner: name for name, owner in tied.items() if name.endswith("weight")} | {
                name: owner for name, owner in tied.items() if name.endswith("bias")
            }
        outer = assembly.outer(f"{at}embeddings.").weight("word_embeddings", vocab, hidden)
        if positions_first:
            outer.weight("position_embeddings", positions, hidden)
        outer.weight("token_type_embeddings", config.integer("type_vocab_size"), hidden)
        outer.norm("LayerNorm", hidden, bias=True)
        if not positions_first:
            outer.weight("position_embeddings", positions, hidden)
        layers = ["full"] * config.number("num_hidden_layers")
        names = ("query", "key", "value")
        assembly.stack("encoder", f"{at}encoder.layer", hidden, layers, lambda _: _bert_layer(config, names))
        if not task or (task == "ForSequenceClassification" and positions_first):
            assembly.outer(at).linear("pooler.dense", hidden, hidden, True)
        if not head_first:
            tied = _task_head(config, assembly, task, at, roberta=not positions_first)
        masked = "cls.predictions.decoder" if positions_first else "lm_head.decoder"
        return assembly.finish(
            family=config.model_type,
            kind="encoder",
            hidden=hidden,
            vocab=vocab,
            positions="learned",
            max_positions=positions if positions_first else positions - 2,
            head=masked if task == "ForMaskedLM" else None,
            tied=tied,
            embedding_norm=True,
            embedding_dropout=config.ratio("hidden_dropout_prob"),
        )

    return build


def _task_head(config: Config, assembly: Assembly, task: str, at: str, *, roberta: bool) -> dict[str, str]:
    """Adds what stands on the encoder for a task; what of it is tied."""
    hidden, vocab = config.number("hidden_size"), config.number("vocab_size")
    if task == "ForMaskedLM":
        return _masked_head(assembly, f"{at}embeddings.word_embeddings.weight", hidden, vocab, roberta)
    if task and roberta:
        outer = assembly.outer("classifier.").linear("dense", hidden, hidden, True)
        outer.linear("out_proj", hidden, _labels(config), True)
    elif task:
        assembly.outer().linear("classifier", hidden, _labels(config), True)
    return {}


def _masked_head(assembly: Assembly, embedding: str, hidden: int, vocab: int, roberta: bool) -> dict[str, str]:
    if roberta:
        outer = assembly.outer("lm_head.").parameter("bias", vocab).linear("dense", hidden, hidden, True)
        outer.norm("layer_norm", hidden, bias=True).linear("decoder", hidden, vocab, True)
        return {"lm_head.decoder.weight": embedding, "lm_head.decoder.bias": "lm_head.bias"}
    outer = assembly.outer("cls.predictions.").parameter("bias", vocab)
    outer.linear("transform.dense", hidden, hidden, True).norm("transform.LayerNorm", hidden, bias=True)
    outer.linear("decoder", hidden, vocab, True)
    at = "cls.predictions"
    return {f"{at}.decoder.weight": embedding, f"{at}.decoder.bias": f"{at}.bias"}


def _distilbert(config: Config) -> Built:
    hidden, heads, width = config.number("dim"), config.number("n_heads"), config.number("hidden_dim")
    task = _task(config)
    at, vocab = "distilbert." if task else "", config.number("vocab_size")
    attention = AttentionFacts(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, v_head_dim=hidden // heads, causal=False, bias=True,
        dropout=config.ratio("attention_dropout"), softmax_fp32=False,
    )  # fmt: skip

    def layer(_: object) -> LayerKind:
        parts = Parts()
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            parts.linear(f"attention.{name}", hidden, hidden, True)
        parts.norm("sa_layer_norm", hidden, bias=True)
        parts.linear("ffn.lin1", hidden, width, True).linear("ffn.lin2", width, hidden, True)
        parts.norm("output_layer_norm", hidden, bias=True)
        mlp = MlpFacts("plain", width, activation_of(config), True, config.ratio("dropout"))
        return LayerKind(
            "full attention + MLP", (), hidden, tuple(parts.named), tuple(parts.linears), "layer", 2, attention, mlp=mlp
        )

    assembly = Assembly()
    positions = config.integer("max_position_embeddings")
    outer = assembly.outer(f"{at}embeddings.").weight("word_embeddings", vocab, hidden)
    outer.weight("position_embeddings", positions, hidden).norm("LayerNorm", hidden, bias=True)
    assembly.stack("encoder", f"{at}transformer.layer", hidden, ["full"] * config.number("n_layers"), layer)
    tied: dict[str, str] = {}
    if task == "ForMaskedLM":
        outer = assembly.outer().linear("vocab_transform", hidden, hidden, True)
        outer.norm("vocab_layer_norm", hidden, bias=True).linear("vocab_projector", hidden, vocab, True)
        tied = {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"}
    elif task:
        assembly.outer().linear("pre_classifier", hidden, hidden, True)
        assembly.outer().linear("classifier", hidden, _labels(config), True)
    return assembly.finish(
        family=config.model_type, kind="encoder", hidden=hidden, vocab=vocab, positions="learned", tied=tied,
        head="vocab_projector" if task == "ForMaskedLM" else None, embedding_norm=True, max_positions=positions,
        embedding_dropout=config.ratio("dropout"),
    )  # fmt: skip


def _deberta(config: Config) -> Built:
    hidden, vocab = config.number("hidden_size"), config.number("vocab_size")
    if _task(config):
        raise ValueError("of DeBERTa, the shapes of the bare model are known")
    if not config.flag("relative_attention") or not config.flag("share_att_key"):
        raise ValueError("of DeBERTa, the shapes with relative attention and shared keys are known")
    assembly = Assembly()
    outer = assembly.outer("embeddings.").weight("word_embeddings", vocab, config.integer("embedding_size", hidden))
    if config.flag("position_biased_input", True):
        outer.weight("position_embeddings", config.integer("max_position_embeddings"), hidden)
    if config.integer("type_vocab_size"):
        outer.weight("token_type_embeddings", config.integer("type_vocab_size"), hidden)
    outer.norm("LayerNorm", hidden, bias=True)
    layers = ["full"] * config.number("num_hidden_layers")
    names = ("query_proj", "key_proj", "value_proj")
    assembly.stack(
        "encoder", "encoder.layer", hidden, layers, lambda _: _bert_layer(config, names, relative_bias=True)
    )  # fmt: skip
    most = config.integer("max_relative_positions", -1, minimum=-1)
    most = most if most > 0 else config.integer("max_position_embeddings")
    buckets = config.integer("position_buckets", -1, minimum=-1)
    outer = assembly.outer("encoder.").weight("rel_embeddings", 2 * (buckets if buckets > 0 else most), hidden)
    if "layer_norm" in str(config.get("norm_rel_ebd", "none")):
        outer.norm("LayerNorm", hidden, bias=True)
    if config.integer("conv_kernel_size"):
        kernel = config.integer("conv_kernel_size")
        width = hidden // config.integer("conv_groups", 1)
        outer.weight("conv.conv", hidden, width, kernel, bias=True).norm("conv.LayerNorm", hidden, bias=True)
    return assembly.finish(
        family=config.model_type, kind="encoder", hidden=hidden, vocab=vocab, positions="relative", embedding_norm=True,
        embedding_dropout=config.ratio("hidden_dropout_prob"), max_positions=config.integer("max_position_embeddings"),
    )  # fmt: skip


def side_of(value: Any) -> int:
    """A square's side, of a number or a list of two."""
    return int(value[0]) if isinstance(value, (list, tuple)) else int(value)


def _vit(config: Config) -> Built:
    if _task(config):
        raise ValueError("of ViT, the shapes of the bare model are known")
    hidden, width = config.number("hidden_size"), config.number("intermediate_size")
    patch, image = side_of(config.get("patch_size", 16)), side_of(config.get("image_size", 224))
    bias, channels = config.flag("qkv_bias", True), config.integer("num_channels", 3)

    def layer(_: object) -> LayerKind:
        parts = Parts()
        for name in ("q_proj", "k_proj", "v_proj"):
            parts.linear(f"attention.{name}", hidden, hidden, bias)
        parts.linear("attention.o_proj", hidden, hidden, True)
        parts.norm("layernorm_before", hidden, bias=True).norm("layernorm_after", hidden, bias=True)
        parts.linear("mlp.fc1", hidden, width, True).linear("mlp.fc2", width, hidden, True)
        return LayerKind(
            "full attention + MLP", (), hidden, tuple(parts.named), tuple(parts.linears), "layer", 2,
            _attention(config, dropout=config.ratio("attention_probs_dropout_prob")),
            mlp=MlpFacts("plain", width, activation_of(config), True),
            residual_dropout=config.ratio("hidden_dropout_prob"),
        )  # fmt: skip

    assembly = Assembly()
    outer = assembly.outer("embeddings.").parameter("cls_token", 1, 1, hidden)
    outer.parameter("position_embeddings", 1, (image // patch) ** 2 + 1, hidden)
    outer.weight("patch_embeddings.projection", hidden, channels, patch, patch, bias=True)
    layers = ["full"] * config.number("num_hidden_layers")
    assembly.stack("vision", "layers", hidden, layers, layer, final_norm="layer")
    outer = assembly.outer().norm("layernorm", hidden, bias=True)
    outer.linear("pooler.dense", hidden, config.integer("pooler_output_size", hidden), True)
    return assembly.finish(
        family=config.model_type, kind="vision", hidden=hidden, vocab=0, positions="learned",
        vision=VisionFacts(patch, channels, image, tokens_per_image=(image // patch) ** 2 + 1),
        embedding_dropout=config.ratio("hidden_dropout_prob"),
    )  # fmt: skip


BUILDERS: Final[dict[str, Callable[[Config], Built]]] = {
    "bert": _bert_like("bert", positions_first=True),
    "roberta": _bert_like("roberta", positions_first=False),
    "xlm-roberta": _bert_like("roberta", positions_first=False, head_first=True),
    "distilbert": _distilbert,
    "deberta-v2": _deberta,
    "vit": _vit,
}
