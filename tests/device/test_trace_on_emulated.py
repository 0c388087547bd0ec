"""A trace told the emulated accelerator's rules, against real training steps on it: within 2 %, mostly to the byte."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from overspill.trace import EMULATED, AttentionKernel, Trace, TraceOptions, language_batch, trace_step
from overspill.units import MiB
from testing.lora import add_lora
from testing.real_step import grouped, train
from testing.small_models import small_model

SHAPE = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 352, "max_position_embeddings": 512}
STEPS = [[(2, 128), (2, 128)], [(2, 192)], [(2, 128)]]


def build(family: str = "llama", *, lora: bool = False, checkpointing: str = "none", **changes: Any) -> Any:
    model = small_model(family, layers=3, checkpointing=checkpointing, **{**SHAPE, **changes})
    return add_lora(model, inputs_need_grad=checkpointing == "reentrant") if lora else model


def measured(model: Any, **options: Any) -> dict[str, int]:
    """Peak of each phase of a plain loop on the device, as `torch.accelerator.max_memory_allocated` has it."""
    model = model.to("emulated")
    gc.collect()
    torch.accelerator.synchronize()
    peaks: dict[str, int] = {}
    current = ""

    def at(phase: str) -> None:
        nonlocal current
        if current:
            peaks[current] = max(peaks.get(current, 0), torch.accelerator.max_memory_allocated())
        torch.accelerator.reset_peak_memory_stats()
        current = phase

    train(model, STEPS, device="emulated", at=at, **options)
    at("")
    torch.accelerator.synchronize()
    return peaks


def traced(build_model: Callable[[], Any], **options: Any) -> Trace:
    steps = [[language_batch(*sizes) for sizes in step] for step in STEPS]
    return trace_step(build_model, steps, TraceOptions(rules=EMULATED, max_grad_norm=1.0, **options))


def agree(real: dict[str, int], trace: Trace, within: float = 0.02) -> None:
    found = grouped(trace.peaks)
    for phase in ("forward", "backward", "clip", "step"):
        assert found[phase] == pytest.approx(real[phase], rel=within), (phase, real[phase], found[phase])
    assert trace.peak_nbytes == pytest.approx(max(real.values()), rel=within)


@pytest.mark.parametrize("key_value_heads", [8, 2], ids=["all heads", "grouped heads"])
def test_attention_has_a_fused_kernels_footprint(emulated: ModuleType, key_value_heads: int) -> None:
    """The output and a logsumexp are kept, three gradients are made, and scores never exist."""
    gc.collect()

    def made(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, 512, 64, device="emulated", requires_grad=True)

    query, key, value = made(8), made(key_value_heads), made(key_value_heads)
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    grouped_heads = key_value_heads != 8
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=grouped_heads
    )
    kept = torch.accelerator.memory_allocated() - before
    assert kept == query.nbytes + 8 * 512 * 4
    assert torch.accelerator.max_memory_allocated() - before == kept, "scores of 8 MiB were made"
    output.backward(torch.ones_like(output))
    gradients = query.nbytes + key.nbytes + value.nbytes
    assert torch.accelerator.max_memory_allocated() - before <= kept + query.nbytes + gradients + 2 * query.nbytes
    torch.accelerator.synchronize()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_a_plain_loop_takes_what_the_trace_says(emulated: ModuleType, lora: bool, checkpointing: str) -> None:
    def model() -> Any:
        return build(lora=lora, checkpointing=checkpointing)

    agree(measured(model()), traced(model))


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma3_text", "opt", "gpt_neox", "phi3"])
def test_other_families_do_too(emulated: ModuleType, family: str) -> None:
    """GPT-2 drops out attention weights, for which the device, like a CPU, takes the math kernel."""
    kernel = AttentionKernel.MATH if family == "gpt2" else AttentionKernel.SDPA

    def model() -> Any:
        return small_model(family, layers=3, vocab_size=2048)

    agree(measured(model()), traced(model, attention=kernel))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_autocast_takes_what_the_trace_says(emulated: ModuleType, dtype: torch.dtype, checkpointing: str) -> None:
    def model() -> Any:
        return build(checkpointing=checkpointing)

    agree(measured(model(), autocast=dtype), traced(model, autocast=dtype))


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
def test_both_ways_of_adamw_take_what_the_trace_says(emulated: ModuleType, foreach: bool) -> None:
    def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, foreach=foreach)

    real = measured(build(), optimizer=optimizer)
    agree(real, traced(build, optimizer=optimizer))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16 autocast"])
def test_the_hugging_face_trainer_takes_what_the_trace_says(
    emulated: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool, bf16: bool
) -> None:
    from accelerate.state import AcceleratorState, PartialState
    from transformers import Trainer, TrainingArguments

    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "emulated:0")
    # transformers knows of bf16 on devices by their names.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    rows = torch.randint(0, 2048, (24, 128), generator=torch.Generator().manual_seed(3)).tolist()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        optim="adamw_torch",
        bf16=bf16,
    )
    try:
        model = build(lora=lora)
        trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": r, "labels": r} for r in rows])
        gc.collect()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        trainer.train()
        real = torch.accelerator.max_memory_allocated()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
    trace = trace_step(
        lambda: build(lora=lora),
        [[language_batch(2, 128)] * 2] * 3,
        TraceOptions(
            rules=EMULATED,
            max_grad_norm=1.0,
            autocast=torch.bfloat16 if bf16 else None,
            outputs_fp32=bf16,
        ),
    )
    assert trace.peak_nbytes == pytest.approx(real, rel=0.02), (trace.peak_nbytes / MiB, real / MiB)
