"""What must hold of any forecast: more of what costs memory never needs less, what is split or moved is conserved."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from overspill.catalog.accelerators import accelerator
from overspill.forecast.allocator import replay
from overspill.forecast.allocator_settings import AllocatorSettings
from overspill.forecast.device.core import Rank, forecast_ranks, run_of_rank
from overspill.forecast.device.overhead import Range, probability_above
from overspill.forecast.device.result import FAILS_ABOVE, FITS_BELOW, forecast_device
from overspill.forecast.device.stream import step_events
from overspill.job import Job
from overspill.model import ModelShape, read_model

SHARDED = ("zero1", "zero2", "zero3", "fsdp1", "fsdp2", "distributed_optimizer")
FRAMEWORKS = ("torch", "hf_trainer", "trl", "deepspeed", "torchtune", "torchtitan", "litgpt", "megatron")
MODELS = ("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-8B", "openai-community/gpt2", "mistralai/Mixtral-8x7B-v0.1")
QUICK = settings(max_examples=25, deadline=None)


@cache
def shape_of(model: str) -> ModelShape:
    return read_model(model).shape


def ranks(model: str = MODELS[0], **tables: Any) -> tuple[Rank, ...]:
    job = Job.read({"model": {"path": model} | tables.pop("model_table", {}), **tables}, source="a test")
    return forecast_ranks(job, shape_of(model))


def peak(model: str = MODELS[0], **tables: Any) -> int:
    return max(rank.peak.total_nbytes for rank in ranks(model, **tables))


def state_nbytes(rank: Rank) -> int:
    """Weights and moments at rest, and the gradients that a step has."""
    step = next(one for one in rank.instants if one.phase == "optimizer step")
    return rank.rest.weights + rank.rest.optimizer + step.gradients


@pytest.mark.parametrize("kind", SHARDED)
@QUICK
@given(model=st.sampled_from(MODELS), more=st.integers(1, 5))
def test_more_data_parallel_ranks_never_need_more_model_state_a_rank(kind: str, model: str, more: int) -> None:
    framework = {"name": "megatron" if kind == "distributed_optimizer" else "torch"}
    few, many = (
        ranks(model, framework=framework, parallel={"gpus": gpus, "data": kind})[0] for gpus in (2, 2 * 2**more)
    )
    assert state_nbytes(many) <= state_nbytes(few)


@QUICK
@given(
    model=st.sampled_from(MODELS), framework=st.sampled_from(FRAMEWORKS), seq_len=st.integers(16, 1000),
    longer=st.integers(1, 24), batch=st.integers(1, 4), wider=st.integers(1, 4), checkpointing=st.booleans(),
    method=st.sampled_from(["full", "lora"]),
)  # fmt: skip
def test_longer_sequences_and_larger_batches_never_need_less(
    model: str, framework: str, seq_len: int, longer: int, batch: int, wider: int, checkpointing: bool, method: str
) -> None:
    assume(framework != "litgpt" or "Mixtral" not in model)  # its experts are not forecast yet

    def need(sequences: int, length: int) -> int:
        return peak(
            model, framework={"name": framework}, data={"seq_len": length}, train={"micro_batch": sequences},
            method={"kind": method}, model_table={"gradient_checkpointing": checkpointing},
        )  # fmt: skip

    before = need(batch, seq_len)
    assert need(batch, seq_len + longer) >= before
    assert need(batch + wider, seq_len) >= before


@QUICK
@given(model=st.sampled_from(MODELS), framework=st.sampled_from(FRAMEWORKS), seq_len=st.integers(64, 1000))
def test_checkpointing_never_keeps_more(model: str, framework: str, seq_len: int) -> None:
    assume(framework != "litgpt" or "Mixtral" not in model)
    kept = [
        next(
            one.activations
            for one in ranks(
                model, framework={"name": framework}, data={"seq_len": seq_len},
                model_table={"gradient_checkpointing": on},
            )[0].instants
            if one.phase == "backward of the loss"
        )
        for on in (True, False)
    ]  # fmt: skip
    assert kept[0] <= kept[1]


@QUICK
@given(
    model=st.sampled_from(MODELS[:3]), framework=st.sampled_from(["torch", "trl", "torchtune"]),
    rank=st.integers(1, 64), more=st.integers(1, 64),
)  # fmt: skip
def test_a_higher_rank_of_lora_never_needs_less(model: str, framework: str, rank: int, more: int) -> None:
    def need(rank: int) -> int:
        return peak(model, framework={"name": framework}, method={"kind": "lora", "rank": rank}, data={"seq_len": 256})

    assert need(rank + more) >= need(rank)


@QUICK
@given(model=st.sampled_from(MODELS), double=st.booleans(), base=st.sampled_from(["nf4", "fp4", "int8", "gptq4"]))
def test_a_quantised_base_weighs_less(model: str, double: bool, base: str) -> None:
    plain = ranks(model, method={"kind": "lora"})[0].rest.weights
    method = {"kind": "lora", "base": base, "double_quant": double and base in ("nf4", "fp4")}
    assert ranks(model, method=method)[0].rest.weights <= plain


OFFLOADS = [("optimizer", "host"), ("optimizer", "disk"), ("weights", "host"), ("weights", "disk")]


@pytest.mark.parametrize(("what", "tier"), OFFLOADS)
@QUICK
@given(
    model=st.sampled_from(MODELS), gpus=st.sampled_from([1, 4]), dtype=st.sampled_from(["bf16", "fp32"]),
    kind=st.sampled_from(["zero1", "zero3", "fsdp2"]),
)  # fmt: skip
def test_a_class_that_is_moved_has_the_same_bytes_elsewhere(
    what: str, tier: str, model: str, gpus: int, dtype: str, kind: str
) -> None:
    usual: dict[str, Any] = {"parallel": {"gpus": gpus, "data": kind}, "model_table": {"dtype": dtype}}
    (before,), (after,) = ranks(model, **usual), ranks(model, **usual, offload={what: tier})
    left = getattr(before.rest, what) - getattr(after.rest, what)
    off = after.disk_nbytes if tier == "disk" else after.host_pinned_nbytes
    trained = after.units.total(lambda unit: float(unit.trained_numel))
    sharding = after.resolved.sharding
    share = 1 / sharding.ranks if sharding.splits_optimizer else 1.0
    # Who updates on the host has the gradients there, in fp32.
    gradients = round(4 * trained * share) if what == "optimizer" and tier == "host" else 0
    # DeepSpeed moves weights at stage 3 alone: below it they stay, and nothing is elsewhere.
    assert getattr(after.rest, what) == 0 or (what == "weights" and kind == "zero1")
    assert off == pytest.approx(left + gradients, abs=8)


@QUICK
@given(model=st.sampled_from(MODELS), ways=st.sampled_from([2, 4, 8]))
def test_tensor_parallelism_splits_matrices_and_nothing_else_grows(model: str, ways: int) -> None:
    facts = shape_of(model).facts
    assert facts is not None
    (whole,) = ranks(model)
    (part,) = ranks(model, parallel={"gpus": ways, "tensor": ways})
    for (kind, _, one), (_, _, other) in zip(whole.units.layers, part.units.layers, strict=True):
        matrices = sum(
            shape[0] * shape[1] * (shape[2] if len(shape) > 2 else 1)
            for name, shape in kind.parameters
            if len(shape) > 1 and kind.moe is None
        )
        if kind.moe is None:
            assert other.trained_numel == pytest.approx(one.trained_numel - matrices * (1 - 1 / ways), abs=ways * 100)
        assert other.trained_numel < one.trained_numel or kind.moe is not None
    assert part.rest.weights < whole.rest.weights


@QUICK
@given(model=st.sampled_from(MODELS), stages=st.sampled_from([2, 3, 4]))
def test_pipeline_stages_sum_to_the_whole(model: str, stages: int) -> None:
    (whole,) = ranks(model)
    parts = ranks(model, parallel={"gpus": stages, "pipeline": stages})
    assert len(parts) == stages
    layers = sum(count for part in parts for _, count, _ in part.units.layers)
    assert layers == sum(count for _, count, _ in whole.units.layers)
    trained = [rank.units.total(lambda unit: float(unit.trained_numel)) for rank in parts]
    root = whole.units.root.trained_numel
    assert sum(trained) == pytest.approx(whole.units.total(lambda unit: float(unit.trained_numel)), abs=stages * root)


@settings(max_examples=8, deadline=None)
@given(
    model=st.sampled_from(MODELS[:3]), method=st.sampled_from(["full", "lora"]), checkpointing=st.booleans(),
    kind=st.sampled_from(["none", "fsdp2"]), conf=st.sampled_from(["", "expandable_segments:True"]),
)  # fmt: skip
def test_what_is_reserved_is_never_less_than_what_is_allocated(
    model: str, method: str, checkpointing: bool, kind: str, conf: str
) -> None:
    tables: dict[str, Any] = {
        "method": {"kind": method}, "data": {"seq_len": 512},
        "parallel": {"gpus": 1 if kind == "none" else 4, "data": kind},
        "model": {"path": model, "gradient_checkpointing": checkpointing},
    }  # fmt: skip
    job, shape = Job.read(tables, source="a test"), shape_of(model)
    assert shape.facts is not None
    (rank,) = forecast_ranks(job, shape)
    events = step_events(shape.facts, rank.units, rank.resolved, run_of_rank(job, shape.facts, rank.resolved))
    replayed = replay(events, AllocatorSettings.parse(conf))
    assert replayed.reserved_peak_nbytes >= replayed.allocated_peak_nbytes > 0
    found = forecast_device(job, shape)
    assert found.allocated.likely_nbytes <= found.reserved.likely_nbytes <= found.smi.likely_nbytes


@given(
    low=st.integers(0, 10**11), spread=st.integers(0, 10**10), limit=st.integers(0, 10**11), more=st.integers(0, 10**10)
)
def test_a_larger_card_never_makes_running_out_more_probable(low: int, spread: int, limit: int, more: int) -> None:
    one = Range(low, low + spread // 2, low + spread)
    assert probability_above(one, limit + more) <= probability_above(one, limit) + 1e-12
    assert 0 <= probability_above(one, limit) <= 1


CARDS = ("RTX 3060 12GB", "RTX 4090", "RTX 5090", "A100 80GB", "B200")


@QUICK
@given(
    model=st.sampled_from(MODELS[:3]), method=st.sampled_from(["full", "lora"]), seq_len=st.integers(64, 1000),
    headroom=st.sampled_from([0.0, 0.1, 0.3]), held=st.sampled_from([0, 2**30, 8 * 2**30]),
)  # fmt: skip
def test_verdicts_follow_from_probability_and_headroom_and_never_get_worse_on_a_larger_card(
    model: str, method: str, seq_len: int, headroom: float, held: int
) -> None:
    tables: dict[str, Any] = {
        "model": {"path": model, "gradient_checkpointing": True}, "method": {"kind": method},
        "data": {"seq_len": seq_len}, "device": {"headroom": headroom, "held_nbytes": held},
    }  # fmt: skip
    job, order = Job.read(tables, source="a test"), ["does not fit", "tight", "fits"]
    seen, probabilities = [], []
    for name in CARDS:
        card = accelerator(name)
        found = forecast_device(job, shape_of(model), card)
        assert found.probability is not None
        assert found.verdict is not None
        room = card.usable_nbytes - held
        within = found.needed.likely_nbytes <= room * (1 - headroom)
        if found.probability >= FAILS_ABOVE:
            assert found.verdict == "does not fit"
        elif found.probability < FITS_BELOW and within:
            assert found.verdict == "fits"
        else:
            assert found.verdict == "tight"
        seen.append(order.index(found.verdict))
        probabilities.append(found.probability)
    assert seen == sorted(seen)
    assert probabilities == sorted(probabilities, reverse=True)
