"""A trace runs on twelve architectures and more, and shortened models give what their whole depth gives."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from overspill.forecast.events import Category  # noqa: E402
from overspill.trace import AttentionKernel, TensorSpec, Trace, TraceOptions, language_batch, trace_step  # noqa: E402
from overspill.trace.step import model_loss  # noqa: E402
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


@pytest.mark.parametrize(
    ("family", "layers", "checkpointing", "lora"),
    [
        ("llama", 9, "none", False),
        ("llama", 8, "reentrant", False),
        ("llama", 8, "non-reentrant", True),
        ("gemma2", 15, "none", True),
        ("gemma2", 13, "non-reentrant", False),
        ("gpt2", 8, "reentrant", True),
        ("qwen2_moe", 7, "none", False),
        ("qwen2_moe", 7, "non-reentrant", True),
    ],
)
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


def _t5() -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=8, num_decoder_layers=7, num_heads=4
    )
    config.use_cache, config.decoder_start_token_id, config._attn_implementation = False, 0, "eager"
    return transformers.T5ForConditionalGeneration(config)


def _deepseek() -> Any:
    """Latent attention; two dense layers, then experts."""
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=9,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=16,
        attn_implementation="eager",
    )
    config.use_cache = False
    return transformers.DeepseekV3ForCausalLM(config)


def _gpt_oss() -> Any:
    """Attention sinks; sliding and full layers take turns."""
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        attn_implementation="eager",
    )
    config.use_cache = False
    return transformers.GptOssForCausalLM(config)


def _vit() -> Any:
    import transformers

    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
            attn_implementation="eager",
        )
    )


def _plain_torch() -> Any:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 8)


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (_t5, {"input_ids": TensorSpec((2, 32)), "labels": TensorSpec((2, 16))}),
        (_deepseek, language_batch(2, 32)),
        (_gpt_oss, language_batch(2, 32)),
        (_vit, {"pixel_values": TensorSpec((2, 3, 32, 32), torch.float32), "labels": TensorSpec((2,))}),
        (_plain_torch, {"src": TensorSpec((4, 16, 32), torch.float32)}),
    ],
    ids=["encoder-decoder", "latent attention", "sinks", "vision", "torch.nn"],
)
def test_other_kinds_of_models_are_shortened_as_well(build: Any, batch: Any) -> None:
    loss = (lambda model, inputs: model(**inputs).sum()) if build is _plain_torch else model_loss
    short, whole = (
        trace_step(build, [[batch]], TraceOptions(attention=AttentionKernel.EAGER, loss=loss, every_layer=every))
        for every in (False, True)
    )
    assert short.notes == ()
    assert all(repetition.copies > 0 for _, repetition in short.repetitions)
    assert short.peaks == whole.peaks


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


def test_a_70b_takes_less_than_10_seconds_of_one_core() -> None:
    from benchmarks.trace_time import run

    start = time.process_time()
    found = run("llama-70b-checkpointing")
    assert time.process_time() - start <= 10
    assert found["notes"] == ()
    # Pure bf16: weights, gradients, two moments and foreach's copy are 2 bytes each.
    assert found["allocated_nbytes"] == pytest.approx(10 * 70_553_706_496, rel=0.001)


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

    batch = {"x": TensorSpec((256, 16), torch.float32)}
    found = trace_step(Model, [[batch]], TraceOptions(loss=lambda model, inputs: model(**inputs).sum()))
    assert "every layer was traced" in found.notes[0]
    assert found.repetitions == ()
    assert found.by_category_at_peak[Category.ACTIVATIONS] >= 45 * 256 * 16 * 4
