"""torchtune's recipe YAML: components by dotted name, `model: {_component_: torchtune.models.llama3_1.lora_...}`.

Sources: torchtune 0.6 (recipes/, training/) and the recipes of its main branch. A recipe that has no optimizer
generates or evaluates. What a recipe does not say is which script runs it; on more than one GPU that is FSDP2.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from overspill.interop.configs.core import Draft
from overspill.interop.configs.optimizers import COMPONENTS, set_optimizer
from overspill.interop.configs.reasons import (
    DATA,
    EMPTY,
    GENERATION,
    LAUNCH,
    LEARNING,
    LOADING,
    LOGGING,
    NO_TRAINING,
    OBJECTIVE,
    OFF,
    POLICY_ONLY,
    SAVING,
    SPEED,
    TOKENS,
    group,
)
from overspill.interop.configs.torchtune_models import builder

__all__ = ["is_torchtune", "read"]

_IGNORED: Final[dict[str, str]] = {
    **group(
        LOGGING,
        "metric_logger log_every_n_steps log_peak_memory_stats log_level profiler run_val_every_n_steps",
    ),
    **group(SAVING, "output_dir save_adapter_weights_only resume_from_checkpoint save_every_n_steps "
            "enable_async_checkpointing keep_last_n_checkpoints epochs_to_save"),
    **group(
        LOADING,
        "checkpointer teacher_checkpointer ref_checkpointer ref_policy_checkpointer value_checkpointer "
        "reward_checkpointer low_cpu_ram cudnn_deterministic_mode use_distributed_state_dict",
    ),
    **group(DATA, "dataset_val shuffle collate_fn dataloader datasets multidataset"),
    **group(LAUNCH, "device memory_efficient_fsdp_wrap fsdp_sharding_strategy tensor_parallel_plan parallel_method"),
    **group(LEARNING, "lr_scheduler max_steps_per_epoch"),
    **group(OBJECTIVE, "kd_ratio kl_coeff gamma lmbda whiten_rewards reward_penalty min_response_length "
            "penalise_no_eos stop_token_ids ppo_epochs num_steps"),
    **group(GENERATION, "temperature top_k max_generated_tokens max_new_tokens prompt enable_kv_cache "
            "forward_batch_size batch_size_val"),
}  # fmt: skip

#: Keys that are read where they hold a value, and mean nothing without one.
_SWITCHES: Final = (
    "custom_sharded_layers dtype enable_activation_checkpointing enable_activation_offloading fsdp.cpu_offload "
    "fsdp_cpu_offload fsdp.reshard_after_forward fsdp_reshard_after_forward"
)
_TORCH_OPTIONS: Final = frozenset(
    ("fused", "foreach", "amsgrad", "maximize", "capturable", "differentiable", "nesterov", "dampening")
)
_NAMES: Final = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}


def is_torchtune(data: dict[str, Any]) -> bool:
    """Whether a table below the top names a component."""
    return any(isinstance(value, dict) and "_component_" in value for value in data.values())


def _resolve(data: dict[str, Any]) -> dict[str, Any]:
    """`${batch_size}` is the value of that key at the top, as OmegaConf has it."""

    def value_of(value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict):
            return {key: value_of(one, depth) for key, one in value.items()}
        whole = re.fullmatch(r"\$\{(\w+)\}", value) if isinstance(value, str) else None
        if whole and whole[1] in data and depth < 8:
            return value_of(data[whole[1]], depth + 1)
        return value

    return {key: value_of(value) for key, value in data.items()}


def read(draft: Draft) -> None:
    """A torchtune recipe."""
    draft.data = _resolve(dict(draft.data))
    if not draft.has("optimizer") or not (draft.has("loss") or draft.has("dataset")):
        what = "evaluates" if draft.has("tasks") else "generates" if draft.has("prompt") else "trains no model"
        draft.describes_no_training(f"it has no optimizer and no loss; it {what}")
        for key in draft.data:
            draft.ignore(key, NO_TRAINING)
        return
    draft.set("framework.name", "torchtune")
    if not draft.has("model") and draft.has("policy_model"):
        _read_reinforcement(draft)
    else:
        _read_model(draft, "model")
        _read_others(draft)
    _read_precision(draft)
    _read_batches(draft)
    _read_optimizer(draft)
    _read_loss(draft)
    _read_memory(draft)
    _read_parallel(draft)
    if draft.has("quantizer"):
        draft.not_modelled("quantizer", "quantisation-aware training keeps fake-quantised copies")
    draft.ignore("quantizer", EMPTY)
    draft.take("seed", "train.seed", draft.integer)
    draft.ignore_all(group(EMPTY, _SWITCHES))
    draft.ignore_all(_IGNORED)


def _read_model(draft: Draft, at: str) -> None:
    name = draft.text(f"{at}._component_")
    made = builder(name)
    if made.model:
        draft.set("model.path", made.model)
    draft.use(f"{at}._component_", "model.path", "method.kind", *(["method.base"] if made.quantised else []))
    draft.need("model.path", f"{name} builds a model by its sizes; name it with --model")
    if made.lora:
        draft.set("method.kind", "lora")
        _read_lora(draft, at, made.quantised)
    else:
        draft.set("method.kind", "full")
    for key in draft.table(at):
        if key in ("lora_alpha", "attn_dropout", "norm_eps", "num_classes", "rope_base", "image_size", "max_seq_len"):
            draft.ignore(f"{at}.{key}", LEARNING)
        elif key in ("encoder_trainable", "decoder_trainable", "fusion_trainable"):
            draft.not_modelled(f"{at}.{key}", "which part of a vision-language model is trained")
        elif key in ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "intermediate_dim"):
            draft.ignore(f"{at}.{key}", LOADING)


def _read_lora(draft: Draft, at: str, quantised: bool) -> None:
    names = draft.texts(f"{at}.lora_attn_modules") if draft.has(f"{at}.lora_attn_modules") else ()
    targets = [_NAMES.get(name, name) for name in names]
    draft.use(f"{at}.lora_attn_modules", "method.targets")
    if draft.has(f"{at}.apply_lora_to_mlp"):
        if draft.boolean(f"{at}.apply_lora_to_mlp"):
            targets += ["gate_proj", "up_proj", "down_proj"]
        draft.use(f"{at}.apply_lora_to_mlp", "method.targets")
    if draft.has(f"{at}.apply_lora_to_output"):
        if draft.boolean(f"{at}.apply_lora_to_output"):
            targets.append("lm_head")
        draft.use(f"{at}.apply_lora_to_output", "method.targets")
    draft.ignore_all(group(EMPTY, "apply_lora_to_mlp apply_lora_to_output"), under=at)
    draft.set("method.targets", tuple(targets))
    draft.take(f"{at}.lora_rank", "method.rank", draft.integer)
    draft.assume("method.rank", 8, "torchtune: lora_rank")
    draft.take(f"{at}.lora_dropout", "method.dropout", draft.number)
    draft.take(f"{at}.use_dora", "method.dora", draft.boolean)
    if draft.has(f"{at}.quantize_base"):
        quantised = draft.boolean(f"{at}.quantize_base")
        draft.use(f"{at}.quantize_base", "method.base")
    if quantised:
        draft.set("method.base", "nf4")
        draft.assume("method.double_quant", True, "torchao's NF4Tensor quantises its block scales")


def _read_others(draft: Draft) -> None:
    """A teacher or a reference beside the model."""
    if draft.has("teacher_model"):
        made = builder(draft.text("teacher_model._component_"))
        draft.set("task.kind", "distill")
        if made.model:
            draft.set("task.teacher", made.model)
        draft.use("teacher_model", "task.kind", "task.teacher")
        draft.use("kd_loss", "task.kind")
    elif str(draft.peek("loss._component_")).endswith(("DPOLoss", "RSOLoss", "SimPOLoss")):
        draft.set("task.kind", "simpo" if "SimPO" in draft.text("loss._component_") else "dpo")
    else:
        draft.assume("task.kind", "sft", "torchtune: no teacher, preference loss or reward model")


def _read_reinforcement(draft: Draft) -> None:
    _read_model(draft, "policy_model")
    draft.set("task.kind", "rl")
    draft.not_modelled("reward_and_value_model", "a reward model and a value model beside the policy")
    draft.take("ppo_batch_size", "train.micro_batch", draft.integer)
    draft.ignore("batch_size", GENERATION)
    draft.note(POLICY_ONLY)


def _read_precision(draft: Draft) -> None:
    words = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "fp32": "fp32", "float32": "fp32"}
    if str(draft.peek("dtype")) in words:
        draft.take("dtype", "model.dtype", lambda key: words[draft.text(key)])
    draft.assume("model.dtype", "fp32", "torchtune: dtype")
    if draft.known("method.kind") == "lora":
        dtype = draft.known("model.dtype") or "fp32"
        draft.assume("method.adapter_dtype", dtype, "torchtune builds adapters in dtype")


def _read_batches(draft: Draft) -> None:
    draft.take("batch_size", "train.micro_batch", draft.integer)
    draft.assume("train.micro_batch", 1, "no batch_size in the file")
    draft.take("gradient_accumulation_steps", "train.accumulation", draft.integer)
    draft.assume("train.accumulation", 1, "torchtune: gradient_accumulation_steps")
    draft.take("epochs", "train.epochs", draft.number)
    if draft.has("run_val_every_n_steps"):
        draft.take("run_val_every_n_steps", "train.eval_every", draft.integer)
        draft.take("batch_size_val", "evaluation.micro_batch", draft.integer)
    draft.take("tokenizer.max_seq_len", "data.seq_len", draft.integer)
    for key in draft.table("tokenizer"):
        draft.ignore(f"tokenizer.{key}", TOKENS)
    draft.need("data.seq_len", "tokenizer.max_seq_len is not set: samples are as long as they are; give --seq-len")
    for key in draft.table("dataset"):
        if key == "packed":
            draft.take("dataset.packed", "data.packing", draft.boolean)
        draft.ignore(f"dataset.{key}", DATA)
    draft.assume("data.packing", False, "torchtune: packed is off")


def _read_optimizer(draft: Draft) -> None:
    if draft.has("optimizer._component_"):
        name = draft.text("optimizer._component_").rpartition(".")[2]
        row = COMPONENTS.get(name)
        if row is None:
            set_optimizer(draft, "optimizer._component_", COMPONENTS)
        else:
            for field_name, value in row.items():
                draft.set(field_name, value)
            draft.use("optimizer._component_", *row)
    fields = {"lr": "optimizer.lr", "weight_decay": "optimizer.weight_decay", "eps": "optimizer.eps",
              "momentum": "optimizer.momentum"}  # fmt: skip
    for key in draft.table("optimizer"):
        full = f"optimizer.{key}"
        if key in fields:
            draft.take(full, fields[key], draft.number)
        elif key in ("fused", "foreach") and draft.boolean(full):
            draft.set("optimizer.implementation", key)
            draft.use(full, "optimizer.implementation")
        elif key == "foreach" and draft.has(full):
            draft.set("optimizer.implementation", "for_loop")
            draft.use(full, "optimizer.implementation")
        elif key == "betas":
            draft.set("optimizer.betas", draft.peek(full))
            draft.use(full, "optimizer.betas")
        elif key in _TORCH_OPTIONS:
            draft.ignore(full, OFF)
    if draft.has("optimizer_in_bwd"):
        draft.take("optimizer_in_bwd", "optimizer.in_backward", draft.boolean)
    draft.ignore("optimizer_in_bwd", EMPTY)
    if draft.has("clip_grad_norm"):
        draft.take("clip_grad_norm", "optimizer.max_grad_norm", draft.number)
    draft.ignore("clip_grad_norm", EMPTY)
    draft.assume("optimizer.max_grad_norm", 0, "torchtune: clip_grad_norm is off")


def _read_loss(draft: Draft) -> None:
    name = str(draft.peek("loss._component_")).rpartition(".")[2]
    if name in ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "ForwardKLWithChunkedOutputLoss"):
        draft.set("kernels.loss", "chunked")
        draft.use("loss._component_", "kernels.loss", "kernels.loss_chunk_tokens")
        chunks = draft.integer("loss.num_output_chunks") if draft.has("loss.num_output_chunks") else 8
        draft.use("loss.num_output_chunks", "kernels.loss_chunk_tokens")
        rows, length = draft.known("train.micro_batch"), draft.known("data.seq_len")
        if rows and length:
            tokens = math.ceil(int(rows) * int(length) / max(1, chunks))
            draft.assume("kernels.loss_chunk_tokens", tokens, f"torchtune: {chunks} chunks a micro-batch")
    elif name == "CrossEntropyLoss":
        draft.set("kernels.loss", "plain")
        draft.use("loss._component_", "kernels.loss")
    elif name.endswith(("DPOLoss", "RSOLoss", "SimPOLoss", "PPOLoss", "GRPOLoss", "GRPOSimpleLoss")):
        draft.use("loss._component_", "task.kind")
    for key in draft.table("loss"):
        if key != "_component_":
            draft.ignore(f"loss.{key}", OBJECTIVE)


def _read_memory(draft: Draft) -> None:
    if draft.has("enable_activation_checkpointing"):
        draft.take("enable_activation_checkpointing", "model.gradient_checkpointing", draft.boolean)
    draft.assume("model.gradient_checkpointing", False, "torchtune: enable_activation_checkpointing")
    if draft.known("model.gradient_checkpointing"):
        draft.assume("kernels.reentrant", False, "torchtune wraps layers in non-reentrant checkpoints")
    mode, option = draft.peek("ac_mode"), draft.peek("ac_option")
    if mode == "selective" and not draft.known("model.gradient_checkpointing"):
        if str(option) == "op":
            draft.set("kernels.checkpointing", "selective_op")
            draft.use("ac_option", "kernels.checkpointing")
        elif option is not None:
            draft.set("kernels.checkpointing", "selective")
            draft.take("ac_option", "kernels.checkpoint_every", draft.integer)
        draft.use("ac_mode", "kernels.checkpointing")
    elif mode in ("full", "none") and not draft.known("model.gradient_checkpointing"):
        draft.take("ac_mode", "kernels.checkpointing", draft.text)
    draft.ignore_all(group(OFF, "ac_mode ac_option"))
    if draft.has("enable_activation_offloading"):
        if draft.boolean("enable_activation_offloading"):
            draft.set("offload.activations", "host")
            draft.use("enable_activation_offloading", "offload.activations")
        draft.ignore("enable_activation_offloading", OFF)
    value = draft.peek("compile")
    if isinstance(value, dict):
        for key in draft.table("compile"):
            if key in ("model", "loss") and draft.boolean(f"compile.{key}"):
                draft.set("kernels.compile", True)
                draft.use(f"compile.{key}", "kernels.compile")
            elif key in ("model", "loss", "scale_grads", "optimizer_step"):
                draft.ignore(f"compile.{key}", SPEED)
    elif value is not None:
        draft.take("compile", "kernels.compile", draft.boolean)
    draft.ignore("compile", EMPTY)


def _read_parallel(draft: Draft) -> None:
    draft.take("tensor_parallel_dim", "parallel.tensor", draft.integer)
    draft.take("context_parallel_dim", "parallel.context", draft.integer)
    draft.take("data_parallel_replicate_dim", "parallel.replicas", draft.integer)
    sizes = [draft.integer(key) if draft.has(key) else 1 for key in
             ("tensor_parallel_dim", "context_parallel_dim", "data_parallel_replicate_dim")]  # fmt: skip
    shards = draft.integer("data_parallel_shard_dim") if draft.has("data_parallel_shard_dim") else -1
    if shards > 0:
        sizes.append(shards)
        draft.use("data_parallel_shard_dim", "parallel.gpus")
    draft.ignore("data_parallel_shard_dim", OFF)
    product = math.prod(size for size in sizes if size > 0)
    why = "the product of the parallel sizes" if product > 1 else "the file names no number of processes; give --gpus"
    draft.assume("parallel.gpus", product, why)
    for key in ("fsdp_cpu_offload", "fsdp.cpu_offload"):
        if draft.has(key):
            tier = "host" if draft.boolean(key) else "device"
            for name in ("weights", "gradients", "optimizer"):
                draft.set(f"offload.{name}", tier)
            draft.use(key, "offload.weights", "offload.gradients", "offload.optimizer")
    for key in ("fsdp_reshard_after_forward", "fsdp.reshard_after_forward"):
        draft.take(key, "parallel.reshard_after_forward", draft.boolean)
    if draft.has("custom_sharded_layers"):
        draft.take("custom_sharded_layers", "parallel.wrap_embeddings", lambda key: bool(draft.texts(key)))
