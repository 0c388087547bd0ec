"""What makes a trace wrong if it is done the plain way; each test shows the plain way wrong and the trace's right."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from overspill.errors import OverspillError  # noqa: E402
from overspill.forecast.events import Category, Event, Kind, peaks_by_phase  # noqa: E402
from overspill.trace import (  # noqa: E402
    CPU,
    CUDA,
    CUDA_HOPPER,
    AttentionKernel,
    DeviceRules,
    TensorSpec,
    Trace,
    TraceOptions,
    language_batch,
    trace_step,
)
from overspill.trace import step as step_module  # noqa: E402
from overspill.trace.attention import attention_registered  # noqa: E402
from overspill.trace.autocast import CASTS, CastCache, one_autocast_for_all_devices  # noqa: E402
from overspill.trace.interception import Interception, intercepting  # noqa: E402
from overspill.trace.recorder import Recorder, Segment  # noqa: E402
from overspill.units import MiB  # noqa: E402
from testing.lora import add_lora  # noqa: E402
from testing.small_models import small_model  # noqa: E402

NO_WORKSPACE = DeviceRules(workspace_nbytes=0)


def sizes(trace: Trace) -> set[int]:
    return {event.nbytes for event in trace.events if event.kind is Kind.MALLOC}


def of_function(forward: Any, batch: dict[str, TensorSpec], **options: Any) -> Trace:
    """A trace of one step of a module without parameters to speak of, whose forward is ``forward(weight, **batch)``."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(1))

        def forward(self, **inputs: Any) -> Any:
            return forward(self.weight, **inputs)

    options.setdefault("rules", NO_WORKSPACE)
    return trace_step(Model, [[batch]], TraceOptions(loss=lambda model, inputs: model(**inputs), **options))


# ---- attention ----


def test_attention_on_meta_makes_all_scores_and_the_traces_does_not() -> None:
    heads = {name: TensorSpec((1, 4, 512, 64), torch.bfloat16) for name in ("q", "k", "v")}
    scores_nbytes = 4 * 512 * 512 * 2

    def forward(weight: Any, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x * weight.to(x.dtype) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum()

    assert scores_nbytes not in sizes(of_function(forward, heads))
    assert scores_nbytes in sizes(of_function(forward, heads, attention=AttentionKernel.MATH))
    recorder = Recorder()
    with recorder:
        made = [torch.empty(1, 4, 512, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in "qkv"]
        nn.functional.scaled_dot_product_attention(*made, is_causal=True)
    assert scores_nbytes in {mark.nbytes for mark in recorder.marks.values()}, "meta has learnt it; drop the remedy"


def test_kernels_differ_in_what_they_keep_and_take() -> None:
    peaks: dict[str, int] = {}
    accumulator_nbytes = 256 * 4 * 32 * 4  # dq in fp32: 192 rows padded to 256, heads of 16 to 32
    for kernel in AttentionKernel:
        name = {"eager": "eager", "flash": attention_registered(), "flex": attention_registered()}.get(kernel, "sdpa")

        def build(name: str = name) -> Any:
            return small_model("llama", layers=2, attention=name, dtype=torch.bfloat16, vocab_size=64)

        found = trace_step(build, [[language_batch(1, 192)]], TraceOptions(rules=NO_WORKSPACE, attention=kernel))
        assert (accumulator_nbytes in sizes(found)) is (kernel in ("flash", "sdpa")), (
            "flash-2's backward adds dq in fp32"
        )
        peaks[kernel.value] = max(p.nbytes for p in found.peaks if "forward" in p.phase or "backward" in p.phase)
    assert peaks["flash"] == peaks["sdpa"], "torch takes flash where it can"
    assert peaks["sdpa"] < peaks["math"] < peaks["eager"] * 2
    assert min(peaks["math"], peaks["eager"]) > peaks["sdpa"] + 4 * 192 * 192 * 2


@pytest.mark.parametrize(
    ("padded", "dtype", "scores_wide"),
    [(False, torch.bfloat16, False), (True, torch.bfloat16, True)],
    ids=["no padding", "padding"],
)
def test_sdpa_takes_a_mask_only_if_the_batch_is_padded(padded: bool, dtype: Any, scores_wide: bool) -> None:
    found = trace_step(
        lambda: small_model("llama", layers=2, dtype=dtype),
        [[language_batch(2, 200, attention_mask=True)]],
        TraceOptions(padded=padded),
    )
    bias_nbytes = 2 * 200 * 200 * 2
    assert (bias_nbytes in sizes(found)) is scores_wide
    repeated = 2 * 4 * 200 * 16 * 2  # keys at the query's heads: the kernel that takes masks takes no groups
    count = sum(e.kind is Kind.MALLOC and e.nbytes == repeated for e in found.events)
    plain = trace_step(lambda: small_model("llama", layers=2, dtype=dtype), [[language_batch(2, 200)]], TraceOptions())
    extra = count - sum(e.kind is Kind.MALLOC and e.nbytes == repeated for e in plain.events)
    assert (extra > 0) is scores_wide


def test_a_sliding_window_shorter_than_the_sequence_makes_a_mask_in_sdpa_and_none_in_flash() -> None:
    def peak(window: int, attention: str, kernel: AttentionKernel) -> int:
        found = trace_step(
            lambda: small_model("mistral", layers=2, attention=attention, sliding_window=window, dtype=torch.bfloat16),
            [[language_batch(1, 128)]],
            TraceOptions(attention=kernel),
        )
        return found.phase("loss").nbytes

    flash = attention_registered()
    assert peak(32, "sdpa", AttentionKernel.SDPA) > peak(256, "sdpa", AttentionKernel.SDPA)
    assert peak(32, flash, AttentionKernel.FLASH) == peak(256, flash, AttentionKernel.FLASH)


def test_softcaps_and_sinks_have_their_own_footprint_in_eager() -> None:
    def kept(**changes: Any) -> int:
        found = trace_step(
            lambda: small_model("gemma2", layers=2, attention="eager", dtype=torch.bfloat16, **changes),
            [[language_batch(1, 128)]],
            TraceOptions(attention=AttentionKernel.EAGER),
        )
        return found.phase("loss").nbytes

    scores_nbytes = 4 * 128 * 128 * 2
    with_caps, without = kept(attn_logit_softcapping=50.0), kept(attn_logit_softcapping=None)
    assert with_caps - without >= 2 * scores_nbytes, "each layer keeps what tanh needs"


def test_making_a_mask_asks_for_values_and_a_trace_says_no_to_a_model_that_does() -> None:
    def build() -> Any:
        return small_model("llama", layers=2)

    steps = [[language_batch(1, 32, attention_mask=True)]]
    trace_step(build, steps)
    with (
        mock.patch.object(step_module, "without_values", lambda **_: nullcontext()),
        pytest.raises(OverspillError) as caught,
    ):
        trace_step(build, steps)
    assert caught.value.code == "OVS208"


# ---- optimizers ----


def test_foreach_is_off_on_meta_and_its_temporaries_would_vanish() -> None:
    def build() -> Any:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))

    batch = {"input": TensorSpec((1, 64), torch.float32)}
    parameters_nbytes = 8 * 64 * 64 * 4

    def loss(model: Any, inputs: Any) -> Any:
        return model(inputs["input"]).sum()

    found = trace_step(build, [[batch]], TraceOptions(loss=loss, rules=NO_WORKSPACE))
    assert dict(found.phase("step").by_category)[Category.TEMPORARIES] >= parameters_nbytes
    with mock.patch.object(step_module, "_foreach_as_on_the_device", lambda _: nullcontext()):
        plain = trace_step(build, [[batch]], TraceOptions(loss=loss, rules=NO_WORKSPACE))
    assert dict(plain.phase("step").by_category).get(Category.TEMPORARIES, 0) < parameters_nbytes / 2


def test_fused_adamw_raises_on_meta() -> None:
    """So trace/optimizers.py has its footprint; when this fails, run the real one."""
    weight = nn.Parameter(torch.empty(8, device="meta"))
    weight.grad = torch.empty(8, device="meta")
    with pytest.raises(RuntimeError, match="fused"):
        torch.optim.AdamW([weight], fused=True).step()


# ---- autocast ----


def test_autocast_does_not_exist_for_meta() -> None:
    with pytest.raises(RuntimeError):
        torch.autocast("meta", dtype=torch.bfloat16)
    x = torch.empty(4, 4, device="meta")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.mm(x, x).dtype is torch.float32, "meta has learnt it; drop the remedy"


def test_the_traces_autocast_casts_by_the_accelerators_lists_and_caches_weights() -> None:
    x, weight = torch.empty(4, 4, device="meta"), nn.Parameter(torch.empty(4, 4, device="meta"))
    running = Interception(CUDA, AttentionKernel.SDPA)
    recorder = Recorder()
    with one_autocast_for_all_devices(running.cache), intercepting(running), recorder:
        assert torch.mm(x, x).dtype is torch.float32
        with torch.autocast("meta", dtype=torch.bfloat16):
            low = torch.mm(x, weight)
            assert low.dtype is torch.bfloat16
            before = recorder.next_block
            again = torch.mm(x.bfloat16(), weight)
            assert recorder.next_block - before == 2, "x's cast and the product: the weight's cast is cached"
            assert torch.exp(low).dtype is torch.float32
            assert low.softmax(-1).dtype is torch.float32
            assert (low + x).dtype is torch.float32
            assert torch.addcmul(low, low, x).dtype is torch.float32
            with torch.autocast("cuda", enabled=False):
                assert torch.mm(x, x).dtype is torch.float32
        assert torch.mm(x, x).dtype is torch.float32
        gc.collect()
        del again, low
    assert torch.autocast.__module__ == "torch.amp.autocast_mode"
    assert running.cache.cast(weight, torch.float32) is weight


def test_the_lists_of_operators_are_the_installed_torchs() -> None:
    import re
    from pathlib import Path

    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    found: set[str] = set()
    for block in re.findall(
        r"#define AT_FORALL_(?:LOWER_PRECISION_FP|FP32|FP32_SET_OPT_DTYPE|PROMOTE)\(_\)(.*?)\n\n", header, re.S
    ):
        for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", block):
            found.add(f"{name}.{overload}" if overload else name)
    assert found == set(CASTS)


def test_a_trace_leaves_the_process_as_it_was() -> None:
    before = torch.autocast, torch.is_autocast_enabled, torch.clear_autocast_cache
    trace_step(lambda: small_model("llama", layers=2), [[language_batch(1, 16)]])
    assert (torch.autocast, torch.is_autocast_enabled, torch.clear_autocast_cache) == before
    x = torch.randn(3, 3)
    assert torch.equal(nn.functional.dropout(x, 0.0), x)
    assert gc.isenabled()
    assert not CastCache()._casts


# ---- storages ----


def test_an_in_place_operation_on_an_older_storage_adds_nothing() -> None:
    old = torch.empty(1000, device="meta")
    recorder = Recorder()
    recorder.segment = Segment(1)
    with recorder:
        old.add_(1.0)
        torch._foreach_add_([old], 1.0)
        old[:10].mul_(2.0)
    records = recorder.at_start()
    assert len(records) == 1, "the storage is met once"
    assert records[0].segment.visit < 0, "and was there from the start"
    assert records[0].phase == "load"


def test_a_storage_lives_as_long_as_any_view_of_it() -> None:
    recorder = Recorder()
    with recorder:
        whole = torch.empty(1000, device="meta")
        part = whole[:1]
        del whole
        assert [r.kind for r in recorder.records] == [Kind.MALLOC]
        del part
    assert [r.kind for r in recorder.records] == [Kind.MALLOC, Kind.FREE]


def test_a_storage_that_is_resized_is_freed_and_allocated() -> None:
    recorder = Recorder()
    with recorder:
        x = torch.empty(100, device="meta")
        x.resize_(400)
        del x
    sizes = [recorder.marks[r.block].nbytes for r in recorder.records]
    assert [r.kind.name for r in recorder.records] == ["MALLOC", "FREE", "MALLOC", "FREE"]
    assert sizes == [400, 400, 1600, 1600]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_activations_are_what_autograd_saves(lora: bool) -> None:
    """Categories come from lifetimes (alive when backward begins); autograd's own account is held against them."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    saved: set[int] = set()
    recorders: list[Recorder] = []

    def loss(model: Any, batch: Any) -> Any:
        (recorder,) = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]
        recorders.append(recorder)

        def pack(tensor: Any) -> Any:
            if recorder.is_known(tensor):
                saved.add(recorder._known[tensor.untyped_storage()._cdata][0])
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return model(**batch).loss

    def build() -> Any:
        model = small_model("llama", layers=3, dtype=torch.bfloat16)
        return add_lora(model) if lora else model

    trace_step(build, [[language_batch(2, 32)]], TraceOptions(loss=loss))
    marks = recorders[0].marks
    kept = {block for block, mark in marks.items() if mark.category is Category.ACTIVATIONS}
    allowed = {Category.ACTIVATIONS, Category.WEIGHTS, Category.INPUTS}
    assert saved
    assert {marks[block].category for block in saved} <= allowed
    alive_for_others = kept - saved
    nbytes = sum(marks[block].nbytes for block in alive_for_others)
    assert nbytes <= 0.02 * sum(marks[block].nbytes for block in kept), [marks[block] for block in alive_for_others]


# ---- the device's rules ----


def test_dropout_keeps_a_byte_for_each_element_on_an_accelerator() -> None:
    batch = {"x": TensorSpec((1000, 100), torch.float32)}

    def forward(weight: Any, x: Any) -> Any:
        return nn.functional.dropout(x * weight, 0.1).sum()

    assert 1000 * 100 in sizes(of_function(forward, batch))
    assert 1000 * 100 not in sizes(of_function(forward, batch, rules=CPU))


def test_torchs_rms_norm_is_one_kernel_on_an_accelerator() -> None:
    batch = {"x": TensorSpec((100, 1000), torch.bfloat16)}

    def forward(weight: Any, x: Any) -> Any:
        return nn.functional.rms_norm(x * weight.bfloat16(), (1000,)).sum()

    fused, taken_apart = of_function(forward, batch), of_function(forward, batch, rules=CPU)
    assert fused.phase("forward").nbytes < taken_apart.phase("forward").nbytes


def test_softmax_of_fp16_makes_no_copy_in_fp32_on_an_accelerator() -> None:
    batch = {"x": TensorSpec((1000, 100), torch.float16)}

    def forward(weight: Any, x: Any) -> Any:
        return nn.functional.softmax(x * weight.half(), -1, dtype=torch.float32).sum()

    def count(**options: Any) -> int:
        found = of_function(forward, batch, **options)
        made = [e for e in found.events if e.kind is Kind.MALLOC and e.phase == "forward"]
        return sum(e.nbytes == 1000 * 100 * 4 for e in made)

    assert count() == 1
    assert count(rules=CPU) == 2


def test_sizes_are_rounded_to_512_bytes() -> None:
    events = [Event(Kind.MALLOC, i, 1) for i in range(10)]
    assert peaks_by_phase(events)[0].nbytes == 5120
    assert peaks_by_phase(events, 1)[0].nbytes == 10


@pytest.mark.parametrize(("rules", "mib"), [(CUDA, 2 * 8.125), (CUDA_HOPPER, 64.0), (NO_WORKSPACE, 0.0)])
def test_products_take_a_workspace_in_forward_and_in_backward(rules: DeviceRules, mib: float) -> None:
    found = trace_step(lambda: small_model("llama", layers=2), [[language_batch(1, 16)]] * 2, TraceOptions(rules=rules))
    workspaces = [e.nbytes for e in found.events if e.category is Category.WORKSPACE]
    assert sum(workspaces) == mib * MiB


# ---- several steps ----


def test_optimizer_state_is_born_in_holes_so_the_second_step_reserves_more() -> None:
    def build() -> Any:
        return small_model("llama", layers=4, hidden_size=256, intermediate_size=704, vocab_size=4096)

    one = trace_step(build, [[language_batch(4, 256)]]).replay()
    two = trace_step(build, [[language_batch(4, 256)]] * 2).replay()
    three = trace_step(build, [[language_batch(4, 256)]] * 3).replay()
    assert two.reserved_peak_nbytes > one.reserved_peak_nbytes
    assert two.allocated_peak_nbytes > one.allocated_peak_nbytes
    assert three.allocated_peak_nbytes == two.allocated_peak_nbytes, "from the second step on it is the same"


def test_a_longest_batch_that_comes_late_reserves_more() -> None:
    def build() -> Any:
        return small_model("llama", layers=4, vocab_size=4096)

    def reserved(lengths: list[int]) -> int:
        return trace_step(build, [[language_batch(4, n)] for n in lengths]).replay().reserved_peak_nbytes

    assert reserved([250, 120, 180, 220]) < reserved([120, 180, 220, 250])


def test_accumulated_gradients_stay_between_micro_batches() -> None:
    def build() -> Any:
        return small_model("llama", layers=2)

    single = trace_step(build, [[language_batch(1, 128)]])
    accumulated = trace_step(build, [[language_batch(1, 128)] * 2])
    gradients = dict(accumulated.phase("loss").by_category)[Category.GRADIENTS]
    assert gradients == sum(-(-p.nbytes // 512) * 512 for p in build().parameters())
    assert accumulated.phase("loss").nbytes == single.phase("loss").nbytes + gradients + single_workspace(single)


def single_workspace(trace: Trace) -> int:
    """The second micro-batch runs after backward has taken its workspace."""
    return CUDA.workspace_nbytes if trace.events else 0


def test_evaluation_has_a_peak_of_its_own_when_logits_are_kept() -> None:
    batches = (language_batch(4, 64),) * 6

    def evaluated(keep: bool) -> int:
        return (
            trace_step(
                lambda: small_model("llama", layers=2, vocab_size=4096),
                [[language_batch(1, 16)]],
                TraceOptions(evaluation=batches, accumulate_logits=keep),
            )
            .phase("evaluation")
            .nbytes
        )

    logits_nbytes = 4 * 64 * 4096 * 4
    assert evaluated(True) - evaluated(False) >= 5 * logits_nbytes
