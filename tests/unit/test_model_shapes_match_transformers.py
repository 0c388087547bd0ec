"""Every family's shapes, held equal to the transformers module on the meta device: names, shapes, order, ties."""

from __future__ import annotations

from typing import Any

import pytest

from overspill.model import FAMILIES, ModelShape

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LINE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA = LINE | {"num_key_value_heads": 2}
GPT2 = {
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "vocab_size": 128,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 32,
}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", GQA),
    ("llama", LINE | {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    ("mistral", GQA),
    ("mistral", GQA | {"head_dim": 24}),
    ("qwen2", GQA | {"tie_word_embeddings": True}),
    ("qwen3", GQA | {"head_dim": 24}),
    ("qwen3", GQA | {"attention_bias": True}),
    ("smollm3", GQA),
    ("gemma", GQA | {"head_dim": 24}),
    ("gemma2", GQA | {"head_dim": 24}),
    ("phi3", GQA),
    ("gpt2", GPT2),
    ("gpt2", GPT2 | {"n_inner": 100, "tie_word_embeddings": False}),
    ("gpt_neox", LINE),
    ("gpt_neox", LINE | {"attention_bias": False, "tie_word_embeddings": True}),
    ("opt", OPT),
    ("opt", OPT | {"word_embed_proj_dim": 32, "enable_bias": False}),
    ("opt", OPT | {"do_layer_norm_before": False, "layer_norm_elementwise_affine": False}),
]


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_a_shape_from_the_config_equals_the_module(family: str, sizes: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(config.to_dict())

    everything = [(name, tuple(p.shape)) for name, p in module.named_parameters(remove_duplicate=False)]
    owned = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    assert [(p.name, p.shape) for p in shape.parameters] == everything
    assert [(p.name, p.shape) for p in shape.owned] == owned
    assert shape.total_numel == sum(p.numel() for p in module.parameters())
    assert ModelShape.from_parameters(owned).blocks() == shape.blocks()


def test_every_known_family_is_tested() -> None:
    assert {family for family, _ in CASES} == set(FAMILIES)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_defaults_left_out_of_a_config_are_those_of_transformers(family: str) -> None:
    config = transformers.AutoConfig.for_model(family)
    full = config.to_dict()
    optional = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "n_inner")
    shape = ModelShape.from_config({key: value for key, value in full.items() if key not in optional})
    assert shape.parameters == ModelShape.from_config(full).parameters
