"""LitGPT's layers on the tape against bytes that its own modules kept (benchmarks/litgpt_memory.py measured them)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overspill.forecast.device.core import Rank, forecast_ranks
from overspill.forecast.device.ends import final_figures
from overspill.forecast.layers.figures import layer_figures
from overspill.forecast.layers.run import Run
from overspill.job import Job
from overspill.model import ModelShape

MEASURED = json.loads((Path(__file__).parent / "litgpt_measured.json").read_text(encoding="utf-8"))
_LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4,
          "tie_word_embeddings": False}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "num_key_value_heads": 8, "intermediate_size": 1376},
    "llama-grouped": {**_LLAMA, "num_key_value_heads": 2, "intermediate_size": 1792},
    "phi": {"model_type": "phi", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8,
            "num_hidden_layers": 4, "intermediate_size": 2048, "partial_rotary_factor": 0.5,
            "tie_word_embeddings": False},
    "falcon": {"model_type": "falcon", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4,
               "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "bias": False,
               "alibi": False, "tie_word_embeddings": True},
    "gemma": {"model_type": "gemma", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 1,
              "head_dim": 64, "num_hidden_layers": 4, "intermediate_size": 2048},
    "gemma2": {"model_type": "gemma2", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
               "head_dim": 64, "num_hidden_layers": 4, "intermediate_size": 2048, "attn_logit_softcapping": 50.0,
               "final_logit_softcapping": 30.0, "sliding_window": 4096},
    "stablelm": {"model_type": "gpt_neox", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4,
                 "intermediate_size": 2048, "rotary_pct": 0.25, "use_parallel_residual": True,
                 "tie_word_embeddings": False},
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "lora_qv": {"kind": "lora", "targets": ["query", "value"]},
    "lora_all": {"kind": "lora", "targets": ["query", "key", "value", "projection", "mlp", "head"]},
    "adapter": {"kind": "adapter"},
    "adapter_v2": {"kind": "adapter_v2"},
    "full": {"kind": "full"},
    "nf4": {"kind": "lora", "targets": ["query", "value"], "base": "nf4"},
}
CASES = [
    pytest.param(one["litgpt"], case, id=f"{one['litgpt']}-{case['shape']}-{case['method']}-{case['batch']}")
    for one in MEASURED
    for case in one["cases"]
]


def _rank(version: str, case: dict[str, Any], **more: Any) -> Rank:
    shape = ModelShape.from_config({**CONFIGS[case["shape"]], "vocab_size": MEASURED[0]["vocabulary"]})
    method = dict(METHODS[case["method"]])
    if method["kind"] == "lora":
        method.update(rank=MEASURED[0]["rank"], dropout=0.05)
    data: dict[str, Any] = {
        "model": {"path": "model", "dtype": "bf16"},
        "data": {"seq_len": MEASURED[0]["length"]},
        "train": {"micro_batch": case["batch"]},
        "method": method,
        "kernels": {"attention": "sdpa"},
        # the stand-in for the 4-bit matmul is that of 0.42
        "framework": {"name": "litgpt", "versions": {"litgpt": version, "bitsandbytes": "0.42.0"}},
    }
    data.update(more)
    return forecast_ranks(Job.read(data, source="test"), shape)[0]


def _run(rank: Rank, case: dict[str, Any]) -> Run:
    full = case["method"] == "full"
    parts = {"lora_qv": "qv", "nf4": "qv", "lora_all": "all"}.get(case["method"], "")
    chosen = {"qv": {"litgpt.q", "litgpt.v"}}.get(parts, set())
    return Run(
        rank.resolved.style,
        rank.resolved.tokens,
        rank.resolved.seq_len,
        trained=lambda name: full,
        targeted=lambda name: parts == "all" or name in chosen,
    )


@pytest.mark.parametrize(("version", "case"), CASES)
def test_a_block_keeps_what_litgpts_own_block_keeps(version: str, case: dict[str, Any]) -> None:
    rank = _rank(version, case)
    figures = layer_figures(rank.units.layers[0][0], _run(rank, case))
    assert figures.kept_nbytes == pytest.approx(case["kept"], rel=0.005)


@pytest.mark.parametrize(("version", "case"), CASES)
def test_a_blocks_highest_instants_are_those_of_litgpts_own(version: str, case: dict[str, Any]) -> None:
    rank = _rank(version, case)
    figures = layer_figures(rank.units.layers[0][0], _run(rank, case))
    assert figures.forward_nbytes == pytest.approx(case["forward"], rel=0.05)
    assert figures.recorded_nbytes == pytest.approx(case["recorded"], rel=0.02)
    # Under a dispatch mode autograd adds gradients out of place, which it does not without: up to one tensor more.
    assert 0.92 * case["backward"] <= figures.backward_nbytes <= 1.005 * case["backward"]


@pytest.mark.parametrize(("version", "case"), CASES)
def test_head_and_loss_hold_what_litgpts_own_hold(version: str, case: dict[str, Any]) -> None:
    rank = _rank(version, case)
    shape = ModelShape.from_config({**CONFIGS[case["shape"]], "vocab_size": MEASURED[0]["vocabulary"]})
    assert shape.facts is not None
    figures = final_figures(shape.facts, rank.resolved, _run(rank, case), rank.units)
    assert figures is not None
    assert figures.kept_nbytes == pytest.approx(case["head_kept"], rel=0.005)
    assert figures.backward_nbytes == pytest.approx(case["head_backward"], rel=0.005)


def test_logits_are_fp32_because_fabric_converts_what_a_model_returns() -> None:
    case = {"shape": "llama", "method": "lora_qv", "batch": 1}
    rank = _rank("0.4.13", case)
    shape = ModelShape.from_config({**CONFIGS["llama"], "vocab_size": 8192})
    assert shape.facts is not None
    figures = final_figures(shape.facts, rank.resolved, _run(rank, case), rank.units)
    assert figures is not None and figures.held_nbytes == 4 * 8192 * MEASURED[0]["length"]


def test_a_4_bit_matmul_of_old_bitsandbytes_outlives_the_backward_and_a_new_one_does_not() -> None:
    case = {"shape": "llama", "method": "nf4", "batch": 1}
    framework = {"name": "litgpt", "versions": {"litgpt": "0.4.13", "bitsandbytes": "0.43.3"}}
    old, new = _rank("0.4.13", case), _rank("0.4.13", case, framework=framework)
    kind = old.units.layers[0][0]
    tokens, hidden, inner = MEASURED[0]["length"], 512, 1376
    # the two norms' results, attention's, and the activation's
    assert layer_figures(kind, _run(old, case)).outliving_nbytes == 2 * tokens * (3 * hidden + inner)
    assert layer_figures(kind, _run(new, case)).outliving_nbytes == 0
    assert new.peak.total_nbytes < old.peak.total_nbytes


def test_under_no_sync_every_rank_holds_the_gradients_of_whole_blocks_though_only_adapters_are_trained() -> None:
    case = {"shape": "llama", "method": "lora_qv", "batch": 1}
    parallel = {"gpus": 2, "data": "fsdp1"}
    model = {"path": "model", "dtype": "bf16", "gradient_checkpointing": True}
    one = _rank("0.1.0", case, parallel=parallel, model=model)
    many = _rank("0.1.0", case, parallel=parallel, model=model, train={"micro_batch": 1, "accumulation": 8})
    blocks = sum(count * unit.numel for _, count, unit in many.units.layers)
    later = next(instant for instant in many.instants if instant.phase == "later micro-batch")
    assert later.gradients == 2 * blocks
    assert later.gradients > max(instant.gradients for instant in one.instants)


def test_embeddings_and_head_are_two_parameters_even_where_the_model_ties_them() -> None:
    rank = _rank("0.4.13", {"shape": "gemma", "method": "lora_qv", "batch": 1})
    assert rank.units.head.frozen_numel == rank.units.embedding.frozen_numel == 8192 * 512


@pytest.mark.parametrize(("kind", "trained"), [("adapter", 2 * (5120 + 8)), ("adapter_v2", None)])
def test_llama_adapters_parameters_are_counted_from_the_layer_they_start_at(kind: str, trained: int | None) -> None:
    rank = _rank("0.4.13", {"shape": "llama", "method": kind, "batch": 1})
    if trained is None:  # and a bias and a scale for each output, head included, and the norms
        outputs = 4 * (3 * 512 + 512 + 2 * 1376 + 512) + 8192
        trained = 2 * (5120 + 8) + 2 * outputs + 9 * 512
    assert rank.units.total(lambda unit: unit.trained_numel + unit.adapter_numel) == trained
