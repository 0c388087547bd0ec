"""Footprints of kernels that do not run on meta: bytes that follow from their sources' formulas."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from overspill.forecast.events import Category, Kind, rounded_nbytes  # noqa: E402
from overspill.trace import (  # noqa: E402
    DeviceRules,
    TensorSpec,
    Trace,
    TraceOptions,
    language_batch,
    stubs,
    trace_step,
)
from overspill.trace.optimizers import FOOTPRINTS, Blockwise8bit  # noqa: E402
from testing.lora import add_lora  # noqa: E402
from testing.small_models import small_model  # noqa: E402

RULES = DeviceRules(workspace_nbytes=0)


def linear(**changes: Any) -> Any:
    return small_model("llama", layers=2, dtype=torch.bfloat16, vocab_size=1024, hidden_size=128, **changes)


def trained(build: Any) -> list[Any]:
    return [p for p in build().parameters() if p.requires_grad]


def state_nbytes(name: str) -> int:
    found = trace_step(linear, [[language_batch(1, 16)]], TraceOptions(rules=RULES, optimizer=FOOTPRINTS[name]))
    return dict(found.phase("zero_grad").by_category)[Category.OPTIMIZER]


def test_fused_adamw_keeps_its_step_counts_on_the_device_and_takes_nothing() -> None:
    parameters = trained(linear)
    expected = sum(2 * rounded_nbytes(p.nbytes) + 512 for p in parameters)
    assert state_nbytes("adamw_torch_fused") == expected
    found = trace_step(
        linear, [[language_batch(1, 16)]], TraceOptions(rules=RULES, optimizer=FOOTPRINTS["adamw_torch_fused"])
    )
    assert Category.TEMPORARIES not in dict(found.phase("step").by_category)


def test_8bit_adam_keeps_two_bytes_and_two_scales_a_block_but_fp32_for_small_parameters() -> None:
    expected = 2 * 1024  # two maps of 256 fp32 values, shared
    for parameter in trained(linear):
        numel = parameter.numel()
        each = numel * 4 if numel < 4096 else numel
        expected += 2 * rounded_nbytes(each)
        if numel >= 4096:
            expected += 2 * rounded_nbytes(-(-numel // 256) * 4)
    assert state_nbytes("adamw_8bit") == expected
    assert state_nbytes("lion_8bit") < expected
    assert state_nbytes("paged_adamw_8bit") < expected, "parameters of 100 000 elements keep their moments elsewhere"


def test_embeddings_can_be_kept_in_fp32_as_the_trainer_does() -> None:
    def optimizer(parameters: list[nn.Parameter]) -> Any:
        return Blockwise8bit(parameters, keep_fp32=parameters[:1])

    found = trace_step(linear, [[language_batch(1, 16)]], TraceOptions(rules=RULES, optimizer=optimizer))
    more = dict(found.phase("zero_grad").by_category)[Category.OPTIMIZER] - state_nbytes("adamw_8bit")
    numel = 1024 * 128
    assert more == 2 * (4 * numel - numel) - 2 * rounded_nbytes(numel // 256 * 4)


@pytest.mark.parametrize(("double", "scale_nbytes"), [(True, 1), (False, 4)], ids=["double", "single"])
def test_nf4_weights_take_half_a_byte_and_their_scales(double: bool, scale_nbytes: int) -> None:
    layer = nn.Linear(256, 512, bias=False, dtype=torch.bfloat16, device="meta")
    stub = stubs.Linear4bit(layer, compute_dtype=torch.bfloat16, double=double)
    numel = 256 * 512
    blocks = numel // 64
    expected = numel // 2 + blocks * scale_nbytes + 16 * 4
    if double:
        expected += blocks // 256 * 4 + 256 * 4 + 4
    assert sum(t.nbytes for t in (*stub.parameters(), *stub.buffers())) == expected
    per_weight = (numel / 2 + blocks * scale_nbytes + (blocks / 256 * 4 if double else 0)) / numel
    assert per_weight == pytest.approx(0.5 + (0.0158691 if double else 0.0625), abs=2e-4)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantised_layer_makes_its_weight_for_backward_and_is_whole_once_while_loading(kind: Any) -> None:
    def build() -> Any:
        return add_lora(stubs.quantised(linear(), kind), dtype=torch.bfloat16)

    found = trace_step(build, [[language_batch(1, 16)]], TraceOptions(rules=RULES))
    weight_nbytes = 128 * 128 * 2  # of an MLP's projection
    inside = [e for e in found.events if e.kind is Kind.MALLOC and e.nbytes == weight_nbytes]
    assert any(e.phase.startswith("backward of model.layers") for e in inside)
    assert any(e.phase == "load" and e.category is Category.TEMPORARIES for e in inside)
    assert any(e.phase.startswith("forward of") for e in inside) is (kind == "nf4"), "int8 multiplies codes"
    assert dict(found.phase("step").by_category)[Category.GRADIENTS] == sum(
        rounded_nbytes(p.nbytes) for p in trained(build)
    )


def test_int8_keeps_its_input_and_nf4_does_not() -> None:
    def activations(kind: Any) -> int:
        def build() -> Any:
            model = stubs.quantised(linear(), kind)
            model.enable_input_require_grads()
            return add_lora(model, targets=("q_proj",), inputs_need_grad=True)

        found = trace_step(build, [[language_batch(1, 64)]], TraceOptions(rules=RULES))
        return dict(found.phase("loss").by_category)[Category.ACTIVATIONS]

    assert activations("int8") > activations("nf4")


def peak(loss: Any, build: Any = linear) -> Trace:
    return trace_step(build, [[language_batch(4, 128)]], TraceOptions(rules=RULES, loss=loss))


def test_losses_take_less_the_more_they_fuse() -> None:
    from overspill.trace.step import model_loss

    logits = 4 * 128 * 1024
    whole, fused, linear_too = peak(model_loss), peak(stubs.fused_cross_entropy_loss), peak(stubs.fused_linear_loss)

    def of_logits(trace: Trace) -> int:
        return max(dict(p.by_category).get(Category.LOGITS, 0) for p in trace.peaks)

    # In fp32: log_softmax, its gradient and the logits' gradient; fused: one copy in bf16.
    assert of_logits(whole) / logits == pytest.approx(12, abs=0.1)
    assert of_logits(fused) / logits == pytest.approx(2, abs=0.1)
    # 512 rows / (1024 / 128) = 64 rows at a time.
    assert of_logits(linear_too) == 64 * 1024 * 2


def test_a_frozen_head_gets_no_gradient_in_the_fused_linear_loss() -> None:
    def frozen() -> Any:
        return add_lora(linear(), dtype=torch.bfloat16)

    def head_gradients(trace: Trace) -> int:
        """Made in the forward, and handed out as the head's gradient in the end."""
        made = [e for e in trace.events if e.kind is Kind.MALLOC and e.phase == "loss"]
        return sum(e.category is Category.GRADIENTS and e.nbytes == 1024 * 128 * 2 for e in made)

    assert head_gradients(peak(stubs.fused_linear_loss)) == 1
    assert head_gradients(peak(stubs.fused_linear_loss, frozen)) == 0


def test_ligers_kernels_keep_less_than_the_modules_that_they_replace() -> None:
    def liger() -> Any:
        return stubs.replaced(linear(), stubs.LIGER)

    def kept(build: Any) -> int:
        found = trace_step(build, [[language_batch(2, 64)]], TraceOptions(rules=RULES))
        return dict(found.phase("loss").by_category)[Category.ACTIVATIONS]

    tokens, hidden, mlp, layers = 2 * 64, 128, 128, 2
    # Each of five norms keeps its input (2 B) instead of that in fp32 (4 B) and normed (2 B); the MLP no act(gate).
    assert kept(linear) - kept(liger) == tokens * (5 * 4 * hidden + layers * 2 * mlp)
    gradients = trace_step(liger, [[language_batch(2, 64)]], TraceOptions(rules=RULES)).phase("step")
    assert dict(gradients.by_category)[Category.GRADIENTS] == sum(rounded_nbytes(p.nbytes) for p in trained(liger))


def test_a_module_that_refuses_meta_is_traced_by_a_registered_footprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stubs, "_STUBS", {})

    class Kernel(nn.Module):
        def forward(self, x: Any) -> Any:
            raise AssertionError("needs a GPU")

    class Footprint(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.exp()

    def build() -> Any:
        return stubs.replaced(nn.Sequential(nn.Linear(8, 8), Kernel()))

    def loss(model: Any, inputs: Any) -> Any:
        return model(inputs["x"]).sum()

    steps = [[{"x": TensorSpec((4, 8), torch.float32)}]]
    with pytest.raises(AssertionError):
        trace_step(build, steps, TraceOptions(loss=loss))
    stubs.register("Kernel", lambda _: Footprint())
    assert trace_step(build, steps, TraceOptions(loss=loss)).peak_nbytes > 0
