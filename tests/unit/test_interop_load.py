"""Models built empty and filled by streaming are the models that from_pretrained gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from overspill.errors import OverspillError
from overspill.interop.hf import (
    allocate_parameters,
    build_empty,
    initialise_weights,
    load_config,
    load_tokenizer,
    load_weights,
    max_positions,
)
from overspill.job import OptimizerConfig
from overspill.plan import Plan
from overspill.train import attach
from overspill.train.live import refuse_unsupported
from overspill.units import MiB
from testing.peak import measure_peak_nbytes
from testing.tiny import TINY_ASSETS, make_tiny_model

TOKENS = torch.arange(2 * 19).reshape(2, 19) * 7 % 1000


def _loaded(path: Path, dtype: str = "fp32"):
    model = build_empty(path, dtype)
    allocate_parameters(model)
    report = load_weights(model, path)
    return model.eval(), report


def _logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS % model.config.vocab_size).logits


SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ARCHITECTURES = {
    "llama with scaled rotary": ("llama", {**SMALL, "rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("qwen3", SMALL),
    "gemma2": ("gemma2", {**SMALL, "query_pre_attn_scalar": 8}),
    "gpt2 (tied, position table)": (
        "gpt2",
        {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1},
    ),
    "mixtral (experts are stacked on load)": ("mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [False, True])
def test_a_streamed_llama_computes_the_logits_of_from_pretrained(tmp_path, dtype, tied, shards):
    path = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied, dtype="float32")
    if shards:
        AutoModelForCausalLM.from_pretrained(path).save_pretrained(path, max_shard_size="300KB")
        (path / "model.safetensors").unlink(missing_ok=True)
        assert (path / "model.safetensors.index.json").is_file()
    model, report = _loaded(path, dtype)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    assert torch.equal(_logits(model), _logits(reference.eval()))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert report.unused == ()
    assert report.nbytes == sum(p.numel() for p in model.parameters()) * 4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures_load_as_from_pretrained_loads_them(tmp_path, name):
    kind, values = ARCHITECTURES[name]
    torch.manual_seed(1)
    original = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values), dtype=torch.float32)
    original.save_pretrained(tmp_path)
    model, report = _loaded(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(_logits(model), _logits(reference))
    assert report.unused == ()
    buffers = dict(model.named_buffers())
    for buffer_name, buffer in reference.named_buffers():
        assert torch.equal(buffers[buffer_name], buffer), buffer_name


def test_an_empty_model_holds_no_parameter_memory_and_real_buffers(tmp_path):
    model = build_empty(make_tiny_model(tmp_path), "bf16", gradient_checkpointing=True)
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.training and model.model.layers[0].gradient_checkpointing and model.config.use_cache is False
    assert load_config(tmp_path).use_cache is True


def test_building_empty_models_leaves_torch_as_it_was(tmp_path):
    build_empty(make_tiny_model(tmp_path), "bf16")
    assert not torch.nn.Linear(2, 2).weight.is_meta
    assert torch.get_default_dtype() == torch.float32


def test_loading_keeps_every_parameter_in_its_place(tmp_path):
    path = make_tiny_model(tmp_path)
    model = build_empty(path, "bf16")
    allocate_parameters(model)
    places = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    seen: list[tuple[int, int]] = []
    load_weights(model, path, on_progress=lambda done, total: seen.append((done, total)))
    assert places == {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)


def test_a_strided_parameter_is_filled_too(tmp_path):
    path = make_tiny_model(tmp_path)
    model, _ = _loaded(path)
    weight = model.model.layers[1].mlp.up_proj.weight
    expected = weight.detach().clone()
    weight.data = torch.zeros(weight.shape[::-1]).t()
    assert not weight.is_contiguous()
    load_weights(model, path)
    assert torch.equal(weight, expected)


_BEFORE = """
import torch
from overspill.interop.hf import allocate_parameters, build_empty, load_weights
from safetensors.torch import load_file
import transformers.conversion_mapping, transformers.core_model_loading
torch.set_num_threads(1)
models = []
for dtype in ("bf16", "fp32"):
    models.append(build_empty({path!r}, dtype))
    allocate_parameters(models[-1])
    with torch.no_grad():
        for parameter in models[-1].parameters():
            parameter.fill_(0)
"""


def test_building_and_loading_take_a_few_mebibytes_above_the_model(tmp_path):
    path = make_tiny_model(tmp_path, vocab_size=12_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2)
    file = path / "model.safetensors"
    assert 80e6 < file.stat().st_size < 130e6
    empty, same, converted, naive = measure_peak_nbytes(
        _BEFORE.format(path=str(path)),
        f"empty = build_empty({str(path)!r}, 'fp32')",
        f"load_weights(models[0], {str(path)!r})",
        f"load_weights(models[1], {str(path)!r})",
        f"models[0].load_state_dict(load_file({str(file)!r}))",
    )
    assert empty < 8 * 2**20
    assert same < 24 * 2**20 and converted < 32 * 2**20
    assert naive > 70 * 2**20  # the measurement does see a second copy


def test_random_weights_are_those_of_the_models_own_initialisation(tmp_path):
    config = load_config(make_tiny_model(tmp_path, tie_word_embeddings=True))
    model = build_empty(config, "fp32")
    allocate_parameters(model)
    global_state = torch.get_rng_state()
    initialise_weights(model, 7)
    assert torch.equal(torch.get_rng_state(), global_state)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module in reference.modules():
        module._is_hf_initialized = False
    torch.manual_seed(7)
    reference.initialize_weights()
    for (name, ours), (other, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert name == other and torch.equal(ours, theirs), name
    before = model.model.embed_tokens.weight.detach().clone()
    initialise_weights(model, 8)
    assert not torch.equal(before, model.model.embed_tokens.weight)
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(config.initializer_range, rel=0.05)


# What is wrong with a model directory, and what the user is told


def _refused(path: Path | str, *, dtype: str = "bf16") -> OverspillError:
    with pytest.raises(OverspillError) as caught:
        _loaded(path, dtype)
    return caught.value


@pytest.fixture
def tiny(tmp_path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def test_a_directory_without_config_is_refused(tiny):
    (tiny / "config.json").unlink()
    assert _refused(tiny).code == "OVS201"


def test_a_config_that_is_no_json_is_refused(tiny):
    (tiny / "config.json").write_text('{"model_type": ')
    assert _refused(tiny).code == "OVS201"


def test_an_unknown_architecture_is_refused(tiny):
    (tiny / "config.json").write_text('{"model_type": "no_such_architecture"}')
    assert _refused(tiny).code == "OVS201"


def test_a_model_with_code_of_its_own_is_not_run(tiny):
    config = json.loads((tiny / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}}
    (tiny / "config.json").write_text(json.dumps(config))
    (tiny / "own.py").write_text(f"open({str(tiny / 'ran')!r}, 'w')\n")
    error = _refused(tiny)
    assert error.code == "OVS201" and "trust_remote_code" in error.next_step
    assert not (tiny / "ran").exists()


def test_quantised_weights_are_refused(tiny):
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    error = _refused(tiny)
    assert error.code == "OVS206" and "gptq" in error.message


def test_a_hub_id_that_cannot_be_reached_says_what_to_do(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    error = _refused("nobody/no-such-model-for-overspill-tests")
    assert error.code == "OVS201" and "directory with config.json" in error.next_step


@pytest.mark.parametrize("path", ["/no/such/dir", "./no-such-dir", "a/b/c", ""])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(path):
    assert "There is no model directory" in _refused(path).message


def test_missing_weights_are_named(tiny):
    (tiny / "model.safetensors").unlink()
    error = _refused(tiny)
    assert error.code == "OVS202" and "model.safetensors" in error.message


def test_pickled_weights_are_not_read_and_the_way_out_is_named(tiny):
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    error = _refused(tiny)
    assert error.code == "OVS202" and "pickle" in error.message and "save_pretrained" in error.next_step


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 3000, -1])
def test_truncated_weights_are_refused_by_file(tiny, keep):
    file = tiny / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    error = _refused(tiny)
    assert error.code == "OVS202" and "model.safetensors is damaged" in error.message
    if keep == -1:
        assert "model.norm.weight" in error.message


def test_a_file_that_shrinks_while_it_is_read_is_refused(tiny):
    from overspill.interop.safetensors_file import read_entries, read_pieces

    entry = read_entries(tiny / "model.safetensors")["model.norm.weight"]
    with (tiny / "model.safetensors").open("r+b") as file:
        file.truncate(entry.begin + 3)
    with pytest.raises(OverspillError, match=r"truncated.*model\.norm\.weight"):
        list(read_pieces(entry, [(0, memoryview(bytearray(entry.nbytes)))]))


def _rewrite(tiny: Path, change) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny / "model.safetensors")
    change(tensors)
    save_file(tensors, tiny / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_tensor_is_named(tiny):
    _rewrite(tiny, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    error = _refused(tiny)
    assert error.code == "OVS202" and "'model.layers.2.mlp.up_proj.weight'" in error.message
    assert error.field is not None and error.field.endswith("model.safetensors")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tiny):
    _rewrite(tiny, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    error = _refused(tiny)
    assert error.code == "OVS202" and "'model.norm.weight'" in error.message
    assert (error.value, error.limit) == ([63], [64])


def test_integer_weights_are_refused_instead_of_converted(tiny):
    _rewrite(tiny, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    assert _refused(tiny).code == "OVS206"


def test_a_tensor_for_which_the_model_has_no_place_is_reported(tiny):
    _rewrite(tiny, lambda tensors: tensors.update({"model.extra.weight": torch.ones(3)}))
    assert _loaded(tiny)[1].unused == ("model.extra.weight",)


def test_tied_weights_stored_twice_load_when_equal_and_are_refused_when_not(tmp_path):
    tied = make_tiny_model(tmp_path, tie_word_embeddings=True)
    _rewrite(tied, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert _loaded(tied)[1].unused == ()
    _rewrite(tied, lambda tensors: tensors["lm_head.weight"].add_(1))
    error = _refused(tied)
    assert error.code == "OVS202" and "tie_word_embeddings" in error.next_step


def test_a_shard_that_is_missing_or_lacks_a_tensor_is_named(tmp_path):
    path = make_tiny_model(tmp_path / "a")
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(path, max_shard_size="200KB")
    (path / "model.safetensors").unlink(missing_ok=True)
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) >= 3
    shutil.copyfile(shards[0], shards[1])
    error = _refused(path)
    assert error.code == "OVS202" and shards[1].name in error.message and "index" in error.message
    shards[1].unlink()
    assert f"{shards[1].name!r} is missing" in _refused(path).message


def test_an_index_may_not_name_files_elsewhere(tiny):
    outside = tiny.parent / "outside.safetensors"
    (tiny / "model.safetensors").rename(outside)
    (tiny / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "../outside.safetensors"}})
    )
    error = _refused(tiny)
    assert error.code == "OVS202" and "missing" in error.message


def test_a_model_without_memory_is_not_filled(tiny):
    with pytest.raises(OverspillError) as caught:
        load_weights(build_empty(tiny), tiny)
    assert caught.value.code == "OVS504"


def test_the_tokenizer_of_a_directory_is_loaded_or_missed_by_name(tiny):
    assert load_tokenizer(tiny).decode(load_tokenizer(tiny)("Hail, king!").input_ids) == "Hail, king!"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tiny / name).unlink()
    with pytest.raises(OverspillError) as caught:
        load_tokenizer(tiny)
    assert caught.value.code == "OVS203"


def test_a_damaged_tokenizer_is_refused(tiny):
    (tiny / "tokenizer.json").write_text("{")
    with pytest.raises(OverspillError) as caught:
        load_tokenizer(tiny)
    assert caught.value.code == "OVS203"


def test_the_position_limit_is_read_from_the_config():
    assert max_positions(load_config(TINY_ASSETS)) == 256


def test_a_model_spread_by_accelerate_is_refused_with_the_right_recipe(tiny):
    from accelerate import cpu_offload

    plain = AutoModelForCausalLM.from_pretrained(tiny, device_map={"": "cpu"})
    refuse_unsupported(plain)
    hooked = cpu_offload(AutoModelForCausalLM.from_pretrained(tiny), execution_device="cpu")
    with pytest.raises(OverspillError, match=r"AlignDevicesHook.*device_map") as caught:
        attach(hooked, optimizer=OptimizerConfig(), plan=Plan(memory_nbytes=64 * MiB))
    assert caught.value.code == "OVS504"
    plain.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(OverspillError, match="'cpu', 'disk'"):
        refuse_unsupported(plain)
