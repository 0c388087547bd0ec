"""A trace against real training steps on the CPU: the same bytes at the peak of each phase."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from overspill.trace import CPU, AttentionKernel, TraceOptions, language_batch, trace_step  # noqa: E402
from overspill.units import MiB  # noqa: E402
from testing.lora import add_lora  # noqa: E402
from testing.real_step import grouped, phase_peaks, profiled_peak_nbytes, train  # noqa: E402
from testing.small_models import small_model  # noqa: E402

SHAPE = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
STEPS = [[(4, 128)], [(4, 128)]]
#: Adam's step counts are fp32 scalars that stay on the CPU: on the CPU they are seen, on meta they are not.
SCALARS_NBYTES = 4 * 1024


def build(family: str, *, heads: int = 4, lora: bool = False, **options: Any) -> Any:
    model = small_model(family, layers=4, **{**SHAPE, "num_key_value_heads": heads}, **options)
    return add_lora(model, inputs_need_grad=options.get("checkpointing") == "reentrant") if lora else model


def compare(build_model: Any, *, attention: Any = AttentionKernel.SDPA, foreach: bool = False, **options: Any) -> None:
    rules = dataclasses.replace(CPU, foreach=foreach)
    traced = trace_step(
        build_model,
        [[language_batch(4, 128)], [language_batch(4, 128)]],
        TraceOptions(rules=rules, attention=attention, max_grad_norm=1.0, **options),
    )
    real = phase_peaks(build_model(), STEPS, foreach=foreach)
    found = grouped(traced.peaks)
    for phase in ("forward", "backward", "clip", "step"):
        assert 0 <= real[phase] - found[phase] <= SCALARS_NBYTES, (phase, real[phase], found[phase])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_llama_takes_what_the_trace_says_to_the_byte(dtype: Any, checkpointing: str, lora: bool) -> None:
    compare(
        lambda: build("llama", dtype=dtype, checkpointing=checkpointing, lora=lora), foreach=dtype is torch.bfloat16
    )


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "opt", "phi3", "qwen3", "olmo2"])
def test_other_families_do_too(family: str) -> None:
    shape = {"vocab_size": 2048} if family in ("gpt2", "opt") else SHAPE
    if family in ("phi3", "qwen3", "olmo2"):
        shape = shape | {"num_key_value_heads": 4}
    compare(lambda: small_model(family, layers=3, **shape, **_without_dropout(family)))


def _without_dropout(family: str) -> dict[str, Any]:
    return {
        "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        "opt": {"dropout": 0.0},
    }.get(family, {})


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_eager_attention_with_grouped_heads_and_softcaps_does_too(family: str) -> None:
    compare(lambda: build(family, heads=2, attention="eager"), attention=AttentionKernel.EAGER)


def test_the_math_kernel_does_too() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        compare(lambda: build("llama", heads=2), attention=AttentionKernel.MATH)


def test_the_fused_kernel_with_grouped_heads_does_too() -> None:
    compare(lambda: build("llama", heads=2))


def test_experts_do_too() -> None:
    shape = {**SHAPE, "num_key_value_heads": 4}
    compare(lambda: small_model("mixtral", layers=2, dtype=torch.bfloat16, **shape), foreach=True)


def test_dropout_keeps_what_it_keeps_on_the_cpu() -> None:
    compare(lambda: small_model("gpt2", layers=3, vocab_size=2048, attn_pdrop=0.0))


def test_malloc_itself_sees_no_more_than_kernels_scratch_beyond_the_trace() -> None:
    """The profiler counts every allocation, those inside kernels too, and shares no code with the trace."""
    model = build("llama", checkpointing="non-reentrant")
    start = sum(p.nbytes for p in model.parameters())
    measured = start + profiled_peak_nbytes(lambda: train(model, STEPS, foreach=False))
    traced = trace_step(
        lambda: build("llama", checkpointing="non-reentrant"),
        [[language_batch(4, 128)], [language_batch(4, 128)]],
        TraceOptions(rules=CPU, max_grad_norm=1.0),
    )
    assert abs(measured - traced.peak_nbytes) <= 0.1 * MiB, (measured, traced.peak_nbytes)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_autocast_casts_and_caches_as_on_the_cpu(checkpointing: str) -> None:
    """The CPU's lists of operators differ from the accelerators' in few that a Llama uses (rsqrt, pow)."""

    def model() -> Any:
        return build("llama", checkpointing=checkpointing)

    traced = trace_step(
        model,
        [[language_batch(4, 128)], [language_batch(4, 128)]],
        TraceOptions(rules=CPU, max_grad_norm=1.0, autocast=torch.bfloat16),
    )
    real = phase_peaks(model(), STEPS, foreach=False, autocast=torch.bfloat16)
    found = grouped(traced.peaks)
    for phase in ("forward", "backward", "clip", "step"):
        assert found[phase] == pytest.approx(real[phase], rel=0.005), (phase, real[phase], found[phase])
