"""LoRA as peft itself adds it: a trace against real CPU steps, and testing/lora.py against peft."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="peft is optional; testing/lora.py stands for it in the other tests")

from overspill.trace import CPU, TraceOptions, language_batch, trace_step  # noqa: E402
from testing.lora import add_lora  # noqa: E402
from testing.real_step import grouped, phase_peaks  # noqa: E402
from testing.small_models import small_model  # noqa: E402

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS = [[(4, 128)], [(4, 128)]]


def base(checkpointing: str, dtype: Any) -> Any:
    return small_model("llama", layers=4, checkpointing=checkpointing, dtype=dtype, vocab_size=2048)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_a_peft_model_takes_what_the_trace_says(checkpointing: str, dtype: Any) -> None:
    def build(own: bool = False) -> Any:
        model = base(checkpointing, dtype)
        if own:
            return add_lora(model, inputs_need_grad=checkpointing == "reentrant")
        if checkpointing == "reentrant":
            model.enable_input_require_grads()
        return peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))

    def traced(own: bool) -> dict[str, int]:
        steps = [[language_batch(*sizes) for sizes in step] for step in STEPS]
        return grouped(trace_step(lambda: build(own), steps, TraceOptions(rules=CPU, max_grad_norm=1.0)).peaks)

    found = traced(own=False)
    like_it = traced(own=True)
    real = phase_peaks(build(), STEPS, foreach=False)
    for phase in ("forward", "backward", "clip", "step"):
        assert found[phase] == pytest.approx(real[phase], rel=0.002), (phase, real[phase], found[phase])
        assert like_it[phase] == pytest.approx(found[phase], rel=0.01)


def test_a_deep_peft_model_is_shortened_too() -> None:
    def build() -> Any:
        model = small_model("llama", layers=9, vocab_size=512)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS))

    short = trace_step(build, [[language_batch(1, 32)]])
    whole = trace_step(build, [[language_batch(1, 32)]], TraceOptions(every_layer=True))
    assert short.repetitions[0][1].copies > 0
    assert short.notes == ()
    assert short.peaks == whole.peaks
