"""What a shape cannot show, read off the transformers module or its behaviour: windows, rotation, norms, dropout.

Small configurations of every decoder; the norms run on a few numbers, everything else is only built.
"""

from __future__ import annotations

from typing import Any

import pytest

from overspill.model import LayerKind, ModelShape, Stack
from tests.unit.family_cases import CASES
from tests.unit.test_model_shapes_match_transformers import module_of

torch = pytest.importorskip("torch")

DECODERS = [case for case in CASES if case[0] not in ("mamba", "falcon_mamba", "vit", "clip", "siglip")]
IDS = [f"{case[0]}-{index}" for index, case in enumerate(DECODERS)]
#: BLOOM has a function of its own.
BLOOM_GELU = "BloomGelu"
#: What a layer's first norm over the residual stream is called.
FIRST_NORMS = (
    "input_layernorm", "ln_1", "norm_1", "ln_attn", "self_attn_layer_norm", "post_attention_layernorm", "sa_layer_norm",
    "layer.0.layer_norm", "attention.output.LayerNorm",
)  # fmt: skip


def built(family: str, name: str | None, sizes: dict[str, Any]) -> tuple[Stack, Any, Any]:
    config, module = module_of(family, name, sizes)
    facts = ModelShape.from_config(sizes | {"model_type": family}).facts
    assert facts is not None
    return facts.text, config, module


def layers_of(stack: Stack, module: Any) -> list[tuple[LayerKind, Any]]:
    return list(zip(stack.sequence, module.get_submodule(stack.prefix), strict=True))


@pytest.mark.parametrize(("family", "name", "sizes"), DECODERS, ids=IDS)
def test_windows_are_those_of_the_module(family: str, name: str | None, sizes: dict[str, Any]) -> None:
    stack, config, module = built(family, name, sizes)
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    for index, (kind, layer) in enumerate(layers_of(stack, module)):
        attention = kind.attention
        assert attention is not None
        mixer = getattr(layer, "self_attn", None)
        if hasattr(mixer, "sliding_window") and getattr(mixer, "is_sliding", True):
            assert attention.window == (mixer.sliding_window or None)
        elif types is None and attention.kind != "sliding":
            assert not getattr(text, "sliding_window", None)
        if types is not None:
            assert types[index].replace("indexed", "sparse") == f"{attention.kind}_attention"
        if attention.kind == "chunked":
            assert attention.window == text.attention_chunk_size


@pytest.mark.parametrize(("family", "name", "sizes"), DECODERS, ids=IDS)
def test_as_many_dimensions_are_rotated_as_the_module_rotates(
    family: str, name: str | None, sizes: dict[str, Any]
) -> None:
    stack, _, module = built(family, name, sizes)
    rotary = [
        2 * buffer.numel()
        for path, buffer in module.named_buffers()
        if path.endswith("inv_freq") and "original" not in path and "visual" not in path and "vision" not in path
    ]
    rotated = {kind.attention.rotary_dim for kind in stack.kinds if kind.attention} - {0}
    if sizes.get("alibi"):
        assert rotated == set()  # the module makes the angles, and does not use them
    elif family == "gptj":
        assert rotated == {sizes["rotary_dim"]}
    else:
        assert rotated == set(rotary)


@pytest.mark.parametrize(("family", "name", "sizes"), DECODERS, ids=IDS)
def test_norms_are_of_the_kind_that_they_behave_like(family: str, name: str | None, sizes: dict[str, Any]) -> None:
    stack, _, module = built(family, name, sizes)
    kind, layer = layers_of(stack, module)[0]
    parts = dict(layer.named_modules())
    norm = next(parts[name] for name in FIRST_NORMS if name in parts)
    assert kind.norm == _behaves_like(norm)


def _behaves_like(norm: Any) -> str:
    """The kind whose formula gives the same bits in bf16."""
    if isinstance(norm, torch.nn.LayerNorm):
        return "layer"
    torch.manual_seed(3)
    width = 64
    norm = norm.to_empty(device="cpu").to(torch.bfloat16)
    weight = torch.rand(width, dtype=torch.bfloat16)
    for parameter in norm.parameters():
        parameter.data.copy_(weight)
    inputs = torch.randn(32, width).to(torch.bfloat16)
    wide = inputs.float()
    # OLMo's norm has its epsilon in its forward.
    epsilon = next((float(getattr(norm, key)) for key in ("variance_epsilon", "eps") if hasattr(norm, key)), 1e-5)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    centred = wide - wide.mean(-1, keepdim=True)
    centred = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + epsilon)
    with torch.no_grad():
        output = norm(inputs)
    formulas = {
        "rms": [weight * scaled.to(torch.bfloat16)],
        "rms_fp32": [(weight * scaled).to(torch.bfloat16), ((1 + weight.float()) * scaled).to(torch.bfloat16)],
        "layer_fp32": [(weight.float() * centred).to(torch.bfloat16), centred.to(torch.bfloat16)],
        "layer": [torch.nn.functional.layer_norm(inputs, (width,), weight + 1, weight, epsilon)],
    }
    alike = [kind for kind, outputs in formulas.items() if any(torch.equal(output, each) for each in outputs)]
    assert len(alike) == 1, f"{type(norm).__name__} behaves like {alike}"
    return alike[0]


@pytest.mark.parametrize(("family", "name", "sizes"), DECODERS, ids=IDS)
def test_heads_and_activations_are_those_of_the_module(family: str, name: str | None, sizes: dict[str, Any]) -> None:
    from transformers.activations import ACT2FN

    stack, _, module = built(family, name, sizes)
    for kind, layer in layers_of(stack, module):
        attention = kind.attention
        assert attention is not None
        for part in layer.modules():
            groups = getattr(part, "num_key_value_groups", None)
            if groups is not None and attention.kind != "linear" and not attention.is_mla:
                assert attention.heads == groups * attention.kv_heads
            dim = getattr(part, "head_dim", None)
            if isinstance(dim, int) and attention.kind != "linear" and not attention.is_mla:
                assert attention.head_dim == dim
            function = next(
                (getattr(part, key) for key in ("act_fn", "act", "activation_fn") if hasattr(part, key)), None
            )
            used = kind.mlp or (kind.moe.expert if kind.moe else None)
            if isinstance(function, torch.nn.Module) and used is not None and attention.kind != "linear":
                alike = BLOOM_GELU if used.activation == "bloom_gelu" else type(ACT2FN[used.activation]).__name__
                assert type(function).__name__ == alike or family == "mpt", (type(function), used.activation)


@pytest.mark.parametrize(
    ("family", "options", "read"),
    [
        ("llama", {"attention_dropout": 0.25}, lambda facts, kind: kind.attention.dropout),
        ("gpt2", {"attn_pdrop": 0.25}, lambda facts, kind: kind.attention.dropout),
        ("gpt2", {"resid_pdrop": 0.25}, lambda facts, kind: kind.residual_dropout),
        ("gpt2", {"embd_pdrop": 0.25}, lambda facts, kind: facts.embedding_dropout),
        ("gpt_neox", {"hidden_dropout": 0.25}, lambda facts, kind: kind.residual_dropout),
        ("falcon", {"hidden_dropout": 0.25}, lambda facts, kind: kind.residual_dropout),
        ("phi", {"embd_pdrop": 0.25}, lambda facts, kind: facts.embedding_dropout),
        ("phi3", {"resid_pdrop": 0.25}, lambda facts, kind: kind.residual_dropout),
        ("t5", {"dropout_rate": 0.25}, lambda facts, kind: kind.mlp.dropout),
        ("bert", {"hidden_dropout_prob": 0.25}, lambda facts, kind: kind.residual_dropout),
        ("gemma2", {"final_logit_softcapping": 0.25}, lambda facts, kind: facts.logits_softcap),
        ("gemma2", {"attn_logit_softcapping": 0.25}, lambda facts, kind: kind.attention.softcap),
    ],
)
def test_a_rate_in_the_config_is_found_in_the_facts(family: str, options: dict[str, float], read: Any) -> None:
    sizes = next(sizes for name, _, sizes in CASES if name == family)
    facts = ModelShape.from_config(sizes | options | {"model_type": family}).facts
    assert facts is not None and read(facts, facts.text.kinds[0]) == 0.25
