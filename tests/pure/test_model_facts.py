"""Facts by kind of layer: what a forecast reads, checked against published architectures, without torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.catalog.models import every_model
from overspill.errors import OverspillError
from overspill.model import FAMILIES, LayerKind, ModelFacts, ModelShape, read_model
from tests.unit.family_cases import CASES


def facts_of(name: str) -> ModelFacts:
    facts = read_model(name).shape.facts
    assert facts is not None
    return facts


def the_kind(facts: ModelFacts) -> LayerKind:
    (kind,) = facts.text.kinds
    return kind


def test_a_70b_llama_is_one_kind_of_layer_eighty_times() -> None:
    kind = the_kind(facts_of("meta-llama/Llama-2-70b-hf"))
    assert kind.count == 80 and kind.norm == "rms" and kind.norms == 2
    attention = kind.attention
    assert attention is not None and kind.mlp is not None
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (64, 8, 128)
    assert (attention.query_width, attention.key_width, attention.rotary_dim) == (8192, 1024, 128)
    assert (kind.mlp.kind, kind.mlp.intermediate, kind.mlp.activation) == ("gated", 28672, "silu")


def test_windows_alternate_where_the_family_says_so() -> None:
    gemma2 = facts_of("google/gemma-2-9b").text
    assert [kind.attention.window if kind.attention else 0 for kind in gemma2.sequence[:4]] == [4096, None, 4096, None]
    gemma3 = facts_of("google/gemma-3-4b-it").text
    full = [i for i, kind in enumerate(gemma3.sequence) if kind.attention and kind.attention.kind == "full"]
    assert full == [5, 11, 17, 23, 29]
    assert facts_of("mistralai/Mistral-7B-v0.1").text.kinds[0].name.startswith("sliding")
    assert facts_of("mistralai/Mistral-7B-v0.3").text.kinds[0].name.startswith("full")


def test_gpt_oss_has_sinks_biased_experts_and_alternating_windows() -> None:
    kinds = facts_of("openai/gpt-oss-20b").text.kinds
    assert [(kind.attention.kind, kind.attention.window, kind.count) for kind in kinds if kind.attention] == [
        ("sliding", 128, 12),
        ("full", None, 12),
    ]
    moe = kinds[0].moe
    assert moe is not None and (moe.experts, moe.top_k, moe.expert.bias, moe.shared) == (32, 4, True, None)
    assert kinds[0].attention is not None and kinds[0].attention.sinks


def test_deepseek_has_latent_attention_three_dense_layers_and_37_billion_active() -> None:
    facts = facts_of("deepseek-ai/DeepSeek-V3")
    dense, sparse = facts.text.kinds
    assert (dense.positions, sparse.count) == ((0, 1, 2), 58)
    attention, moe = sparse.attention, sparse.moe
    assert attention is not None and moe is not None and attention.is_mla
    assert (attention.q_lora_rank, attention.kv_lora_rank, attention.head_dim, attention.v_head_dim) == (
        1536,
        512,
        192,
        128,
    )
    assert moe.router_fp32 and moe.scores == "sigmoid"
    assert moe.shared is not None and moe.shared.intermediate == 2048
    assert facts.active_numel == pytest.approx(37.5e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mistralai/Mixtral-8x7B-v0.1", 12.9), ("Qwen/Qwen3-30B-A3B", 3.3), ("openai/gpt-oss-120b", 5.7)],
)
def test_active_parameters_are_those_of_the_model_card(name: str, billions: float) -> None:
    assert facts_of(name).active_numel == pytest.approx(billions * 1e9, rel=0.03)


def test_llama_4_rotates_chunked_layers_only() -> None:
    facts = facts_of("meta-llama/Llama-4-Maverick-17B-128E-Instruct")
    for kind in facts.text.kinds:
        assert kind.attention is not None
        assert (kind.attention.kind == "chunked") == (kind.attention.rotary_dim > 0)
    assert facts.vision is not None and facts.vision.tokens_per_image == 144


def test_three_of_four_layers_of_qwen3_next_are_linear_attention() -> None:
    facts = facts_of("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert {kind.attention.kind: kind.count for kind in facts.text.kinds if kind.attention} == {
        "linear": 36,
        "full": 12,
    }


def test_heads_that_differ_in_width_are_told_apart() -> None:
    falcon = the_kind(facts_of("tiiuae/falcon-7b"))
    assert falcon.attention is not None and falcon.attention.kv_heads == 1
    assert falcon.parallel_residual and falcon.norms == 1
    assert the_kind(facts_of("tiiuae/falcon-40b")).norms == 2


def test_experts_are_no_linear_modules_and_routers_are_where_the_module_has_one() -> None:
    kind = the_kind(facts_of("Qwen/Qwen3-30B-A3B"))
    assert [at.leaf for at in kind.linears if not at.is_expert] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert [(at.name, at.experts, at.in_features, at.out_features) for at in kind.linears if at.is_expert] == [
        ("mlp.experts.gate_up_proj", 128, 2048, 1536),
        ("mlp.experts.down_proj", 128, 768, 2048),
    ]


def test_a_vision_model_has_two_stacks_and_the_decoder_is_its_text() -> None:
    facts = facts_of("Qwen/Qwen2.5-VL-7B-Instruct")
    assert [stack.role for stack in facts.stacks] == ["vision", "decoder"] and facts.text.layers == 28
    vision = facts.stack("vision")
    assert vision is not None and {kind.count for kind in vision.kinds} == {28, 4}
    assert facts.vision is not None and (facts.vision.merged, facts.vision.temporal_patch) == (2, 2)


def test_an_encoder_decoder_has_cross_attention_in_its_decoder() -> None:
    facts = facts_of("google/flan-t5-base")
    decoder, encoder = facts.stack("decoder"), facts.stack("encoder")
    assert decoder is not None and encoder is not None and facts.text is decoder
    assert all(kind.cross_attention is not None for kind in decoder.kinds)
    assert all(kind.attention and not kind.attention.causal for kind in encoder.kinds)


def shapes_of(shape: ModelShape) -> dict[str, int]:
    return {parameter.name: parameter.numel for parameter in shape.parameters}


@pytest.mark.parametrize(("family", "name", "sizes"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_kinds_and_what_stands_outside_them_add_up_to_the_parameters(
    family: str, name: str | None, sizes: dict[str, Any]
) -> None:
    shape = ModelShape.from_config(sizes | {"model_type": family})
    facts = shape.facts
    assert facts is not None
    outer = sum(math.prod(s) for parameter, s in facts.outer if parameter not in facts.tied)
    layers = sum(kind.count * kind.numel for stack in facts.stacks for kind in stack.kinds)
    assert outer + layers == shape.total_numel
    assert shape.active_numel <= shape.total_numel
    assert (shape.active_numel < shape.total_numel) == facts.is_moe
    assert hash(shape) == hash(ModelShape.from_config(sizes | {"model_type": family}))
    if facts.vocab:
        assert facts.embedding is not None and shapes_of(shape)[facts.embedding[0]] >= facts.vocab
    # Each linear has its weight among the parameters, and positions are a partition of the layers.
    shapes = shapes_of(shape)
    for linear in facts.linears():
        assert shapes[linear.name if linear.is_expert else f"{linear.name}.weight"] == linear.weight_numel
    for stack in facts.stacks:
        assert sorted(at for kind in stack.kinds for at in kind.positions) == list(range(stack.layers))


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 40), 1 << 40), st.floats(), st.text(max_size=5), st.just([]),
    st.just({}), st.lists(st.integers(-2, 9), max_size=3),
)  # fmt: skip
#: Keys that a file may hold and that families read where it does.
OPTIONAL = (
    "rope_parameters", "layer_types", "architectures", "rotary_dim", "head_dim", "mlp_layer_types", "time_step_rank",
    "no_rope_layers", "moe_layers", "mlp_only_layers", "attention_types", "sliding_window", "fullatt_block_indexes",
)  # fmt: skip
SMALL = [(family, sizes) for family, _, sizes in CASES]


@settings(deadline=None)
@given(st.sampled_from(SMALL), st.data())
def test_a_config_with_one_odd_value_is_read_or_refused_in_a_sentence(
    case: tuple[str, dict[str, Any]], data: Any
) -> None:
    family, sizes = case
    nested = sorted(key for key, value in sizes.items() if isinstance(value, dict))
    at = data.draw(st.sampled_from([None, *nested]))
    table = sizes if at is None else sizes[at]
    changed = table | {data.draw(st.sampled_from(sorted({*table, *OPTIONAL}, key=str))): data.draw(JUNK)}
    try:
        shape = ModelShape.from_config((changed if at is None else sizes | {at: changed}) | {"model_type": family})
    except OverspillError as error:
        assert error.code == "OVS201"
    else:
        assert all(parameter.numel >= 0 for parameter in shape.parameters)


def test_every_family_in_the_catalogue_is_known() -> None:
    assert {model.config["model_type"] for model in every_model()} <= set(FAMILIES)


def test_a_family_lists_what_it_builds() -> None:
    import importlib

    for file in set(FAMILIES.values()):
        built = importlib.import_module(f"overspill.model.families.{file}").BUILDERS
        assert set(built) == {name for name, at in FAMILIES.items() if at == file}


@pytest.mark.parametrize("name", ["CohereLabs/c4ai-command-r7b-12-2024", "LGAI-EXAONE/EXAONE-4.0-32B"])
def test_whole_attention_between_windows_is_not_rotated_in_cohere_2_and_exaone_4(name: str) -> None:
    for kind in facts_of(name).text.kinds:
        assert kind.attention is not None
        assert (kind.attention.kind == "sliding") == (kind.attention.rotary_dim > 0)


@pytest.mark.parametrize(
    ("hidden", "heads", "layers", "positions", "published"),
    [
        (768, 12, 12, 2048, 125_311_488),
        (1024, 16, 24, 2048, 355_985_408),
        (1536, 12, 24, 32_768, 807_656_448),
        (2048, 16, 24, 2048, 1_315_950_592),
        (2560, 20, 32, 2048, 2_651_837_440),
        (4096, 32, 32, 65_536, 6_918_905_856),
        (5120, 40, 40, 32_768, 13_011_240_960),
        (7168, 56, 48, 8192, 30_019_254_272),
    ],
)
def test_llm_foundrys_own_mpt_has_the_counts_that_its_benchmark_table_prints(
    hidden: int, heads: int, layers: int, positions: int, published: int
) -> None:
    # mosaicml/llm-foundry, scripts/train/benchmarking/README.md: with positions up to the sequence of the run.
    config = {"d_model": hidden, "n_heads": heads, "n_layers": layers, "max_seq_len": positions, "vocab_size": 50368}
    assert ModelShape.from_config(config | {"model_type": "llmfoundry_mpt"}).total_numel == published
