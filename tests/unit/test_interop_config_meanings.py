"""What keys of other frameworks mean for memory: one small file for each rule, and files that must be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from overspill.errors import OverspillError
from overspill.interop.configs import ConfigReading, find_format, read_config
from overspill.interop.configs.core import key_paths
from overspill.interop.configs.files import parse_arguments
from overspill.interop.configs.patterns import module_ends
from overspill.job import Job

GIVEN = {"model": "m/m", "seq-len": 512, "micro-batch": 2}


def read(tmp_path: Path, data: dict[str, Any], flags: dict[str, Any] | None = None, **more: Any) -> ConfigReading:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(data))
    return read_config(file, flags or {}, **more)


def job_of(reading: ConfigReading) -> Job:
    assert reading.job is not None, reading.notes
    return reading.job


# DeepSpeed ---------------------------------------------------------------------------------------------------------


def test_auto_is_resolved_from_the_flags_and_else_assumed(tmp_path: Path) -> None:
    data = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
    }
    given = read(tmp_path, data, {"model": "m", "seq-len": 64, "micro-batch": 3, "autocast": "bf16", "gpus": 4})
    job = job_of(given)
    assert (job.train.micro_batch, job.model.dtype, job.model.autocast) == (3, "bf16", None)
    assert job.optimizer.master_dtype == "fp32"
    assert job.parallel.auto_buckets
    assert job.parallel.reduce_bucket_numel is None
    bare = read(tmp_path, data, {"model": "m", "seq-len": 64})
    assert bare.assumed["train.micro_batch"].value == 8
    assert bare.assumed["model.dtype"].value == "fp32"
    assert "TrainingArguments" in bare.assumed["model.dtype"].why


def test_auto_in_a_deepspeed_file_is_resolved_from_the_arguments_that_name_it(tmp_path: Path) -> None:
    deepspeed = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
    }
    (tmp_path / "ds.json").write_text(json.dumps(deepspeed))
    arguments = {"per_device_train_batch_size": 5, "bf16": True, "deepspeed": "somewhere/ds.json", "max_grad_norm": 0.5}
    reading = read(tmp_path, arguments, {"model": "m", "seq-len": 64, "gpus": 2})
    job = job_of(reading)
    assert (job.train.micro_batch, job.parallel.data, job.offload.optimizer) == (5, "zero3", "disk")
    assert (job.model.dtype, job.model.autocast, job.optimizer.max_grad_norm) == ("bf16", None, 0.5)
    assert reading.used["ds.json:zero_optimization.stage"] == "parallel.data"


def test_a_named_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    arguments = {"per_device_train_batch_size": 5, "deepspeed": "ds_z3.json"}
    reading = read(tmp_path, arguments, {"model": "m", "seq-len": 64})
    assert reading.job is None
    assert reading.missing == ("parallel.data",)
    assert any("ds_z3.json is not beside this file" in note for note in reading.notes)
    assert job_of(read(tmp_path, arguments, {"model": "m", "seq-len": 64, "parallel.data": "zero3"}))


def test_sizes_that_deepspeed_takes_by_itself_are_assumed_with_their_numbers(tmp_path: Path) -> None:
    reading = read(tmp_path, {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}, GIVEN)
    assert reading.assumed["parallel.reduce_bucket_numel"].value == 500_000_000
    assert reading.assumed["parallel.allgather_bucket_numel"].value == 500_000_000
    assert reading.assumed["parallel.overlap_comm"].value is False
    assert job_of(reading).framework.name == "deepspeed"


def test_a_global_batch_gives_the_micro_batch_of_each_rank(tmp_path: Path) -> None:
    data = {"zero_optimization": {"stage": 1}, "train_batch_size": 64, "gradient_accumulation_steps": 4}
    assert job_of(read(tmp_path, data, {"model": "m", "seq-len": 64, "gpus": 8})).train.micro_batch == 2
    lacking = read(tmp_path, data, {"model": "m", "seq-len": 64})
    assert lacking.missing == ("train.micro_batch",)


# Hugging Face, TRL -------------------------------------------------------------------------------------------------


def test_all_arguments_that_the_trainer_writes_are_understood(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=3, activation_checkpointing=True, use_cpu=False
    )
    file = tmp_path / "training_args.json"
    file.write_text(arguments.to_json_string())
    reading = read_config(file, {"model": "m", "seq-len": 64})
    assert reading.format == "hf"
    assert reading.unknown == ()
    assert len(key_paths(json.loads(file.read_text()))) > 90
    job = job_of(reading)
    assert (job.train.micro_batch, job.model.gradient_checkpointing) == (3, True)
    assert (job.framework.name, job.optimizer.max_grad_norm) == ("hf_trainer", 1.0)


def test_a_command_line_is_read_from_the_script_on(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(
        "torchrun --nproc_per_node 4 train.py --model_name_or_path a/b --bf16 \\\n"
        "  --per_device_train_batch_size=2 --optim paged_adamw_8bit --max_seq_length 1024 # a word\n"
    )
    reading = read_config(file)
    job = job_of(reading)
    assert (reading.format, job.model.path, job.train.micro_batch, job.data.seq_len) == ("trl", "a/b", 2, 1024)
    assert (job.optimizer.name, job.optimizer.paged, job.model.autocast) == ("adamw_8bit", True, "bf16")
    assert "nproc_per_node" not in [*reading.used, *reading.ignored, *reading.unknown]


def test_words_of_a_command_line_become_values() -> None:
    assert parse_arguments(["x", "--a-b", "1", "--c", "--d", "p", "q", "--e=none", "--f", "True"]) == {
        "a_b": 1, "c": True, "d": ["p", "q"], "e": None, "f": True,
    }  # fmt: skip


def test_trl_turns_checkpointing_on_where_the_trainer_does_not(tmp_path: Path) -> None:
    trl = read(tmp_path, {"model_name_or_path": "a/b", "max_length": 64, "per_device_train_batch_size": 1})
    assert job_of(trl).model.gradient_checkpointing
    assert "model.gradient_checkpointing" in trl.assumed
    hf = read(tmp_path, {"per_device_train_batch_size": 1}, {"model": "a/b", "seq-len": 64})
    assert not job_of(hf).model.gradient_checkpointing


def test_a_beta_alone_is_a_guess_that_is_said(tmp_path: Path) -> None:
    data = {"model_name_or_path": "a/b", "beta": 0.1, "max_length": 64}
    guess = read(tmp_path, data)
    assert job_of(guess).task.kind == "dpo"
    assert any("give --task" in note for note in guess.notes)
    assert job_of(read(tmp_path, data, {"task": "orpo"})).task.kind == "orpo"


def test_four_bits_without_adapters_are_questioned(tmp_path: Path) -> None:
    reading = read(tmp_path, {"model_name_or_path": "a/b", "load_in_4bit": True, "max_length": 64})
    assert any("cannot be trained in full" in note for note in reading.notes)
    assert job_of(reading).method.base == "nf4"


def test_an_optimizer_of_unknown_state_must_be_given(tmp_path: Path) -> None:
    data = {"per_device_train_batch_size": 1, "optim": "ademamix"}
    reading = read(tmp_path, data, {"model": "m", "seq-len": 64})
    assert reading.job is None
    assert reading.missing == ("optimizer.name",)
    assert job_of(read(tmp_path, data, {"model": "m", "seq-len": 64, "optimizer": "adamw"}))


def test_liger_by_parts_keeps_what_was_switched_off(tmp_path: Path) -> None:
    data = {
        "per_device_train_batch_size": 1,
        "use_liger_kernel": True,
        "liger_kernel_config": {"fused_linear_cross_entropy": False, "cross_entropy": True},
    }
    kernels = job_of(read(tmp_path, data, {"model": "m", "seq-len": 64})).kernels
    assert (kernels.loss, kernels.fused_norm, kernels.fused_mlp) == ("fused", True, True)


# Accelerate, FSDP --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, ("fsdp1", True)),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, ("fsdp1", False)),
        ({"fsdp_sharding_strategy": 2}, ("fsdp1", False)),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, ("ddp", True)),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, ("fsdp2", False)),
        ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, ("fsdp1", False)),
    ],
)
def test_fsdp_strategies_say_what_is_gathered_when(tmp_path: Path, table: dict[str, Any], wanted: Any) -> None:
    data = {"distributed_type": "FSDP", "num_processes": 4, "mixed_precision": "bf16", "fsdp_config": table}
    parallel = job_of(read(tmp_path, data, GIVEN)).parallel
    assert (parallel.data, parallel.reshard_after_forward) == wanted


def test_hybrid_sharding_needs_the_number_of_groups(tmp_path: Path) -> None:
    data = {
        "distributed_type": "FSDP",
        "num_processes": 16,
        "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"},
    }
    assert read(tmp_path, data, GIVEN).missing == ("parallel.replicas",)
    assert job_of(read(tmp_path, data, GIVEN | {"parallel.replicas": 2})).parallel.replicas == 2


def test_accelerate_goes_beside_a_script(tmp_path: Path) -> None:
    beside = tmp_path / "accelerate.yaml"
    beside.write_text(yaml.safe_dump({"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "bf16"}))
    data = {"model_name_or_path": "a/b", "max_length": 64, "torch_dtype": "bfloat16"}
    reading = read(tmp_path, data, beside=[beside])
    job = job_of(reading)
    assert (job.parallel.gpus, job.parallel.data, job.framework.name) == (4, "ddp", "trl")
    assert reading.used["accelerate.yaml:num_processes"] == "parallel.gpus"


def test_under_deepspeed_the_engine_casts_whoever_asked_for_mixed_precision(tmp_path: Path) -> None:
    beside = tmp_path / "zero3.yaml"
    table = {"distributed_type": "DEEPSPEED", "num_processes": 8, "mixed_precision": "bf16"}
    beside.write_text(yaml.safe_dump(table | {"deepspeed_config": {"zero_stage": 3}}))
    script = {"model_name_or_path": "a/b", "max_length": 64, "torch_dtype": "float32", "bf16": True}
    for job in (
        job_of(read(tmp_path, script, beside=[beside])),
        job_of(read(tmp_path, script, {"parallel.data": "zero3", "gpus": 8})),
        job_of(read_config(beside, GIVEN)),
    ):
        assert (job.parallel.data, job.parallel.gpus) == ("zero3", 8)
        assert (job.model.dtype, job.model.autocast, job.optimizer.master_dtype) == ("bf16", None, "fp32")


# axolotl, LLaMA-Factory, torchtune ---------------------------------------------------------------------------------


def test_axolotl_loses_its_logits_only_with_the_plugin(tmp_path: Path) -> None:
    base = {"base_model": "a/b", "sequence_len": 64, "liger_fused_linear_cross_entropy": True}
    assert job_of(read(tmp_path, base)).kernels.loss == "auto"
    liger = base | {"plugins": ["axolotl.integrations.liger.LigerPlugin"]}
    assert job_of(read(tmp_path, liger)).kernels.loss == "fused_linear"


def test_axolotl_counts_the_gpus_that_its_mesh_needs(tmp_path: Path) -> None:
    data = {"base_model": "a/b", "dp_shard_size": 4, "tensor_parallel_size": 2, "context_parallel_size": 2}
    job = job_of(read(tmp_path, data))
    assert (job.parallel.gpus, job.parallel.tensor, job.parallel.context) == (16, 2, 2)


def test_llamafactory_keeps_trained_weights_in_fp32_unless_told(tmp_path: Path) -> None:
    base = {"model_name_or_path": "a/b", "stage": "sft", "do_train": True, "finetuning_type": "full", "bf16": True}
    full = read(tmp_path, base)
    assert (job_of(full).model.dtype, job_of(full).model.autocast) == ("fp32", "bf16")
    assert job_of(full).model.gradient_checkpointing
    assert job_of(full).kernels.reentrant
    pure = base | {"pure_bf16": True}
    del pure["bf16"]
    assert job_of(read(tmp_path, pure)).model.dtype == "bf16"
    lora = job_of(read(tmp_path, base | {"finetuning_type": "lora", "disable_gradient_checkpointing": True}))
    assert (lora.model.dtype, lora.method.adapter_dtype, lora.method.targets) == ("bf16", "fp32", ("all-linear",))
    assert not lora.model.gradient_checkpointing


@pytest.mark.parametrize("name", ["a/Llama-AWQ", "b/x-GPTQ-Int4", "ISTA/M-AQLM-2Bit-1x16", "u/m-bnb-4bit"])
def test_a_name_that_says_how_weights_are_stored_is_believed_and_said(tmp_path: Path, name: str) -> None:
    reading = read(tmp_path, {"model_name_or_path": name, "stage": "sft", "do_train": True, "bf16": True})
    assert reading.assumed["method.base"].value in ("awq4", "gptq4", "aqlm2", "nf4")
    assert name in reading.assumed["method.base"].why


@pytest.mark.parametrize(
    "more", [{"export_dir": "out"}, {"infer_backend": "vllm"}, {"do_predict": True, "do_train": False}]
)
def test_a_llamafactory_file_that_exports_serves_or_predicts_trains_nothing(tmp_path: Path, more: Any) -> None:
    reading = read(tmp_path, {"model_name_or_path": "a/b", "template": "x"} | more)
    assert reading.job is None
    assert not reading.trains
    assert reading.missing == ()
    assert reading.unknown == ()


def test_torchtune_names_targets_as_hugging_face_does(tmp_path: Path) -> None:
    data = {
        "model": {
            "_component_": "torchtune.models.llama3_1.qlora_llama3_1_8b",
            "lora_attn_modules": ["q_proj", "output_proj"],
            "apply_lora_to_mlp": True,
            "apply_lora_to_output": True,
        },
        "tokenizer": {"_component_": "t", "max_seq_len": 256},
        "dataset": {"_component_": "d", "packed": True},
        "optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit", "lr": "2e-5"},
        "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
        "batch_size": 2,
        "optimizer_in_bwd": True,
        "dtype": "bf16",
    }
    job = job_of(read(tmp_path, data))
    assert job.model.path == "meta-llama/Meta-Llama-3.1-8B"
    assert job.method.targets == ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    assert (job.method.base, job.method.double_quant) == ("nf4", True)
    assert (job.optimizer.name, job.optimizer.paged, job.optimizer.in_backward) == ("adamw_8bit", True, True)
    assert (job.kernels.loss, job.data.seq_len, job.optimizer.max_grad_norm) == ("plain", 256, None)


def test_a_pattern_of_modules_is_spelled_out() -> None:
    assert module_ends(r"model.layers.[\d]+.(mlp|self_attn).(up|down|q)_proj") == ("up_proj", "down_proj", "q_proj")
    assert module_ends(r".*\.(q_proj|v_proj)$") == ("q_proj", "v_proj")
    assert module_ends("q_proj") == ("q_proj",)
    with pytest.raises(OverspillError, match="OVS109"):
        module_ends(r"layers\.\d+\.[a-z]+")


# Flags and refusals ------------------------------------------------------------------------------------------------


def test_flags_come_last_and_are_no_longer_assumed(tmp_path: Path) -> None:
    data = {"base_model": "a/b", "micro_batch_size": 4}
    reading = read(tmp_path, data, {"micro-batch": 1, "seq_len": 4096, "method": "qlora", "method.rank": 4})
    job = job_of(reading)
    assert (job.train.micro_batch, job.data.seq_len, job.method.kind, job.method.base) == (1, 4096, "lora", "nf4")
    assert "data.seq_len" not in reading.assumed


def test_a_flag_that_no_job_has_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(OverspillError, match="Did you mean model") as error:
        read(tmp_path, {"base_model": "a/b"}, {"modle": "x"})
    assert error.value.code == "OVS101"


def test_a_contradictory_layout_is_refused_by_the_job(tmp_path: Path) -> None:
    data = {"base_model": "a/b", "tensor_parallel_size": 8}
    with pytest.raises(OverspillError, match="no multiple of tensor"):
        read(tmp_path, data, {"gpus": 4})


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("base_model: [", "cannot be parsed"),
        ("- a\n- b\n", "no table"),
        ("5: 6\n", "no table with names"),
        ("", "no table"),
        ("a: &x [*x]\n", "own part"),
        ("colour: red\n", "belongs to a format"),
        ("base_model: a\nmicro_batch_size: many\n", "A number is expected"),
        ("base_model: a\nmicro_batch_size: 1.5\n", "A whole number"),
        ("base_model: a\nmicro_batch_size: 0\n", "greater than or equal to 1"),
        ("base_model: a\nsample_packing: perhaps\n", "true or false"),
        ("base_model: 5\n", "A text is expected"),
        ("zero_optimization: 3\n", "A table is expected"),
        ("zero_optimization: {stage: 7}\n", "stages 0 to 3"),
        ("base_model: a\nlora_target_modules: {a: 1}\nadapter: lora\nlora_r: 8\n", "A list of texts"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(OverspillError, match=word) as error:
        read_config(file)
    assert error.value.code in ("OVS101", "OVS109")


def test_a_small_file_that_stands_for_a_huge_one_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    file = tmp_path / "bomb.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(OverspillError, match="too many values"):
        read_config(file)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_a_file_that_cannot_be_read_is_ovs109(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "file.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OverspillError) as error:
        read_config(file)
    assert error.value.code == "OVS109"


def test_a_format_can_be_said(tmp_path: Path) -> None:
    assert find_format({"base_model": "a"}) == "axolotl"
    with pytest.raises(OverspillError, match="not known"):
        read(tmp_path, {"base_model": "a"}, format="yaml")
    assert read(tmp_path, {"per_device_train_batch_size": 1, "model_name_or_path": "a"}, format="hf").format == "hf"
