"""LLaMA-Factory's YAML: TrainingArguments and its own model, data and finetuning arguments.

Source: llamafactory 0.9.5 (hparams/*.py; model/adapter.py for the dtype of trained weights, model_utils/
checkpointing.py for checkpointing, which is on unless switched off).
"""

from __future__ import annotations

from typing import Any, Final

from overspill.interop.configs import hf_training_arguments as hf
from overspill.interop.configs.core import Draft
from overspill.interop.configs.reasons import (
    DATA,
    EMPTY,
    FEW_BYTES,
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

__all__ = ["MARKS", "is_token_list", "read", "read_token_list"]

MARKS: Final = ("finetuning_type", "stage", "template", "cutoff_len", "dataset_dir", "lora_target", "quantization_bit")

_IGNORED: Final[dict[str, str]] = {
    **group(
        DATA,
        "dataset eval_dataset dataset_dir media_dir mask_history streaming buffer_size mix_strategy interleave_probs "
        "overwrite_cache preprocessing_batch_size preprocessing_num_workers max_samples ignore_pad_token_for_loss "
        "val_size eval_on_each_dataset tokenized_path data_shared_file_system disable_shuffling train_on_prompt "
        "reserved_label_len",
    ),
    **group(
        TOKENS,
        "template tool_format default_system enable_thinking preserve_thinking use_fast_tokenizer "
        "split_special_tokens",
    ),
    **group(
        LOGGING,
        "plot_loss compute_accuracy include_effective_tokens_per_second use_swanlab swanlab_project swanlab_workspace "
        "swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret "
        "print_param_status early_stopping_steps enable_torch_profiler profiler_output_dir profiler_wait_steps "
        "profiler_warmup_steps profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory "
        "profiler_with_stack profile_modules",
    ),
    **group(
        LEARNING,
        "lora_alpha loraplus_lr_ratio loraplus_lr_embedding use_rslora pissa_init pissa_iter pissa_convert "
        "create_new_adapter galore_update_interval galore_scale galore_proj_type galore_target "
        "apollo_update_interval apollo_scale apollo_proj apollo_proj_type apollo_scale_type apollo_scale_front "
        "apollo_target badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode "
        "badam_verbose moe_aux_loss_coef",
    ),
    **group(
        OBJECTIVE,
        "pref_beta pref_ftx pref_bco_weight dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma "
        "ld_alpha asft_alpha eaft_alpha ppo_score_norm ppo_target ppo_whiten_rewards ppo_epochs ppo_buffer_size "
        "reward_model_type",
    ),
    **group(
        LOADING,
        "adapter_name_or_path adapter_folder cache_dir model_revision low_cpu_mem_usage rope_scaling offload_folder "
        "hf_hub_token ms_hub_token om_hub_token trust_remote_code quantization_device_map device_map compute_dtype "
        "init_special_tokens ref_model_quantization_bit reward_model_quantization_bit ref_model_adapters "
        "reward_model_adapters use_v1_kernels model_max_length",
    ),
    **group(
        GENERATION,
        "infer_backend infer_dtype use_kv_cache eval_num_beams do_sample temperature top_p top_k num_beams max_length "
        "max_new_tokens repetition_penalty length_penalty skip_special_tokens vllm_maxlen vllm_gpu_util "
        "vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size "
        "sglang_config sglang_lora_backend",
    ),
    **group(
        SAVING,
        "export_dir export_size export_device export_quantization_bit export_quantization_dataset "
        "export_quantization_nsamples export_quantization_maxlen export_legacy_format export_hub_model_id",
    ),
    **group(
        LAUNCH,
        "ray_init_kwargs ray_run_name ray_storage_path ray_storage_filesystem resources_per_worker "
        "placement_strategy master_addr master_port",
    ),
    **group(SPEED, "fp8_backend fp8_enable_fsdp_float8_all_gather"),
    **group(FEW_BYTES, "upcast_layernorm freeze_multi_modal_projector resize_vocab image_do_pan_and_scan "
            "crop_to_patches image_min_pixels video_min_pixels audio_sampling_rate use_audio_in_video"),
}  # fmt: skip

_NOT_MODELLED: Final[dict[str, str]] = {
    "shift_attn": "shifted sparse attention",
    "mixture_of_depths": "layers that skip tokens",
    "upcast_lmhead_output": "logits are kept in fp32",
    "use_eaft_loss": "the entropy of each token is taken from the logits",
    "use_dft_loss": "probabilities are taken from the logits",
    "freeze_language_model": "only the vision part is trained; the forecast trains the language model",
    "use_mca": "Megatron-Core runs the training",
    "use_hyper_parallel": "another system runs the training",
    "hyper_parallel_args": "another system runs the training",
    "use_kt": "KTransformers holds experts in host memory",
    "kt_weight_path": "KTransformers holds experts in host memory",
    "kt_expert_checkpoint_path": "KTransformers holds experts in host memory",
    "kt_use_lora_experts": "KTransformers holds experts in host memory",
    "kt_lora_expert_num": "KTransformers holds experts in host memory",
    "kt_lora_expert_intermediate_size": "KTransformers holds experts in host memory",
    "image_max_pixels": "patches of images; give their number as --task.vision_tokens",
    "video_max_pixels": "patches of videos; give their number as --task.vision_tokens",
    "video_fps": "patches of videos; give their number as --task.vision_tokens",
    "video_maxlen": "patches of videos; give their number as --task.vision_tokens",
    "add_tokens": "new rows of the embeddings; give --method.resized_vocab",
    "add_special_tokens": "new rows of the embeddings; give --method.resized_vocab",
    "new_special_tokens_config": "new rows of the embeddings; give --method.resized_vocab",
    "block_diag_attn": "attention masks by document",
    "reward_model": "the reward model is not in the forecast",
    "oft_rank": "OFT by rank; the forecast takes oft_block_size",
}


def read(draft: Draft) -> None:
    """A configuration of `llamafactory-cli train`."""
    draft.set("framework.name", "llamafactory")
    draft.take("model_name_or_path", "model.path", draft.text)
    draft.need("model.path", "model_name_or_path is not in the file")
    if draft.has("export_dir"):
        draft.describes_no_training("it exports a model")
    elif not draft.boolean("do_train"):
        draft.describes_no_training("do_train is not on; it predicts, evaluates or serves")
    kind = _read_method(draft)
    stage = _read_task(draft)
    _read_quantisation(draft)
    _read_optimizer(draft)
    _read_lengths(draft, stage)
    _read_kernels(draft, stage)
    _read_checkpointing(draft)
    draft.take("ray_num_workers", "parallel.gpus", draft.integer)
    hf.read_arguments(draft)
    hf.assume_defaults(draft, checkpointing=True)
    _read_precision(draft, kind)
    for key, what in _NOT_MODELLED.items():
        value = draft.peek(key)
        if value is None or value is False or value == 0:
            draft.ignore(key, OFF)
        else:
            draft.not_modelled(key, what)
    draft.ignore_all(_IGNORED)


def _read_method(draft: Draft) -> str:
    kind = draft.text("finetuning_type") if draft.has("finetuning_type") else "lora"
    kinds = {"full": "full", "lora": "lora", "freeze": "layers", "oft": "oft"}
    if kind in kinds:
        draft.set("method.kind", kinds[kind])
        draft.use("finetuning_type", "method.kind")
        if not draft.has("finetuning_type"):
            del draft.findings.fields["method.kind"]
            draft.assume("method.kind", "lora", "LLaMA-Factory: finetuning_type")
    lora = "lora_rank lora_dropout lora_target use_dora additional_target"
    if kind == "lora":
        draft.take("lora_rank", "method.rank", draft.integer)
        draft.assume("method.rank", 8, "LLaMA-Factory: lora_rank")
        draft.take("lora_dropout", "method.dropout", draft.number)
        _read_targets(draft, "lora_target")
        if draft.has("use_dora"):
            draft.take("use_dora", "method.dora", draft.boolean)
        draft.take("additional_target", "method.modules_to_save", draft.texts)
    elif kind == "oft":
        draft.take("oft_block_size", "method.oft_block", draft.integer)
        draft.take("module_dropout", "method.dropout", draft.number)
        _read_targets(draft, "oft_target")
        draft.take("additional_target", "method.modules_to_save", draft.texts)
    elif kind == "freeze":
        _read_freeze(draft)
    draft.ignore_all(group(OFF, lora + " oft_block_size oft_target module_dropout freeze_trainable_layers "
                           "freeze_trainable_modules freeze_extra_modules use_llama_pro"))  # fmt: skip
    draft.take("freeze_vision_tower", "method.freeze_vision", draft.boolean)
    if draft.has("train_from_scratch") and draft.boolean("train_from_scratch"):
        draft.set("model.init", "random")
        draft.use("train_from_scratch", "model.init")
    draft.ignore("train_from_scratch", OFF)
    return kind


def _read_targets(draft: Draft, key: str) -> None:
    if draft.peek(key) in ("all", ["all"]):
        draft.set("method.targets", ("all-linear",))
        draft.use(key, "method.targets")
    draft.take(key, "method.targets", draft.texts)
    draft.assume("method.targets", ("all-linear",), f"LLaMA-Factory: {key} = all")


def _read_freeze(draft: Draft) -> None:
    if draft.has("freeze_trainable_layers"):
        draft.take("freeze_trainable_layers", "method.train_layers", lambda key: abs(draft.integer(key)))
    draft.assume("method.train_layers", 2, "LLaMA-Factory: freeze_trainable_layers")
    if draft.peek("freeze_trainable_modules", "all") in ("all", ["all"]):
        draft.use("freeze_trainable_modules", "method.kind")
    elif draft.has("freeze_trainable_modules"):
        draft.not_modelled("freeze_trainable_modules", "a part of each layer is trained; the forecast trains all of it")
    extra = draft.texts("freeze_extra_modules") if draft.has("freeze_extra_modules") else ()
    if any("embed" in name for name in extra):
        draft.set("method.train_embeddings", True)
    if any("norm" in name or "head" in name for name in extra):
        draft.set("method.train_head", True)
    if extra:
        draft.use("freeze_extra_modules", "method.train_embeddings", "method.train_head")
    if draft.has("use_llama_pro") and draft.boolean("use_llama_pro"):
        draft.not_modelled("use_llama_pro", "the trained layers stand between the others, not at the end")


def _read_task(draft: Draft) -> str:
    stage = draft.text("stage").lower() if draft.has("stage") else "sft"
    kinds = {"pt": "pretrain", "sft": "sft", "rm": "reward", "ppo": "rl", "dpo": "dpo", "kto": "kto"}
    if stage in kinds:
        kind = kinds[stage]
        if stage == "dpo" and draft.peek("pref_loss") in ("orpo", "simpo"):
            kind = draft.text("pref_loss")
        draft.set("task.kind", kind)
        draft.use("stage", "task.kind")
        if stage == "dpo":
            draft.use("pref_loss", "task.kind")
        if kind == "rl":
            draft.note(POLICY_ONLY)
    draft.ignore("pref_loss", OFF)
    if draft.has("ref_model"):
        draft.set("task.reference", "copy")
        draft.use("ref_model", "task.reference")
    draft.ignore("ref_model", EMPTY)
    if draft.has("use_asft_loss") and draft.boolean("use_asft_loss"):
        draft.set("task.reference", "copy")
        draft.use("use_asft_loss", "task.reference")
        draft.note("use_asft_loss: the loss is anchored to a frozen copy of the model")
    draft.ignore("use_asft_loss", OFF)
    return stage


def _read_quantisation(draft: Draft) -> None:
    names = "quantization_method quantization_type double_quantization"
    bits = draft.integer("quantization_bit") if draft.has("quantization_bit") else 0
    method = str(draft.peek("quantization_method") or "bnb").lower()
    if bits in (4, 8):
        kind = "int8" if bits == 8 else str(draft.peek("quantization_type") or "nf4")
        draft.set("method.base", "hqq4" if method == "hqq" and bits == 4 else kind)
        draft.use("quantization_bit", "method.base")
        draft.use("quantization_method", "method.base")
        draft.use("quantization_type", "method.base")
        if bits == 4 and method != "hqq":
            draft.take("double_quantization", "method.double_quant", draft.boolean)
            draft.assume("method.double_quant", True, "LLaMA-Factory: double_quantization")
    elif bits:
        draft.not_modelled("quantization_bit", f"weights of {bits} bits")
    draft.ignore("quantization_bit", OFF)
    draft.ignore_all(group(OFF, names))


def _read_optimizer(draft: Draft) -> None:
    for name in ("galore", "apollo"):
        if draft.has(f"use_{name}") and draft.boolean(f"use_{name}"):
            draft.set("optimizer.name", name)
            draft.use(f"use_{name}", "optimizer.name")
            draft.take(f"{name}_rank", "optimizer.rank", draft.integer)
            draft.assume("optimizer.rank", 16, f"LLaMA-Factory: {name}_rank")
            if draft.has(f"{name}_layerwise"):
                draft.take(f"{name}_layerwise", "optimizer.in_backward", draft.boolean)
        draft.ignore_all(group(OFF, f"use_{name} {name}_rank {name}_layerwise"))
    for key, name in (("use_badam", "badam"), ("use_muon", "muon")):
        if draft.has(key) and draft.boolean(key):
            draft.set("optimizer.name", name)
            draft.use(key, "optimizer.name")
        draft.ignore(key, OFF)
    if draft.peek("badam_mode") == "ratio":
        draft.not_modelled("badam_mode", "BAdam by ratio; the forecast takes it layer by layer")
    draft.ignore("badam_mode", LEARNING)
    if draft.has("use_adam_mini") and draft.boolean("use_adam_mini"):
        draft.use("use_adam_mini", "optimizer.name")
        draft.need("optimizer.name", "Adam-mini keeps a state that the forecast does not know")
    draft.ignore("use_adam_mini", OFF)


def _read_lengths(draft: Draft, stage: str) -> None:
    draft.take("cutoff_len", "data.seq_len", draft.integer)
    draft.assume("data.seq_len", 2048, "LLaMA-Factory: cutoff_len")
    for key in ("packing", "neat_packing"):
        if draft.has(key) and draft.boolean(key):
            draft.set("data.packing", True)
            draft.use(key, "data.packing")
        draft.ignore(key, OFF)
    draft.assume("data.packing", stage == "pt", "LLaMA-Factory: packing is on in pre-training only")


def _read_kernels(draft: Draft, stage: str) -> None:
    words = {"fa2": "flash", "fa3": "flash", "sdpa": "sdpa", "disabled": "eager"}
    value = draft.peek("flash_attn")
    if draft.word("flash_attn") in words:
        draft.take("flash_attn", "kernels.attention", lambda key: words[draft.text(key)])
    elif value in ("auto", None):
        draft.use("flash_attn", "kernels.attention")
        draft.assume("kernels.attention", "sdpa", "LLaMA-Factory: flash_attn = auto is SDPA with torch 2.1.1 and later")
    if draft.has("enable_liger_kernel") and draft.boolean("enable_liger_kernel"):
        loss = "fused_linear" if stage in ("pt", "sft") else "fused"  # others need the logits themselves
        for field_name in ("fused_rope", "fused_norm", "fused_mlp"):
            draft.set(f"kernels.{field_name}", True)
        draft.set("kernels.loss", loss)
        fields = ("kernels.fused_rope", "kernels.fused_norm", "kernels.fused_mlp", "kernels.loss")
        draft.use("enable_liger_kernel", *fields)
    draft.ignore("enable_liger_kernel", OFF)
    if draft.has("use_unsloth") and draft.boolean("use_unsloth"):
        draft.set("framework.name", "unsloth")
        draft.use("use_unsloth", "framework.name")
    draft.ignore("use_unsloth", OFF)


def _read_checkpointing(draft: Draft) -> None:
    """On unless disable_gradient_checkpointing; reentrant unless use_reentrant_gc is off."""
    if draft.has("disable_gradient_checkpointing"):
        draft.set("model.gradient_checkpointing", not draft.boolean("disable_gradient_checkpointing"))
        draft.use("disable_gradient_checkpointing", "model.gradient_checkpointing")
    draft.ignore("disable_gradient_checkpointing", EMPTY)
    draft.take("use_reentrant_gc", "kernels.reentrant", draft.boolean)
    if draft.known("model.gradient_checkpointing") is not False:
        draft.assume("kernels.reentrant", True, "LLaMA-Factory: use_reentrant_gc")
    if draft.has("use_unsloth_gc") and draft.boolean("use_unsloth_gc"):
        draft.set("offload.activations", "host")
        draft.use("use_unsloth_gc", "offload.activations")
    draft.ignore("use_unsloth_gc", OFF)


def _read_precision(draft: Draft, kind: str) -> None:
    """Weights are loaded in the compute dtype; trained ones are cast to fp32, but for pure_bf16, BAdam and ZeRO 3."""
    if draft.has("fp8") and draft.boolean("fp8"):
        draft.set("model.autocast", "fp8")
        draft.use("fp8", "model.autocast")
    draft.ignore("fp8", OFF)
    half: Any = draft.known("model.autocast")
    pure = draft.has("pure_bf16") and draft.boolean("pure_bf16")
    kept = pure or draft.known("optimizer.name") == "badam"
    if pure:
        half = "bf16"
        draft.use("pure_bf16", "model.dtype")
    draft.ignore("pure_bf16", OFF)
    if "model.dtype" in draft.findings.fields and not pure:
        return  # DeepSpeed's engine has cast the model
    if half is None:
        draft.assume("model.dtype", "fp32", "neither bf16 nor fp16 is on: the compute dtype is float32")
    elif kept:
        draft.set("model.dtype", "bf16" if half == "fp8" else half)
    elif kind == "full":
        draft.assume("model.dtype", "fp32", "LLaMA-Factory casts trained weights to fp32, and computes under autocast")
    else:
        draft.assume("model.dtype", "bf16" if half == "fp8" else half, "LLaMA-Factory loads the base in that dtype")
        if kind == "freeze":
            draft.assume("parallel.upcast_trained", True, "LLaMA-Factory casts trained weights to fp32")
        else:
            draft.assume("method.adapter_dtype", "fp32", "LLaMA-Factory casts trained weights to fp32")


def is_token_list(data: dict[str, Any]) -> bool:
    """A list of new special tokens: each key a token in angle brackets, each value its description."""
    return bool(data) and all(
        key.startswith("<") and key.endswith(">") and isinstance(value, str) for key, value in data.items()
    )


def read_token_list(draft: Draft) -> None:
    """new_special_tokens_config: the tokens that another configuration adds."""
    draft.describes_no_training(
        f"it lists {len(draft.data)} new special tokens, for new_special_tokens_config of another file"
    )
    for key in draft.data:
        draft.ignore(key, NO_TRAINING)
