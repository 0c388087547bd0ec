"""Hugging Face TrainingArguments, as JSON (training_args.json) or as a command line; TRL and LLaMA-Factory add to them.

Field names and defaults are transformers' (5.24, and what 4.x still took). Old names are read as well, since people
keep their files.
"""

from __future__ import annotations

import re
from typing import Any, Final

from overspill.interop.configs import deepspeed, fsdp
from overspill.interop.configs.core import Draft
from overspill.interop.configs.files import companion
from overspill.interop.configs.optimizers import NAMES, set_optimizer
from overspill.interop.configs.reasons import (
    DATA,
    EMPTY,
    FEW_BYTES,
    GENERATION,
    LAUNCH,
    LEARNING,
    LOADING,
    LOGGING,
    OBJECTIVE,
    OFF,
    OVERRULED,
    SAVING,
    SPEED,
    group,
)

__all__ = ["IGNORED", "MARKS", "assume_defaults", "read", "read_arguments", "read_liger"]

#: Keys that no other format has at its top.
MARKS: Final = ("per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps", "learning_rate")

IGNORED: Final[dict[str, str]] = {
    **group(
        LOGGING,
        "logging_dir logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_on_each_node "
        "log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id "
        "trackio_static_space_id include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics debug "
        "batch_eval_metrics include_for_metrics include_inputs_for_metrics wandb_project wandb_entity "
        "wandb_run_group",
    ),
    **group(
        SAVING,
        "output_dir overwrite_output_dir save_strategy save_total_limit save_safetensors save_on_each_node "
        "save_only_model enable_jit_checkpoint push_to_hub push_to_hub_model_id push_to_hub_organization "
        "push_to_hub_token hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
        "hub_model_revision load_best_model_at_end metric_for_best_model greater_is_better resume_from_checkpoint "
        "ignore_data_skip restore_callback_states_from_checkpoint callbacks benchmarks",
    ),
    **group(
        LEARNING,
        "warmup_ratio adam_epsilon optim_target_modules full_determinism data_seed average_tokens_across_devices",
    ),
    **group(
        DATA,
        "dataloader_drop_last dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names group_by_length "
        "length_column_name train_sampling_strategy sortish_sampler split_batches dispatch_batches even_batches",
    ),
    **group(
        LAUNCH,
        "local_rank ddp_backend ddp_timeout ddp_broadcast_buffers ddp_find_unused_parameters ddp_static_graph "
        "xpu_backend tpu_num_cores tpu_metrics_debug mp_parameters ray_scope accelerator_config past_index "
        "_n_gpu n_gpu world_size use_mps_device no_cuda use_ipex jit_mode_eval",
    ),
    **group(SPEED, "tf32 torch_compile_backend torch_compile_mode torchdynamo torch_compile_options use_cache"),
    **group(
        GENERATION,
        "do_predict predict_with_generate generation_max_length generation_num_beams generation_config "
        "eval_on_start eval_delay eval_do_concat_batches eval_use_gather_object fp16_full_eval bf16_full_eval",
    ),
    **group(OBJECTIVE, "fp16_opt_level fp16_backend half_precision_backend"),
    **group(LOADING, "do_train do_eval sharded_ddp"),
    **group(FEW_BYTES, "deepspeed_plugin distributed_state"),
}  # fmt: skip

_KINDS: Final = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def read(draft: Draft) -> None:
    """TrainingArguments alone: they name no model and no length of a sequence."""
    draft.set("framework.name", "hf_trainer")
    if draft.has("model_name_or_path"):
        draft.take("model_name_or_path", "model.path", draft.text)
    draft.need("model.path", "TrainingArguments name no model")
    draft.need("data.seq_len", "TrainingArguments say nothing about the length of sequences")
    read_arguments(draft)
    assume_defaults(draft)
    if draft.known("model.dtype") is None:
        draft.assume("model.dtype", "fp32", "from_pretrained without a dtype; transformers 5 takes the checkpoint's")


def read_arguments(draft: Draft) -> None:
    """Every key of TrainingArguments that the file holds; the caller adds its own keys and defaults."""
    _read_batches(draft)
    _read_length(draft)
    _read_optimizer(draft)
    _read_schedule(draft)
    _read_precision(draft)
    _read_checkpointing(draft)
    _read_evaluation(draft)
    read_liger(draft)
    _read_parallel(draft)
    if draft.has("torch_compile"):
        draft.take("torch_compile", "kernels.compile", draft.boolean)
    if draft.has("neftune_noise_alpha"):
        draft.set("task.neftune", True)
        draft.use("neftune_noise_alpha", "task.neftune")
    if draft.has("label_smoothing_factor"):
        if draft.number("label_smoothing_factor") > 0:
            draft.not_modelled("label_smoothing_factor", "label smoothing takes log-probabilities of the whole logits")
        else:
            draft.ignore("label_smoothing_factor", OFF)
    if draft.has("auto_find_batch_size"):
        if draft.boolean("auto_find_batch_size"):
            draft.not_modelled("auto_find_batch_size", "the micro-batch is lowered when memory runs out")
        else:
            draft.ignore("auto_find_batch_size", OFF)
    if draft.has("torch_empty_cache_steps"):
        draft.not_modelled("torch_empty_cache_steps", "the allocator's cache is emptied now and then")
    if draft.has("ddp_bucket_cap_mb"):
        draft.not_modelled("ddp_bucket_cap_mb", "DDP's buckets have their default size in the forecast")
    if draft.has("use_cpu"):
        if draft.boolean("use_cpu"):
            draft.not_modelled("use_cpu", "training on the processor; the forecast is for an accelerator")
        else:
            draft.ignore("use_cpu", OFF)
    draft.take("seed", "train.seed", draft.integer)
    draft.take("dataloader_num_workers", "data.num_workers", draft.integer)
    draft.ignore_all(group(EMPTY, _SWITCHES))
    draft.ignore_all(IGNORED)


#: Keys that are read above where they hold a value, and mean nothing without one.
_SWITCHES: Final = (
    "torch_compile neftune_noise_alpha label_smoothing_factor auto_find_batch_size torch_empty_cache_steps "
    "ddp_bucket_cap_mb use_cpu"
)


def assume_defaults(draft: Draft, *, checkpointing: bool = False) -> None:
    """Defaults of TrainingArguments that matter for memory."""
    draft.assume("train.micro_batch", 8, "TrainingArguments: per_device_train_batch_size")
    draft.assume("train.accumulation", 1, "TrainingArguments: gradient_accumulation_steps")
    draft.assume("optimizer.name", "adamw", "TrainingArguments: optim = adamw_torch, fused from torch 2.8 on")
    draft.assume("optimizer.max_grad_norm", 1.0, "TrainingArguments: max_grad_norm")
    draft.assume("model.gradient_checkpointing", checkpointing, "the trainer's default for gradient_checkpointing")
    if draft.known("parallel.gpus") is None:
        draft.assume("parallel.gpus", 1, "the file names no number of processes; give --gpus")


def _read_batches(draft: Draft) -> None:
    for key in ("per_device_train_batch_size", "per_gpu_train_batch_size"):
        draft.take(key, "train.micro_batch", draft.integer)
    draft.take("gradient_accumulation_steps", "train.accumulation", draft.integer)
    for key in ("per_device_eval_batch_size", "per_gpu_eval_batch_size"):
        draft.take(key, "evaluation.micro_batch", draft.integer)


def _read_length(draft: Draft) -> None:
    steps = draft.integer("max_steps") if draft.has("max_steps") else -1
    if steps > 0:
        draft.take("max_steps", "train.steps", draft.integer)
        draft.ignore("num_train_epochs", OVERRULED)
    else:
        draft.ignore("max_steps", OFF)
        draft.take("num_train_epochs", "train.epochs", draft.number)


def _read_optimizer(draft: Draft) -> None:
    if draft.has("optim"):
        set_optimizer(draft, "optim", NAMES)
    draft.ignore("optim", OFF)
    if draft.has("optim_args") and isinstance(draft.peek("optim_args"), str):
        rank = re.search(r"\brank\s*=\s*(\d+)", draft.text("optim_args"))
        if rank:
            draft.set("optimizer.rank", int(rank[1]))
            draft.use("optim_args", "optimizer.rank")
    draft.ignore("optim_args", LEARNING)
    if draft.has("adafactor"):
        if draft.boolean("adafactor"):
            draft.set("optimizer.name", "adafactor")
            draft.use("adafactor", "optimizer.name")
        draft.ignore("adafactor", OFF)
    draft.take("max_grad_norm", "optimizer.max_grad_norm", draft.number)
    draft.take("learning_rate", "optimizer.lr", draft.number)
    draft.take("weight_decay", "optimizer.weight_decay", draft.number)
    if draft.has("adam_beta1") or draft.has("adam_beta2"):
        first = draft.number("adam_beta1") if draft.has("adam_beta1") else 0.9
        second = draft.number("adam_beta2") if draft.has("adam_beta2") else 0.999
        draft.set("optimizer.betas", [first, second])
        draft.use("adam_beta1", "optimizer.betas")
        draft.use("adam_beta2", "optimizer.betas")
    draft.ignore_all(group(LEARNING, "adam_beta1 adam_beta2"))


def _read_schedule(draft: Draft) -> None:
    if draft.word("lr_scheduler_type") in _KINDS:
        draft.take("lr_scheduler_type", "schedule.kind", lambda key: _KINDS[draft.text(key)])
    draft.ignore("lr_scheduler_type", LEARNING)
    if draft.has("lr_scheduler_kwargs.min_lr_rate"):
        draft.take("lr_scheduler_kwargs.min_lr_rate", "schedule.min_lr_ratio", draft.number)
        for key in draft.table("lr_scheduler_kwargs"):
            draft.ignore(f"lr_scheduler_kwargs.{key}", LEARNING)
    else:
        draft.ignore("lr_scheduler_kwargs", LEARNING)
    if draft.has("warmup_steps"):
        if draft.number("warmup_steps") >= 1:
            draft.take("warmup_steps", "schedule.warmup_steps", draft.integer)
        draft.ignore("warmup_steps", LEARNING)  # below 1 it is a share of the steps
    draft.ignore("warmup_steps", LEARNING)


def _read_precision(draft: Draft) -> None:
    for key, dtype in (("bf16", "bf16"), ("fp16", "fp16")):
        if draft.has(key) and draft.boolean(key):
            draft.set("model.autocast", dtype)
            draft.use(key, "model.autocast")
        draft.ignore(key, OFF)


def _read_checkpointing(draft: Draft) -> None:
    """gradient_checkpointing and its arguments, under the old name and transformers 5's second one."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        if draft.has(name):
            draft.take(name, "model.gradient_checkpointing", draft.boolean)
        draft.ignore(name, OFF)
        arguments = f"{name}_kwargs"
        for key in draft.table(arguments):
            full = f"{arguments}.{key}"
            if key == "use_reentrant":
                draft.take(full, "kernels.reentrant", draft.boolean)
            elif key == "offload" and draft.boolean(full):
                draft.set("offload.activations", "host")
                draft.use(full, "offload.activations")
            elif key == "offload":
                draft.ignore(full, OFF)
            elif key in ("preserve_rng_state", "determinism_check", "debug", "early_stop"):
                draft.ignore(full, FEW_BYTES)
    mode = draft.peek("activation_offloading")
    if mode in ("disk", "hidden_states", "legacy") or draft.boolean("activation_offloading"):
        draft.set("offload.activations", "disk" if mode == "disk" else "host")
        draft.use("activation_offloading", "offload.activations")
    draft.ignore("activation_offloading", OFF)


def _read_evaluation(draft: Draft) -> None:
    for name in ("eval_strategy", "evaluation_strategy"):
        draft.ignore(name, LOGGING)
    if draft.has("eval_accumulation_steps"):
        draft.take("eval_accumulation_steps", "evaluation.batches", draft.integer)
    if draft.has("prediction_loss_only"):
        draft.ignore("prediction_loss_only", GENERATION)
    for name, field_name in (("eval", "train.eval_every"), ("save", "train.save_every")):
        by_steps = str(draft.peek(f"{name}_strategy", "steps")).lower() == "steps"
        if by_steps and draft.has(f"{name}_steps") and draft.number(f"{name}_steps") >= 1:
            draft.take(f"{name}_steps", field_name, draft.integer)
        draft.ignore(f"{name}_steps", LOGGING if by_steps else OVERRULED)  # below 1 it is a share of the steps
    draft.ignore("eval_accumulation_steps", OFF)
    draft.ignore("prediction_loss_only", OFF)


def read_liger(draft: Draft) -> None:
    """use_liger_kernel: Liger's apply_liger_kernel_to_* turns on rope, norm, MLP and the fused linear loss."""
    if draft.has("use_liger_kernel") and draft.boolean("use_liger_kernel"):
        draft.use("use_liger_kernel", *_liger(draft, "liger_kernel_config"))
    draft.ignore("use_liger_kernel", OFF)
    draft.ignore("use_liger", OFF)
    draft.ignore("liger_kernel_config", OFF)


_LIGER: Final = {
    "rope": ("kernels.fused_rope", True),
    "rms_norm": ("kernels.fused_norm", True),
    "swiglu": ("kernels.fused_mlp", True),
    "geglu": ("kernels.fused_mlp", True),
    "fused_linear_cross_entropy": ("kernels.loss", "fused_linear"),
}


def _liger(draft: Draft, arguments: str) -> list[str]:
    chosen = {"rope": True, "rms_norm": True, "swiglu": True, "fused_linear_cross_entropy": True}
    for key in draft.table(arguments):
        if key in _LIGER:
            chosen[key] = draft.boolean(f"{arguments}.{key}")
            draft.use(f"{arguments}.{key}", _LIGER[key][0])
        elif key == "cross_entropy":
            if draft.boolean(f"{arguments}.{key}"):
                draft.set("kernels.loss", "fused")
            draft.use(f"{arguments}.{key}", "kernels.loss")
        elif key == "layer_norm":
            draft.ignore(f"{arguments}.{key}", SPEED)
    fields = [_LIGER[name] for name, on in chosen.items() if on]
    for field_name, value in fields:
        draft.set(field_name, value)
    return list(dict.fromkeys(field_name for field_name, _ in fields))


def _read_parallel(draft: Draft) -> None:
    """deepspeed, fsdp, fsdp_config and parallelism_config."""
    read_deepspeed(draft)
    raw: Any = draft.peek("fsdp")
    words = raw.split() if isinstance(raw, str) else raw if isinstance(raw, list) else []
    options = [str(word) for word in words] if raw is not True else ["full_shard"]
    if options and options != ["False"]:
        fsdp.read_options(draft, options)
        draft.use("fsdp", "parallel.data", *(["offload.weights"] if "offload" in options else []))
        fsdp.read_table(draft, "fsdp_config", default_version=1)
    else:
        draft.ignore("fsdp", OFF)
        draft.ignore("fsdp_config", OFF)
    draft.ignore_all(group(OVERRULED, "fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap"))
    fsdp.read_parallelism(draft, "parallelism_config")


def read_deepspeed(draft: Draft) -> None:
    """`deepspeed`: a table, or the path of a file, which is read where it lies beside this one."""
    value = draft.peek("deepspeed")
    if isinstance(value, dict) and value:
        child = draft.inside("deepspeed")
        deepspeed.read_inside(child)
        child.close()
        return
    if value in (None, "", False, {}):
        draft.ignore("deepspeed", OFF)
        if draft.findings.flags.get("deepspeed"):
            companion(draft, str(draft.findings.flags["deepspeed"]), deepspeed.read_inside)
        return
    draft.use("deepspeed", "parallel.data")
    path = str(draft.findings.flags.get("deepspeed") or draft.text("deepspeed"))
    if not companion(draft, path, deepspeed.read_inside):
        draft.need("parallel.data", f"{path} is not beside this file; give --deepspeed PATH, or the ZeRO stage")
