"""Accelerate's YAML (`accelerate config`): how many processes, which kind of data parallelism, which precision.

It names no model, no batch and no length; those are the script's, so they are flags. Source: accelerate's
ClusterConfig and launcher (1.15).
"""

from __future__ import annotations

from typing import Final

from overspill.interop.configs import deepspeed, fsdp
from overspill.interop.configs.core import Draft
from overspill.interop.configs.files import companion
from overspill.interop.configs.reasons import EMPTY, LAUNCH, LOADING, OFF, OVERRULED, SAVING, SPEED, group

__all__ = ["MARKS", "read", "read_inside"]

MARKS: Final = ("distributed_type", "compute_environment", "num_machines", "mixed_precision")

_IGNORED: Final[dict[str, str]] = {
    **group(
        LAUNCH,
        "compute_environment debug gpu_ids machine_rank main_training_function main_process_ip main_process_port "
        "rdzv_backend rdzv_conf same_network tpu_env tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_vm "
        "downcast_bf16 enable_cpu_affinity mpirun_config command_file commands num_machines quiet max_restarts "
        "monitor_interval num_cpu_threads_per_process ipex_config mlu xpu role env module no_python "
        "enable_numa_affinity ec2_instance_type iam_role_name image_uri profile region base_job_name "
        "pytorch_version transformers_version py_version sagemaker_inputs_file sagemaker_metrics_file additional_args",
    ),
}

_KINDS: Final = {
    "MULTI_GPU": "ddp", "MULTI_XPU": "ddp", "MULTI_NPU": "ddp", "MULTI_MLU": "ddp", "MULTI_HPU": "ddp",
    "MULTI_MUSA": "ddp", "MULTI_SDAA": "ddp", "MULTI_NEURON": "ddp", "NO": "none",
}  # fmt: skip


def read(draft: Draft) -> None:
    """An Accelerate file alone."""
    draft.need("model.path", "an Accelerate file names no model")
    draft.need("data.seq_len", "an Accelerate file says nothing about the length of sequences")
    draft.need("train.micro_batch", "an Accelerate file says nothing about the batch")
    draft.assume("framework.name", "accelerate", "the script may use the Trainer or TRL; give --framework")
    read_inside(draft)
    draft.assume("optimizer.name", "adamw", "the script chooses; give --optimizer.name")
    draft.assume("train.accumulation", 1, "gradient_accumulation_steps is not in the file")
    draft.assume("model.gradient_checkpointing", False, "the script chooses; give --model.gradient_checkpointing")
    draft.assume("model.dtype", "fp32", "mixed precision computes under autocast beside fp32 weights")


def read_inside(draft: Draft) -> None:
    """The keys of an Accelerate file, alone or beside a script's configuration."""
    kind = str(draft.peek("distributed_type") or "NO").upper()
    draft.take("num_processes", "parallel.gpus", draft.integer)
    if kind == "NO":
        draft.assume("parallel.gpus", 1, "distributed_type is NO")
    _read_precision(draft)
    if kind in _KINDS:
        draft.set("parallel.data", _KINDS[kind])
        draft.use("distributed_type", "parallel.data")
    elif kind == "FSDP" or kind == "DEEPSPEED":
        draft.use("distributed_type", "parallel.data")
    elif kind == "MEGATRON_LM":
        draft.set("parallel.data", "distributed_optimizer")
        draft.set("framework.name", "megatron")
        draft.use("distributed_type", "parallel.data", "framework.name")
    if kind == "FSDP":
        fsdp.read_table(draft, "fsdp_config", default_version=1)
    if kind == "DEEPSPEED":
        _read_deepspeed(draft)
    if kind == "MEGATRON_LM":
        _read_megatron(draft)
    draft.ignore_all(group(OFF, "fsdp_config deepspeed_config megatron_lm_config"))
    fsdp.read_parallelism(draft, "parallelism_config")
    backend = draft.table("dynamo_config")
    if backend:
        on = str(backend.get("dynamo_backend", "no")).lower() not in ("no", "none", "")
        draft.set("kernels.compile", on)
        draft.use("dynamo_config.dynamo_backend", "kernels.compile")
        for key in backend:
            draft.ignore(f"dynamo_config.{key}", SPEED)
    if draft.boolean("use_cpu"):
        draft.not_modelled("use_cpu", "training on the processor; the forecast is for an accelerator")
    draft.ignore("use_cpu", OFF)
    draft.take("gradient_accumulation_steps", "train.accumulation", draft.integer)
    draft.ignore_all(_IGNORED)


def _read_precision(draft: Draft) -> None:
    value = str(draft.peek("mixed_precision") if draft.peek("mixed_precision") is not None else "no").lower()
    if value in ("bf16", "fp16", "fp8"):
        draft.set("model.autocast", value)
        draft.use("mixed_precision", "model.autocast")
    elif value in ("no", "false"):
        draft.ignore("mixed_precision", OFF)
    for key in draft.table("fp8_config"):
        draft.ignore(f"fp8_config.{key}", SPEED)


def _read_deepspeed(draft: Draft) -> None:
    """deepspeed_config: a file, or a few of DeepSpeed's keys under Accelerate's own names."""
    at = "deepspeed_config"
    draft.table(at)
    stage = f"{at}.zero_stage"
    full = f"{at}.deepspeed_config_file"
    if draft.has(full) or draft.findings.flags.get("deepspeed"):
        path = str(draft.findings.flags.get("deepspeed") or draft.text(full))
        draft.use(full, "parallel.data")
        if not companion(draft, path, deepspeed.read_inside):
            draft.need("parallel.data", f"{path} is not beside this file; give --deepspeed PATH, or the ZeRO stage")
    elif draft.has(stage):
        draft.take(stage, "parallel.data", lambda key: f"zero{draft.integer(key)}" if draft.integer(key) else "ddp")
    else:
        draft.assume("parallel.data", "zero2", "Accelerate: zero_stage")
    tiers = {"cpu": "host", "nvme": "disk", "none": "device"}
    for key, field_name in (
        ("offload_optimizer_device", "offload.optimizer"),
        ("offload_param_device", "offload.weights"),
    ):
        draft.take(f"{at}.{key}", field_name, lambda one: tiers.get(draft.text(one).lower(), draft.text(one)))
    draft.take(f"{at}.zero3_init_flag", "parallel.zero_init", draft.boolean)
    draft.take(f"{at}.gradient_accumulation_steps", "train.accumulation", draft.integer, skip=("auto",), reason=OFF)
    draft.take(f"{at}.gradient_clipping", "optimizer.max_grad_norm", draft.number, skip=("auto",), reason=OFF)
    for key, reason in {
        **group(LAUNCH, "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter "
                "deepspeed_inclusion_filter"),
        **group(SAVING, "zero3_save_16bit_model"),
        **group(LOADING, "offload_optimizer_nvme_path offload_param_nvme_path"),
        **group(OVERRULED, "deepspeed_moe_layer_cls_names"),
    }.items():  # fmt: skip
        draft.ignore(f"{at}.{key}", reason)
    draft.ignore_all({full: EMPTY, stage: EMPTY})
    if not draft.has(full) and draft.known("parallel.data") in ("zero1", "zero2", "zero3"):
        _assume_buckets(draft)


def _assume_buckets(draft: Draft) -> None:
    """Accelerate's own DeepSpeed plugin writes "auto" for stage 3's sizes, and leaves DeepSpeed's for the others."""
    if draft.known("parallel.data") == "zero3":
        draft.assume("parallel.auto_buckets", True, 'Accelerate writes "auto" for stage 3\'s buckets')
    else:
        draft.assume("parallel.reduce_bucket_numel", 500_000_000, "DeepSpeed: reduce_bucket_size")
        draft.assume("parallel.allgather_bucket_numel", 500_000_000, "DeepSpeed: allgather_bucket_size")


def _read_megatron(draft: Draft) -> None:
    at = "megatron_lm_config"
    fields = {
        "tp_degree": "parallel.tensor",
        "pp_degree": "parallel.pipeline",
        "context_parallel_size": "parallel.context",
        "expert_model_parallel_size": "parallel.expert",
        "expert_tensor_parallel_size": "parallel.expert_tensor",
    }
    for key in draft.table(at):
        full, name = f"{at}.{key}", key.removeprefix("megatron_lm_")
        if name in fields:
            draft.take(full, fields[name], draft.integer)
        elif name == "sequence_parallelism":
            draft.take(full, "parallel.sequence_parallel", draft.boolean)
        elif name == "gradient_clipping":
            draft.take(full, "optimizer.max_grad_norm", draft.number)
        elif name == "recompute_activations":
            if draft.boolean(full):
                draft.set("kernels.checkpointing", "selective_op")
                draft.use(full, "kernels.checkpointing")
            draft.ignore(full, OFF)
        elif name == "recompute_granularity":
            if draft.peek(full) == "full":
                draft.set("kernels.checkpointing", "full")
            draft.use(full, "kernels.checkpointing")
        elif name == "optimizer_cpu_offload":
            if draft.boolean(full):
                draft.set("offload.optimizer", "host")
                draft.use(full, "offload.optimizer")
            draft.ignore(full, OFF)
        elif name == "use_distributed_optimizer":
            if not draft.boolean(full):
                draft.set("parallel.data", "ddp")
            draft.use(full, "parallel.data")
        elif name in ("num_micro_batches",):
            draft.take(full, "train.accumulation", draft.integer)
        elif name in ("attention_dropout", "hidden_dropout", "recompute_method", "recompute_num_layers"):
            draft.not_modelled(full, "Megatron's setting; the forecast takes the model's own")
        elif name in ("no_load_optim", "no_save_optim", "eod_mask_loss", "calculate_per_token_loss",
                      "attention_backend", "attention_softmax_in_fp32", "overlap_cpu_optimizer_d2h_h2d",
                      "use_rotary_position_embeddings", "use_custom_fsdp", "use_precision_aware_optimizer",
                      "decoder_last_pipeline_num_layers"):  # fmt: skip
            draft.ignore(full, SPEED)
