"""A trace runs on twelve architectures and more, and shortened models give what their whole depth gives."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from overspill.forecast.events import Category  # noqa: E402
from overspill.trace import AttentionKernel, Trace, TraceOptions, language_batch, trace_step  # noqa: E402
from testing.lora import add_lora  # noqa: E402
from testing.small_models import FAMILIES, small_model  # noqa: E402

STEPS = [[language_batch(2, 32)] * 2, [language_batch(2, 48)]]


def trace(family: str, *, layers: int, lora: bool, checkpointing: str = "none", every_layer: bool = False) -> Trace:
    kernel = AttentionKernel.EAGER if family == "gemma2" else AttentionKernel.SDPA  # it has no sdpa

    def build() -> Any:
        model = small_model(family, layers=layers, checkpointing=checkpointing, attention=kernel.value)
        return add_lora(model, inputs_need_grad=checkpointing == "reentrant") if lora else model

    return trace_step(build, STEPS, TraceOptions(attention=kernel, max_grad_norm=1.0, every_layer=every_layer))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_runs_and_accounts_for_every_parameter(family: str, checkpointing: str, lora: bool) -> None:
    found = trace(family, layers=2, lora=lora, checkpointing=checkpointing)
    model = small_model(family, layers=2, attention="eager")
    if lora:
        add_lora(model)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    weights = sum(-(-t.untyped_storage().nbytes() // 512) * 512 for t in tensors.values())
    assert found.by_category_at_peak[Category.WEIGHTS] == weights
    trained = sum(-(-p.nbytes // 512) * 512 for p in model.parameters() if p.requires_grad)
    assert dict(found.phase("step").by_category)[Category.GRADIENTS] == trained
    assert dict(found.phase("step").by_category)[Category.OPTIMIZER] == 2 * trained
    assert found.phase("loss").nbytes > found.phase("load").nbytes
    assert found.resting_nbytes < found.peak_nbytes


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize(("family", "layers"), [("llama", 9), ("gemma2", 15), ("gpt2", 8), ("qwen2_moe", 7)])
def test_a_shortened_model_gives_every_phase_point_of_the_whole_depth(
    family: str, layers: int, checkpointing: str, lora: bool
) -> None:
    short = trace(family, layers=layers, lora=lora, checkpointing=checkpointing)
    whole = trace(family, layers=layers, lora=lora, checkpointing=checkpointing, every_layer=True)
    assert short.notes == ()
    assert short.repetitions[0][1].copies > 0
    assert short.peaks == whole.peaks
    assert [e[:1] + e[2:] for e in short.events] == [e[:1] + e[2:] for e in whole.events], "events are not the same"
    assert short.replay().reserved_nbytes == whole.replay().reserved_nbytes


def test_the_peak_moves_with_depth_and_the_trace_with_it() -> None:
    """Few layers: the loss is the peak; many: the optimizer's step. A maximum extrapolated from few would miss it."""

    def at(layers: int, every_layer: bool = False) -> Trace:
        def build() -> Any:
            return small_model("llama", layers=layers, vocab_size=4096, checkpointing="non-reentrant")

        return trace_step(build, [[language_batch(1, 128)]] * 2, TraceOptions(every_layer=every_layer))

    two, three, many = at(2), at(3), at(40)
    assert two.peak.phase == three.peak.phase == "backward of the head"
    assert many.peak.phase == "step"
    by_maxima = two.peak_nbytes + 38 * (three.peak_nbytes - two.peak_nbytes)
    assert abs(by_maxima / many.peak_nbytes - 1) > 0.03
    whole = at(40, every_layer=True)
    assert whole.peaks == many.peaks


def test_layers_that_differ_within_their_kind_are_all_traced() -> None:
    """Every layer keeps one tensor more than the one before: no pattern repeats, and the trace says so."""

    class Layer(torch.nn.Module):
        def __init__(self, own: list[int]) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)
            self.own = own  # not a plain attribute: the kinds look alike

        def forward(self, x: Any) -> Any:
            for _ in self.own:
                x = torch.tanh(x)
            return self.linear(x)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer([0] * n) for n in range(10)])

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    from overspill.trace import TensorSpec

    batch = {"x": TensorSpec((256, 16), torch.float32)}
    found = trace_step(Model, [[batch]], TraceOptions(loss=lambda model, inputs: model(**inputs).sum()))
    assert "every layer was traced" in found.notes[0]
    assert found.repetitions == ()
    assert found.by_category_at_peak[Category.ACTIVATIONS] >= 45 * 256 * 16 * 4
