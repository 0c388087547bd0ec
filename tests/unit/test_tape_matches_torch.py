"""The tape against torch itself: real layers and real steps of transformers' models on the CPU, every malloc counted.

Attention is written out ("eager"), so that each of its tensors is one that torch allocates. What is left out is said in
testing/malloc.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from overspill.forecast.device.core import forecast_ranks  # noqa: E402
from overspill.forecast.layers.figures import layer_figures  # noqa: E402
from overspill.forecast.layers.run import Run  # noqa: E402
from overspill.forecast.layers.style import Adapter, Style  # noqa: E402
from overspill.job import Job  # noqa: E402
from testing.malloc import Watched  # noqa: E402
from tests.unit.tape_cases import (  # noqa: E402
    MODELS,
    SEQ_LEN,
    SEQUENCES,
    TOKENS,
    build,
    layer_call,
    real_layer,
    with_adapters,
)

TOLERANCE = 0.02


def run_of(dtype: Any, *, trained: bool, adapter: Adapter | None = None) -> Run:
    size = dtype.itemsize
    style = Style(
        residual=size, compute=size, weight=size, attention="eager", adapter=adapter, grouped_experts=True
    )  # fmt: skip
    return Run(style, TOKENS, SEQ_LEN, trained=lambda name: trained, targeted=lambda name: adapter is not None)


def assert_alike(found: Any, real: dict[str, int], tolerance: float = TOLERANCE) -> None:
    for name, nbytes in real.items():
        assert getattr(found, f"{name}_nbytes") == pytest.approx(nbytes, rel=tolerance), (name, nbytes)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_layer_keeps_and_needs_what_the_tape_says(name: str, trained: bool) -> None:
    built = build(name)
    built.model.requires_grad_(trained)
    real = real_layer(built, layer_call(built), torch.bfloat16)
    # OLMo 2's norm keeps its fp32 value while it casts the product, Gemma's does not; the tape has Gemma's.
    tolerance = 0.04 if name == "olmo2" else TOLERANCE
    assert_alike(layer_figures(built.kind, run_of(torch.bfloat16, trained=trained)), real, tolerance)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_in_fp32_nothing_is_cast_and_nothing_is_counted_for_it(name: str) -> None:
    built = build(name, torch.float32)
    real = real_layer(built, layer_call(built), torch.float32)
    assert_alike(layer_figures(built.kind, run_of(torch.float32, trained=True)), real)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 adapters", "bf16 adapters"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "phi3"])
def test_adapters_keep_their_inputs_cast_to_their_own_dtype(name: str, dtype: Any) -> None:
    built = build(name)
    with_adapters(built.model, dtype=dtype)
    real = real_layer(built, layer_call(built), torch.bfloat16)
    del real["forward"]  # peft's frame keeps the cast input of the projection under way until it returns
    assert_alike(
        layer_figures(built.kind, run_of(torch.bfloat16, trained=False, adapter=Adapter("peft", 8, dtype.itemsize))),
        real,
    )


def real_step(model: Any, *, foreach: bool, accumulation: int) -> tuple[int, dict[str, int]]:
    """(what rests: weights and moments; each phase's highest instant above that), of the second step."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=foreach)

    def step(seen: Watched | None = None) -> None:
        for number in range(accumulation):
            last = seen is not None and number == accumulation - 1
            ids = torch.randint(3, 1000, (SEQUENCES, SEQ_LEN))
            if seen is not None and last:
                seen.phase("forward")
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if seen is not None and last:
                seen.phase("backward")
            loss.backward()
            del loss
        if seen is not None:
            seen.phase("step")
        optimizer.step()
        if seen is not None:
            seen.phase("end")
        optimizer.zero_grad()

    step()
    with Watched() as seen:
        seen.phase("begin")
        step(seen)
    state = sum(one.nbytes for held in optimizer.state.values() for one in held.values() if one.dim())
    return sum(one.nbytes for one in model.parameters()) + state, seen.peaks


def forecast_step(built: Any, **tables: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """The same, forecast. cuBLAS's workspaces are left out: the CPU has none."""
    tables = copy.deepcopy(tables)
    tables["model"] = {"path": "small", "dtype": "bf16"} | tables.get("model", {})
    tables["data"] = {"seq_len": SEQ_LEN}
    tables["train"] = {"micro_batch": SEQUENCES} | tables.get("train", {})
    tables["kernels"] = {"attention": "eager"} | tables.get("kernels", {})
    tables["optimizer"] = {"implementation": "foreach", "max_grad_norm": 0} | tables.get("optimizer", {})
    (rank,) = forecast_ranks(Job.read(tables, source="a test"), built.shape)
    rest = rank.rest.total_nbytes - rank.rest.workspace
    above = {one.phase: one.total_nbytes - rank.rest.total_nbytes for one in rank.instants if one.phase != "load"}
    return rest, {
        "forward": max(above["forward"], above["loss"]),
        "backward": max(nbytes for name, nbytes in above.items() if name.startswith("backward")),
        "step": above["optimizer step"],
    }


def assert_steps_alike(built: Any, real: tuple[int, dict[str, int]], **tables: Any) -> None:
    rest, above = forecast_step(built, **tables)
    assert rest == real[0]
    for name, nbytes in above.items():
        assert rest + nbytes == pytest.approx(real[0] + real[1][name], rel=TOLERANCE), (name, nbytes, real[1][name])


CHECKPOINTING = {
    "none": {},
    "reentrant": {"model": {"gradient_checkpointing": True}, "kernels": {"reentrant": True}},
    "as 5.24 does it": {"model": {"gradient_checkpointing": True}},
}


def checkpointed(model: Any, how: str) -> None:
    if how == "none":
        return
    # The states of random numbers are CPU tensors, which on an accelerator are not on the card: left out here.
    options = {"use_reentrant": how == "reentrant", "preserve_rng_state": False}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", list(CHECKPOINTING))
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gpt2", "phi", "mixtral"])
def test_a_whole_step_of_a_full_fine_tune_is_forecast(name: str, how: str) -> None:
    built = build(name)
    checkpointed(built.model, how)
    assert_steps_alike(built, real_step(built.model, foreach=True, accumulation=1), **CHECKPOINTING[how])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", list(CHECKPOINTING))
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_whole_step_with_adapters_is_forecast(name: str, how: str) -> None:
    built = build(name)
    with_adapters(built.model)
    checkpointed(built.model, how)
    if how != "none":
        built.model.enable_input_require_grads()
    real = real_step(built.model, foreach=True, accumulation=1)
    method = {"kind": "lora", "rank": 8, "targets": ["all-linear"], "adapter_dtype": "fp32"}
    assert_steps_alike(built, real, **CHECKPOINTING[how], method=method)


def test_gradients_of_earlier_micro_batches_are_there_and_are_added_to_in_place() -> None:
    built = build("llama")
    real = real_step(built.model, foreach=True, accumulation=2)
    assert_steps_alike(built, real, train={"accumulation": 2})


@pytest.mark.parametrize(("foreach", "name"), [(True, "foreach"), (False, "for_loop")])
def test_foreach_keeps_one_list_as_large_as_the_weights_and_a_loop_does_not(foreach: bool, name: str) -> None:
    built = build("llama")
    real = real_step(built.model, foreach=foreach, accumulation=1)
    assert_steps_alike(built, real, optimizer={"implementation": name})


def test_the_forecast_of_5_24_checkpoints_without_reentry_as_transformers_does() -> None:
    from overspill.forecast.device.frameworks import resolve

    built = build("llama")
    assert built.shape.facts is not None
    job = Job.read(
        {"model": {"path": "m", "gradient_checkpointing": True}, "framework": {"versions": {"transformers": "5.24.0"}}},
        source="a test",
    )
    assert resolve(job, built.shape.facts).reentrant is False
    built.model.gradient_checkpointing_enable()
    used = built.layer._gradient_checkpointing_func
    assert used.keywords["use_reentrant"] is False


def test_the_loss_of_5_24_shifts_labels_and_upcasts_the_logits_that_its_caller_keeps() -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    from overspill.forecast.device.frameworks import resolve
    from overspill.forecast.layers.head import head_figures

    built = build("llama")
    facts = built.shape.facts
    assert facts is not None
    job = Job.read({"model": {"path": "m"}, "framework": {"versions": {"transformers": "5.24.0"}}}, source="a test")
    resolved = resolve(job, facts)
    assert resolved.loss == "pad_labels"
    vocab = 4096
    weight = torch.nn.Parameter(torch.randn(vocab, 128, dtype=torch.bfloat16), requires_grad=False)
    with Watched() as seen:
        seen.phase("input")
        h = torch.randn(SEQUENCES, SEQ_LEN, 128, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, vocab, (SEQUENCES, SEQ_LEN))
        before = h
        seen.phase("forward")
        logits = torch.nn.functional.linear(before, weight)
        loss = ForCausalLMLoss(logits=logits, labels=labels, vocab_size=vocab)
        seen.phase("backward")
        del logits
        loss.backward()
    run = run_of(torch.bfloat16, trained=False)
    found = head_figures(
        run, code="pad_labels", shift="pad_labels", hidden=128, vocab=vocab, final_norm="none", softcap=False,
        scaled=False, caller_holds_logits=False, converts_outputs=False, chunks=1,
    )  # fmt: skip
    assert found.forward_nbytes == pytest.approx(seen.peaks["forward"], rel=TOLERANCE)
    assert found.backward_nbytes == pytest.approx(seen.peaks["backward"], rel=TOLERANCE)
