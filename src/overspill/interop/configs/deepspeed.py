"""DeepSpeed's JSON: ZeRO stage, offload, buckets, precision, batch sizes; and what "auto" stands for.

"auto" is filled in by transformers or Accelerate from TrainingArguments and the model's hidden size. Here it is
resolved from the file that names this one, or from the flags; what is left is the default of TrainingArguments, marked
as assumed. Names and defaults are DeepSpeed's (0.17): runtime/zero/config.py, runtime/config.py.
"""

from __future__ import annotations

from typing import Any, Final

from overspill.interop.configs.core import Draft, refuse
from overspill.interop.configs.optimizers import COMPONENTS, set_optimizer
from overspill.interop.configs.reasons import (
    FEW_BYTES,
    LAUNCH,
    LEARNING,
    LOADING,
    LOGGING,
    OFF,
    OVERRULED,
    SAVING,
    SPEED,
    group,
)

__all__ = ["MARKS", "read", "read_inside"]

MARKS: Final = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")

_IGNORED: Final[dict[str, str]] = {
    **group(
        LOGGING,
        "steps_per_print wall_clock_breakdown dump_state memory_breakdown flops_profiler tensorboard wandb comet "
        "csv_monitor monitor_config comms_logger comms_config timers",
    ),
    **group(LEARNING, "scheduler prescale_gradients gradient_predivide_factor disable_allgather dataloader_drop_last "
            "curriculum_learning data_efficiency use_data_before_expert_parallel_ progressive_layer_drop eigenvalue"),
    **group(SAVING, "checkpoint nebula load_universal_checkpoint"),
    **group(LAUNCH, "elasticity autotuning train_steps zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
            "gradient_accumulation_dtype seq_parallel_communication_data_type"),
    **group(SPEED, "aio graph_harvesting sparse_gradients"),
}  # fmt: skip

#: Inside zero_optimization.
_ZERO_IGNORED: Final[dict[str, str]] = {
    **group(
        SPEED,
        "allgather_partitions reduce_scatter round_robin_gradients use_multi_rank_bucket_allreduce "
        "stage3_max_reuse_distance max_reuse_distance stage3_module_granularity_threshold "
        "module_granularity_threshold leaf_module allgather_sequential stage3_use_all_reduce_for_fetch_params "
        "use_all_reduce_for_fetch_params log_trace_cache_warnings memory_efficient_linear "
        "mics_hierarchical_params_gather",
    ),
    **group(
        SAVING,
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save elastic_checkpoint",
    ),
    **group(
        LOADING, "load_from_fp32_weights pipeline_loading_checkpoint override_module_apply ignore_unused_parameters"
    ),
    **group(OVERRULED, "legacy_stage1 cpu_offload_params cpu_offload_use_pin_memory"),
}

#: Sizes in elements: key, its other name, field, DeepSpeed's default, what "auto" becomes, and from which stage on.
_SIZES: Final = (
    ("reduce_bucket_size", "", "parallel.reduce_bucket_numel", 500_000_000, "hidden_size²", 1),
    ("allgather_bucket_size", "", "parallel.allgather_bucket_numel", 500_000_000, "", 1),
    ("stage3_prefetch_bucket_size", "prefetch_bucket_size", "parallel.prefetch_bucket_numel", 50_000_000,
     "0.9 × hidden_size²", 3),
    ("stage3_param_persistence_threshold", "param_persistence_threshold", "parallel.persistence_numel", 100_000,
     "10 × hidden_size", 3),
    ("stage3_max_live_parameters", "max_live_parameters", "parallel.max_live_parameters", 1_000_000_000, "", 3),
    ("sub_group_size", "", "parallel.sub_group_numel", 1_000_000_000, "", 3),
)  # fmt: skip

_DTYPES: Final = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16", "float32": "fp32",
                  "bfloat16": "bf16", "float16": "fp16"}  # fmt: skip


def read(draft: Draft) -> None:
    """A DeepSpeed file alone: it names no model and no length of a sequence."""
    draft.need("model.path", "a DeepSpeed file names no model")
    draft.need("data.seq_len", "a DeepSpeed file says nothing about the length of sequences")
    if _holds_auto(draft.data):
        draft.assume("framework.name", "hf_trainer", '"auto" is filled in by transformers')
    else:
        draft.set("framework.name", "deepspeed")
    read_inside(draft)
    draft.assume("train.micro_batch", 8 if _holds_auto(draft.data) else 1, "no file says otherwise")
    draft.assume("parallel.gpus", 1, "the file names no number of processes; give --gpus")
    draft.assume("model.gradient_checkpointing", False, "a DeepSpeed file says nothing about it")


def _holds_auto(value: Any) -> bool:
    return value == "auto" or (isinstance(value, dict) and any(_holds_auto(one) for one in value.values()))


def read_inside(draft: Draft) -> None:
    """The keys of a DeepSpeed file, alone or named by another configuration."""
    stage = _read_zero(draft)
    _read_precision(draft)
    _read_optimizer(draft)
    _read_batches(draft)
    if draft.peek("gradient_clipping") == "auto":
        draft.assume("optimizer.max_grad_norm", 1.0, '"auto": max_grad_norm of TrainingArguments')
        draft.use("gradient_clipping", "optimizer.max_grad_norm")
    draft.take("gradient_clipping", "optimizer.max_grad_norm", draft.number)
    if draft.word("communication_data_type") in _DTYPES:
        draft.take("communication_data_type", "parallel.reduce_dtype", lambda key: _DTYPES[draft.text(key)])
    _read_compile(draft)
    _read_others(draft)
    draft.ignore_all(_IGNORED)
    if stage == 3 and draft.known("framework.name") not in ("deepspeed", None):
        draft.assume("parallel.zero_init", True, "transformers builds the model under zero.Init at stage 3")


def _read_zero(draft: Draft) -> int:
    table = draft.table("zero_optimization")
    at = "zero_optimization."
    stage = draft.integer(at + "stage") if draft.has(at + "stage") else 0
    if not 0 <= stage <= 3:
        refuse("ZeRO has the stages 0 to 3.", draft.source, key=draft.prefix + at + "stage", value=stage)
    draft.set("parallel.data", f"zero{stage}" if stage else "ddp")
    draft.use(at + "stage", "parallel.data")
    for key, other, field_name, default, auto, first in _SIZES:
        name = at + (other if other and other in table else key)
        if draft.peek(name) == "auto":
            draft.set("parallel.auto_buckets", True)
            draft.use(name, "parallel.auto_buckets")
            draft.note(f'{draft.prefix}{name} = "auto" is {auto or "the default"} elements')
        elif draft.has(name) and stage >= first:
            draft.take(name, field_name, draft.integer)
        elif stage >= first and (key != "allgather_bucket_size" or stage < 3):
            draft.assume(field_name, default, f"DeepSpeed: {key}")
        for one in (key, other):
            draft.ignore(at + one, OFF)
    draft.take(at + "overlap_comm", "parallel.overlap_comm", draft.boolean, skip=("auto",), reason=OFF)
    if stage >= 1:
        draft.assume("parallel.overlap_comm", stage == 3, "DeepSpeed: overlap_comm is on at stage 3 only")
    _read_offload(draft, at + "offload_optimizer", "offload.optimizer")
    _read_offload(draft, at + "offload_param", "offload.weights")
    if draft.has(at + "cpu_offload") and draft.boolean(at + "cpu_offload"):
        draft.set("offload.optimizer", "host")
        draft.use(at + "cpu_offload", "offload.optimizer")
    draft.ignore(at + "cpu_offload", OFF)
    if draft.has(at + "contiguous_gradients"):
        if draft.boolean(at + "contiguous_gradients"):
            draft.ignore(at + "contiguous_gradients", SPEED)
        else:
            draft.not_modelled(at + "contiguous_gradients", "the forecast counts the buffer that gradients move to")
    draft.ignore(at + "contiguous_gradients", SPEED)
    _read_groups(draft, at)
    draft.ignore_all(_ZERO_IGNORED, under="zero_optimization")
    return stage


def _read_offload(draft: Draft, at: str, field_name: str) -> None:
    tiers = {"cpu": "host", "nvme": "disk", "none": "device"}
    for key in draft.table(at):
        name = f"{at}.{key}"
        if key == "device":
            draft.take(name, field_name, lambda one: tiers.get(draft.text(one).lower(), draft.text(one)))
        elif key == "pin_memory":
            draft.take(name, "offload.pinned", draft.boolean)
        elif key == "ratio":
            draft.take(name, "offload.optimizer_fraction", draft.number)
        elif key in ("nvme_path", "pipeline", "pipeline_read", "pipeline_write", "fast_init", "cpuadam_cores_perc"):
            draft.ignore(name, SPEED)
        elif key in ("buffer_count", "buffer_size", "max_in_cpu"):
            if draft.known(field_name) == "disk":
                draft.not_modelled(name, "buffers in host memory have DeepSpeed's default sizes in the forecast")
            draft.ignore(name, OFF)
        elif key == "super_offload":
            draft.ignore(name, SPEED)


def _read_groups(draft: Draft, at: str) -> None:
    """ZeRO++, MiCS and ZenFlow."""
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        name = at + key
        size = draft.integer(name) if draft.has(name) else 1
        if size > 1 and key == "mics_shard_size" and (draft.known("parallel.gpus") or 0) >= size:
            draft.set("parallel.replicas", int(draft.known("parallel.gpus")) // size)
            draft.use(name, "parallel.replicas")
        elif size > 1:
            draft.not_modelled(name, "weights are sharded over a part of the ranks; give --parallel.replicas")
        draft.ignore(name, OFF)
    for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
        if draft.has(at + key) and draft.boolean(at + key):
            draft.not_modelled(at + key, "buffers of quantised communication")
        draft.ignore(at + key, OFF)
    if draft.has(at + "zenflow"):
        draft.not_modelled(at + "zenflow", "a part of the gradients is updated on the GPU")
    draft.ignore(at + "zenflow", OFF)


def _read_precision(draft: Draft) -> None:
    """bf16 or fp16 on: the engine casts the model and keeps an fp32 master; autocast is off."""
    around = draft.known("model.autocast")
    if around is None and draft.known("model.dtype") in ("bf16", "fp16"):
        around = draft.known("model.dtype")
    chosen = ""
    for name in ("bf16", "fp16", "bfloat16"):
        dtype = "fp16" if name == "fp16" else "bf16"
        for key in draft.table(name):
            full = f"{name}.{key}"
            value = draft.peek(full)
            if key == "enabled":
                if (value == "auto" and around == dtype) or (value != "auto" and draft.boolean(full)):
                    chosen = dtype
                if chosen == dtype or (value == "auto" and around is None):
                    draft.use(full, "model.dtype", "optimizer.master_dtype")
                draft.ignore(full, OFF)
            elif key in ("bf16_master_weights_and_grads", "fp16_master_weights_and_grads") and draft.boolean(full):
                draft.set("optimizer.master_dtype", "none")
                draft.use(full, "optimizer.master_dtype")
            elif key == "bf16_optimizer_states" and draft.boolean(full):
                draft.set("optimizer.state_dtype", "bf16")
                draft.use(full, "optimizer.state_dtype")
            elif key in ("auto_cast", "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis",
                         "min_loss_scale", "consecutive_hysteresis", "immediate_grad_update",
                         "bf16_master_weights_and_grads", "fp16_master_weights_and_grads",
                         "bf16_optimizer_states", "check_grad_overflow"):  # fmt: skip
                draft.ignore(full, LEARNING)
    if chosen:
        draft.set("model.dtype", chosen)
        draft.set("model.autocast", None)
        draft.findings.spent.add("model.autocast")
        if draft.known("optimizer.master_dtype") is None:
            draft.set("optimizer.master_dtype", "fp32")
    elif any(draft.peek(f"{name}.enabled") == "auto" for name in ("bf16", "fp16")) and around is None:
        draft.assume("model.dtype", "fp32", '"auto": TrainingArguments have neither bf16 nor fp16 switched on')


def _read_optimizer(draft: Draft) -> None:
    named = draft.has("optimizer.type") and set_optimizer(draft, "optimizer.type", COMPONENTS)
    if named and draft.peek("optimizer.type") in ("Adam", "AdamW"):
        if not draft.boolean("optimizer.params.torch_adam"):
            draft.set("optimizer.implementation", "fused")
            draft.note(f"{draft.prefix}optimizer.type: DeepSpeed's own fused Adam, since torch_adam is not set")
        if draft.peek("optimizer.type") == "Adam":  # DeepSpeed decouples the decay unless adam_w_mode is off
            draft.set("optimizer.name", "adamw" if draft.boolean("optimizer.params.adam_w_mode", True) else "adam")
    simple = {"lr": "optimizer.lr", "weight_decay": "optimizer.weight_decay", "eps": "optimizer.eps"}
    for key in draft.table("optimizer.params"):
        full = f"optimizer.params.{key}"
        if key in simple and draft.peek(full) != "auto":
            draft.take(full, simple[key], draft.number)
        elif key == "betas" and isinstance(draft.peek(full), list):
            draft.set("optimizer.betas", draft.peek(full))
            draft.use(full, "optimizer.betas")
        elif key in ("torch_adam", "adam_w_mode"):
            draft.use(full, "optimizer.name", "optimizer.implementation")
        elif key in (*simple, "betas", "bias_correction", "momentum", "amsgrad", "fused"):
            draft.ignore(full, LEARNING)
    draft.ignore_all(group(SPEED, "optimizer.legacy_fusion optimizer.type"))


def _read_batches(draft: Draft) -> None:
    """train_batch_size = micro-batch × accumulation × data ranks; two of the three give the third."""
    for key, field_name, default in (
        ("train_micro_batch_size_per_gpu", "train.micro_batch", 8),
        ("gradient_accumulation_steps", "train.accumulation", 1),
    ):
        if draft.peek(key) == "auto":
            draft.assume(field_name, default, f'"auto": the default of TrainingArguments for {field_name}')
            draft.use(key, field_name)
        draft.take(key, field_name, draft.integer)
    total = draft.peek("train_batch_size")
    if total not in (None, "auto"):
        rows = draft.integer("train_batch_size")
        micro, ranks = draft.known("train.micro_batch"), draft.known("parallel.gpus")
        times = draft.known("train.accumulation") or 1
        if micro is None and ranks and rows % (times * ranks) == 0:
            draft.set("train.micro_batch", rows // (times * ranks))
        elif micro and ranks is None and rows % (micro * times) == 0:
            draft.set("parallel.gpus", rows // (micro * times))
        elif micro is None:
            draft.need("train.micro_batch", "train_batch_size is the sum over ranks; give --gpus or --micro-batch")
        draft.use("train_batch_size", "train.micro_batch", "parallel.gpus")
    draft.ignore("train_batch_size", OVERRULED)


def _read_compile(draft: Draft) -> None:
    table = draft.table("compile")
    if "deepcompile" in table and draft.boolean("compile.deepcompile"):
        draft.not_modelled("compile.deepcompile", "DeepCompile rearranges gathers")
    if "disable" in table or "enabled" in table:
        on = draft.boolean("compile.enabled", True) and not draft.boolean("compile.disable", False)
        draft.set("kernels.compile", on)
        for key in ("disable", "enabled"):
            draft.use(f"compile.{key}", "kernels.compile")
    for key in ("backend", "kwargs", "deepcompile", "free_activation", "offload_activation", "double_buffer"):
        draft.ignore(f"compile.{key}", SPEED)


def _read_others(draft: Draft) -> None:
    """Tensor and sequence parallelism, DeepSpeed's own activation checkpointing, gradients in another dtype."""
    draft.take("sequence_parallel_size", "parallel.ulysses", draft.integer)
    for key in draft.table("tensor_parallel"):
        if key == "autotp_size":
            draft.take("tensor_parallel.autotp_size", "parallel.tensor", draft.integer, skip=(0,), reason=OFF)
        else:
            draft.ignore(f"tensor_parallel.{key}", SPEED)
    for key in draft.table("activation_checkpointing"):
        full = f"activation_checkpointing.{key}"
        if key in ("partition_activations", "cpu_checkpointing") and draft.boolean(full):
            draft.not_modelled(full, "only models that call deepspeed.checkpointing use it")
        draft.ignore(full, OFF if key in ("partition_activations", "cpu_checkpointing") else SPEED)
    dtype = draft.peek("data_types.grad_accum_dtype")
    if dtype is not None:
        draft.not_modelled("data_types.grad_accum_dtype", f"gradients are kept in {dtype}")
    draft.ignore("data_types", OFF) if draft.peek("data_types") is None else None
    for key in ("amp", "hybrid_engine", "compression_training", "sparse_attention", "quantize_training"):
        inner = draft.peek(key)
        on = isinstance(inner, dict) and bool(inner.get("enabled", key in ("compression_training", "sparse_attention")))
        if on:
            draft.not_modelled(key, "this feature of DeepSpeed")
        draft.ignore(key, OFF)
    draft.ignore_all(group(FEW_BYTES, "pipeline"))
