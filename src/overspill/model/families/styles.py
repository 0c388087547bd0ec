"""How each family of the Llama line differs from Llama: one row a family, by config.json's model_type.

Source: `modeling_<family>.py` and `configuration_<family>.py` of transformers 5.24. Rules by which layers differ
(windows, positions without rotation, layers with experts) are functions here, since families share them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from overspill.model.config import Config
from overspill.model.families.attend import Attend
from overspill.model.families.feed import Experts
from overspill.model.families.llama_line import Signature, Style, decoder

__all__ = ["BUILDERS", "STYLES"]

_KINDS: Final = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
}


def _kinds(config: Config, otherwise: Callable[[int], str]) -> list[str]:
    """Kind of attention of each layer: as layer_types says, else by the family's rule."""
    layers = config.number("num_hidden_layers")
    stated = config.get("layer_types")
    if isinstance(stated, list):
        unknown = next((kind for kind in stated if kind not in _KINDS), None)
        if unknown is not None or len(stated) != layers:
            raise ValueError(f"layer_types must name a known kind for each of {layers} layers, not {unknown!r}")
        return [_KINDS[str(kind)] for kind in stated]
    return [otherwise(index) for index in range(layers)]


def _every(period: int, key: str = "", *, rotate_full: bool = True) -> Callable[[Config], list[Signature]]:
    """Sliding, but for every period-th layer; rotate_full: those are rotated, too."""

    def layers(config: Config) -> list[Signature]:
        stated = config.get(key) if key else None
        if isinstance(stated, str):
            count, last = len(stated), config.number("num_hidden_layers") - 1
            kinds = _kinds(
                config, lambda i: "full" if i == last or stated[i % count] == "G" else "sliding"
            )  # Exaone-4's "LLLG"
        else:
            every = int(stated or period)
            kinds = _kinds(config, lambda i: "sliding" if (i + 1) % every else "full")
        windowed = config.integer("sliding_window", 0) > 0
        return [(kind, rotate_full or kind == "sliding" or not windowed, False) for kind in kinds]

    return layers


def _sliding_from(config: Config) -> list[Signature]:
    """Qwen: a window from layer max_window_layers on, where use_sliding_window says so."""
    first = config.integer("max_window_layers", 0) if config.flag("use_sliding_window") else 1 << 30
    return [(kind, True, False) for kind in _kinds(config, lambda i: "sliding" if i >= first else "full")]


def _all_sliding(config: Config) -> list[Signature]:
    kind = "sliding" if config.integer("sliding_window", 0) else "full"
    return [(found, True, False) for found in _kinds(config, lambda _: kind)]


def _no_window(config: Config) -> list[Signature]:
    return [("full", True, False)] * config.number("num_hidden_layers")


def _some_unrotated(config: Config) -> list[Signature]:
    """SmolLM3: every no_rope_layer_interval-th layer is not rotated."""
    interval = config.integer("no_rope_layer_interval", 4)
    stated = config.get("no_rope_layers")
    count = config.number("num_hidden_layers")
    rotated = [bool(value) for value in stated] if stated else [(i + 1) % interval != 0 for i in range(count)]
    windowed = config.flag("use_sliding_window") and config.integer("sliding_window", 0) > 0
    kinds = _kinds(config, lambda i: "sliding" if windowed and not rotated[i] else "full")
    return [(kind, rotated[index], False) for index, kind in enumerate(kinds)]


def _llama4(config: Config) -> list[Signature]:
    """Llama 4: chunked where rotated; experts at the last of every interleave_moe_layer_step layers."""
    count, interval = config.number("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    stated = config.get("no_rope_layers")
    rotated = [bool(value) for value in stated] if stated else [(i + 1) % interval != 0 for i in range(count)]
    chunked = bool(config.get("attention_chunk_size"))
    kinds = _kinds(config, lambda i: "chunked" if rotated[i] and chunked else "full")
    step = config.integer("interleave_moe_layer_step", 1)
    listed = config.get("moe_layers")
    experts = set(listed) if isinstance(listed, list) else set(range(step - 1, count, step))
    return [(kinds[i], rotated[i], i in experts) for i in range(count)]


def _qwen_moe(config: Config) -> list[Signature]:
    """Qwen2-MoE and Qwen3-MoE: experts at every decoder_sparse_step-th layer, but for mlp_only_layers."""
    step, dense = config.integer("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or [])
    windowed = config.flag("use_sliding_window") and config.integer("sliding_window", 0) > 0
    if config.model_type == "qwen2_moe":
        most = config.integer("max_window_layers", 28)
        kinds = _kinds(config, lambda i: "sliding" if windowed and (i + 1) % 2 and i < most else "full")
    else:
        kinds = ["sliding" if windowed else "full"] * config.number("num_hidden_layers")
    some = config.integer("num_experts", 0) > 0
    return [(kind, True, some and i not in dense and (i + 1) % step == 0) for i, kind in enumerate(kinds)]


def _qwen_next(config: Config) -> list[Signature]:
    """Qwen3-Next: the delta rule, but for every full_attention_interval-th layer."""
    every = config.integer("full_attention_interval", 4)
    kinds = _kinds(config, lambda i: "linear" if (i + 1) % every else "full")
    step, dense = config.integer("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or [])
    some = config.model_type != "qwen3_5_text" and config.integer("num_experts", 0) > 0
    return [(kind, kind != "linear", some and i not in dense and (i + 1) % step == 0) for i, kind in enumerate(kinds)]


def _dense_first(config: Config) -> list[Signature]:
    """DeepSeek, GLM-4-MoE: the first first_k_dense_replace layers have a dense MLP."""
    dense = config.integer("first_k_dense_replace", 0)
    return [("full", True, index >= dense) for index in range(config.number("num_hidden_layers"))]


def _indexed(config: Config) -> list[Signature]:
    """DeepSeek-V3.2 and GLM-5: which layers select tokens themselves, and which have experts."""
    count, stated = config.number("num_hidden_layers"), config.get("indexer_types")
    pattern = config.get("index_topk_pattern")
    every, first = max(config.integer("index_topk_freq", 1), 1), config.integer("index_skip_topk_offset", 2)
    if config.model_type == "deepseek_v32":
        shared = [False] * count
    elif stated or pattern:
        shared = [str(kind)[:1].lower() == "s" for kind in stated or pattern]
    else:
        shared = [max(index - first + 1, 0) % every != 0 for index in range(count)]
    feeds = config.get("mlp_layer_types")
    dense = config.integer("first_k_dense_replace", 0)
    sparse = [str(kind) == "sparse" for kind in feeds] if feeds else [index >= dense for index in range(count)]
    if len(shared) != count or len(sparse) != count:
        raise ValueError(f"indexer_types and mlp_layer_types must name {count} layers")
    return [("sparse, shared" if shared[i] else "sparse", True, sparse[i]) for i in range(count)]


def _all_experts(period: int) -> Callable[[Config], list[Signature]]:
    def layers(config: Config) -> list[Signature]:
        kinds = _kinds(config, lambda i: "sliding" if (i + 1) % period else "full")
        return [(kind, True, True) for kind in kinds]

    return layers


_FOUR = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_QWEN = Style(attend=Attend(qkv_bias=True, o_bias=False), layers=_sliding_from)
_PLAIN_BIAS = Attend(qkv_bias=False, o_bias=False)
_GEMMA = Style(norm="rms_fp32", embedding_scaled=True)
_OLMO2 = Style(attend=Attend(qk_norm="full"), norm="rms_fp32", norms=_AFTER)
_GRANITE = Style(
    mlp_bias="mlp_bias", embedding_scaled="embedding_multiplier", logits_scaled="logits_scaling", residual_scaled=True
)
_GRANITE_EXPERTS = Experts(count="num_local_experts", width="intermediate_size", router="router")
_GRANITE_MOE = replace(_GRANITE, mlp_at="block_sparse_moe", norms_before_mlp=True, experts=_GRANITE_EXPERTS)
_GLM = Style(attend=Attend(o_bias=False, rotary=0.5, fused=False), mlp="fused")
_COHERE = Style(
    attend=Attend(qk_norm="cohere"), norm="layer_fp32", norms=("input_layernorm",), parallel=True,
    logits_scaled="logit_scale",
)  # fmt: skip
_DEEPSEEK = Experts(
    count="n_routed_experts", router_first=False, shared="shared_experts", router_fp32=True, scores="sigmoid"
)
_QWEN_SHARED = Experts(shared="shared_expert", shared_width="shared_expert_intermediate_size", shared_gate=True)
_NEXT = Style(
    attend=Attend(qk_norm="head", output_gate=True, rotary=0.25), norm="rms_fp32", delta="fused",
    experts=_QWEN_SHARED, layers=_qwen_next,
)  # fmt: skip

STYLES: Final[dict[str, Style]] = {
    "llama": Style(mlp_bias="mlp_bias", layers=_no_window),
    "mistral": Style(attend=_PLAIN_BIAS),
    "ministral": Style(attend=_PLAIN_BIAS, layers=_all_sliding),
    "ministral3": Style(attend=_PLAIN_BIAS),
    "qwen2": _QWEN,
    "qwen3": Style(attend=Attend(qk_norm="head"), layers=_sliding_from),
    "smollm3": Style(mlp_bias="mlp_bias", layers=_some_unrotated),
    "gemma": replace(_GEMMA, layers=_no_window),
    "gemma2": replace(_GEMMA, attend=Attend(softcap=True), norms=_FOUR, layers=_every(2)),
    "gemma3_text": replace(
        _GEMMA, attend=Attend(qk_norm="head", softcap=True), norms=_FOUR, layers=_every(6, "sliding_window_pattern")
    ),
    "phi3": Style(
        attend=Attend(qkv_bias=False, o_bias=False, fused=True), mlp="fused", residual_dropout="resid_pdrop",
    ),
    "olmo": Style(norm="layer_fp32", norm_affine=False, layers=_no_window),
    "olmo2": replace(_OLMO2, layers=_no_window),
    "olmo3": replace(_OLMO2, layers=_every(4)),
    "granite": _GRANITE,
    "seed_oss": Style(
        attend=Attend(o_bias="attention_out_bias"), mlp_bias="mlp_bias", residual_dropout="residual_dropout"
    ),
    "exaone4": Style(
        attend=Attend(qkv_bias=False, o_bias=False, qk_norm="head"), norms=_AFTER,
        layers=_every(4, "sliding_window_pattern", rotate_full=False),
    ),
    "ernie4_5": Style(attend=Attend(qkv_bias="use_bias", o_bias="use_bias"), mlp_bias="use_bias"),
    "helium": Style(attend=Attend(o_bias=False), norm="rms_fp32", mlp_bias="mlp_bias"),
    "nemotron": Style(
        attend=Attend(rotary=0.5), norm="layer", norm_bias=True, mlp="plain", mlp_bias="mlp_bias",
    ),
    "stablelm": Style(
        attend=Attend(qkv_bias="use_qkv_bias", o_bias=False, qk_norm="stablelm", rotary=0.25, head_dim="hidden/heads"),
        norm="layer", norm_bias=True, parallel="use_parallel_residual", residual_dropout="hidden_dropout",
    ),
    "starcoder2": Style(
        attend=Attend(qkv_bias="use_bias", o_bias="use_bias"), norm="layer", norm_bias=True, mlp="plain",
        mlp_names=("c_fc", "c_proj"), mlp_bias="use_bias", residual_dropout="residual_dropout",
        embedding_dropout="embedding_dropout",
    ),
    "phi": Style(
        attend=Attend(qkv_bias=True, o_bias=True, o_name="dense", qk_norm="phi", rotary=0.5), norm="layer",
        norm_bias=True, norms=("input_layernorm",), parallel=True, mlp="plain", mlp_names=("fc1", "fc2"), mlp_bias=True,
        final_norm="final_layernorm", head_bias=True, residual_dropout="resid_pdrop", embedding_dropout="embd_pdrop",
    ),
    "cohere": replace(_COHERE, layers=_no_window),
    "cohere2": replace(
        _COHERE, attend=Attend(head_dim="hidden/heads"),
        layers=_every(4, "sliding_window_pattern", rotate_full=False),
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "mixtral": Style(
        attend=_PLAIN_BIAS, experts=Experts(count="num_local_experts", width="intermediate_size")
    ),
    "qwen2_moe": Style(
        attend=Attend(qkv_bias="qkv_bias", o_bias=False), experts=_QWEN_SHARED, layers=_qwen_moe
    ),
    "qwen3_moe": Style(
        attend=Attend(qk_norm="head"), experts=Experts(router_first=False), layers=_qwen_moe
    ),
    "olmoe": Style(
        attend=Attend(qk_norm="full"), experts=Experts(width="intermediate_size"),
        layers=lambda config: [("full", True, True)] * config.number("num_hidden_layers"),
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": replace(
        _GRANITE_MOE,
        experts=replace(
            _GRANITE_EXPERTS, shared="shared_mlp", shared_fused=True, shared_width="shared_intermediate_size"
        ),
    ),
    "phimoe": Style(
        norm="layer", norm_bias=True, head_bias="lm_head_bias",
        experts=Experts(count="num_local_experts", width="intermediate_size", router="router", router_linear=True),
    ),
    "minimax_m2": Style(
        attend=Attend(qkv_bias=False, o_bias=False, qk_norm="full"),
        experts=Experts(count="num_local_experts", width="intermediate_size", router_fp32=True, scores="sigmoid"),
    ),
    "gpt_oss": Style(
        attend=Attend(sinks=True), norm="rms_fp32", layers=_all_experts(2),
        experts=Experts(
            count="num_local_experts", width="intermediate_size", router="router", router_bias=True, transposed=True,
            bias=True,
        ),
    ),
    "glm4_moe": Style(
        attend=Attend(o_bias=False, qk_norm="glm4_moe", rotary=0.5), experts=_DEEPSEEK, layers=_dense_first,
    ),
    "deepseek_v2": Style(
        latent=True, mlp_bias="mlp_bias", layers=_dense_first,
        experts=replace(_DEEPSEEK, scores="softmax", shared_bias="mlp_bias"),
    ),
    "deepseek_v3": Style(latent=True, experts=_DEEPSEEK, layers=_dense_first),
    "deepseek_v32": Style(experts=_DEEPSEEK, layers=_indexed),
    "glm_moe_dsa": Style(experts=_DEEPSEEK, layers=_indexed),
    "minicpm3": Style(
        latent=True, mlp_bias="mlp_bias", embedding_scaled="scale_emb", residual_scaled=True, layers=_no_window,
    ),
    "llama4_text": Style(
        attend=Attend(qk_norm="llama4"), mlp_at="feed_forward", dense_width="intermediate_size_mlp", layers=_llama4,
        experts=Experts(
            count="num_local_experts", width="intermediate_size", router="router", router_linear=True,
            router_first=False, scores="sigmoid", shared="shared_expert", shared_width="intermediate_size",
            transposed=True,
        ),
    ),
    "qwen3_next": _NEXT,
    "qwen3_5_text": replace(_NEXT, delta="split", experts=None),
    "qwen3_5_moe_text": replace(_NEXT, delta="split"),
}  # fmt: skip

BUILDERS: Final = {name: decoder(style) for name, style in STYLES.items()}
