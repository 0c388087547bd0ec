"""TRL's scripts (`trl sft --config`, alignment-handbook recipes): TrainingArguments, ModelConfig, ScriptArguments.

Sources: trl 1.16 (trainer/*_config.py, trainer/model_config.py, scripts/utils.py), and the names that 0.x used
(torch_dtype, max_seq_length, use_bnb_nested_quant).
"""

from __future__ import annotations

from typing import Any, Final

from overspill.interop.configs import hf_training_arguments as hf
from overspill.interop.configs.core import Draft
from overspill.interop.configs.reasons import (
    DATA,
    EMPTY,
    GENERATION,
    LEARNING,
    LOADING,
    LOGGING,
    OBJECTIVE,
    OFF,
    OVERRULED,
    POLICY_ONLY,
    SPEED,
    TOKENS,
    group,
)

__all__ = ["MARKS", "attention", "read", "read_dtype"]

#: Keys that TrainingArguments have not.
MARKS: Final = (
    "dataset_mixture", "dataset_name", "dataset_mixer", "use_peft", "lora_r", "max_seq_length", "max_length",
    "torch_dtype", "dtype", "attn_implementation", "model_name_or_path", "packing", "lora_target_modules",
)  # fmt: skip

_IGNORED: Final[dict[str, str]] = {
    **group(
        DATA,
        "dataset_mixture dataset_mixer dataset_name dataset_config dataset_configs dataset_train_split "
        "dataset_test_split dataset_streaming dataset_num_proc dataset_kwargs dataset_text_field dataset_splits "
        "dataset_batch_size datasets test_split_size shuffle_dataset streaming num_proc preprocessing_num_workers "
        "skip_prepare_dataset formatting_func eval_packing packing_strategy num_of_sequences chars_per_token "
        "truncation_mode text_column columns auto_insert_empty_system_msg",
    ),
    **group(TOKENS, "chat_template chat_template_path eos_token pad_token tokenizer_name_or_path padding_value "
            "label_pad_token_id max_prompt_length max_completion_length max_target_length is_encoder_decoder"),
    **group(
        LEARNING,
        "lora_alpha use_rslora lora_task_type lora_bias base_model_revision model_adapter_name ref_adapter_name",
    ),
    **group(
        OBJECTIVE,
        "beta label_smoothing desirable_weight undesirable_weight center_rewards_coefficient simpo_gamma cpo_alpha "
        "alpha f_divergence_type f_alpha_divergence_coef loss_weights ld_alpha rpo_alpha discopop_tau "
        "use_weighting completion_only_loss assistant_only_loss router_aux_loss_coef force_use_ref_model "
        "reference_free loss_type orpo_alpha",
    ),
    **group(LOADING, "model_revision trust_remote_code model_init_kwargs ref_model_init_kwargs model_code_revision "
            "use_auth_token cache_dir low_cpu_mem_usage"),
    **group(SPEED, "pad_to_multiple_of ignore_bias_buffers precompute_ref_batch_size"),
    **group(GENERATION, "generate_during_eval max_new_tokens temperature top_p top_k min_p repetition_penalty "
            "generation_kwargs cache_implementation system_prompt"),
    **group(LOGGING, "log_completions num_completions_to_print log_unique_prompts log_multimodal benchmarks callbacks "
            "log_completions_hub_repo"),
}  # fmt: skip

#: Keys of one trainer only, by which the task is known; TRL's YAML does not say which script it is for.
_BY_KEY: Final = (
    ("num_generations", "rl"),
    ("reward_funcs", "rl"),
    ("desirable_weight", "kto"),
    ("undesirable_weight", "kto"),
    ("center_rewards_coefficient", "reward"),
    ("precompute_ref_log_probs", "dpo"),
    ("rpo_alpha", "dpo"),
    ("max_seq_length", "sft"),
    ("packing", "sft"),
    ("assistant_only_loss", "sft"),
    ("completion_only_loss", "sft"),
    ("dataset_text_field", "sft"),
    ("beta", "dpo"),
)
_RL: Final = group(
    GENERATION,
    "num_generations num_generations_eval steps_per_generation generation_batch_size num_iterations epsilon "
    "epsilon_high delta scale_rewards reward_weights reward_funcs sync_ref_model ref_model_mixup_alpha "
    "ref_model_sync_steps importance_sampling_level mask_truncated_completions ds3_gather_for_generation "
    "use_vllm vllm_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_server_host vllm_server_port "
    "vllm_server_timeout vllm_server_base_url vllm_enable_sleep_mode vllm_model_impl vllm_group_port "
    "top_entropy_quantile entropy_coef cosine_min_value_wrong cosine_max_len reward_clip_range normalize_advantages",
)


def read(draft: Draft) -> None:
    """A configuration of one of TRL's scripts."""
    draft.set("framework.name", "trl")
    draft.take("model_name_or_path", "model.path", draft.text)
    draft.need("model.path", "model_name_or_path is not in the file")
    kind = _read_task(draft)
    for key in ("torch_dtype", "dtype"):
        read_dtype(draft, key)
    attention(draft, "attn_implementation")
    _read_lengths(draft, kind)
    _read_peft(draft)
    hf.read_arguments(draft)
    hf.assume_defaults(draft, checkpointing=True)
    draft.assume("model.dtype", "fp32", "no dtype is given; TRL 1 loads float32, as transformers 4 did")
    if not draft.has("bf16") and "model.autocast" not in draft.findings.fields:
        draft.assume("model.autocast", "bf16", "TRL: bf16 is on where the card has it and fp16 is not asked for")
    if kind == "rl":
        draft.ignore_all(_RL)
    draft.ignore_all(_IGNORED)


def _read_task(draft: Draft) -> str:
    kind: Any = draft.findings.flags.get("task.kind")
    if kind is None:
        by = next(((key, one) for key, one in _BY_KEY if draft.has(key)), None)
        if by is None:
            draft.assume("task.kind", "sft", "no key names another trainer")
            return "sft"
        key, kind = by
        why = f"{key} is a key of that trainer"
        if key == "beta":
            why = "beta is a key of DPO, ORPO, CPO and KTO, and the file does not say which; give --task"
            draft.note(f"task.kind: {why}")
        draft.assume("task.kind", kind, why)
    if kind == "rl":
        draft.note(POLICY_ONLY)
    if kind in ("dpo", "kto") and draft.boolean("precompute_ref_log_probs"):
        draft.set("task.reference", "precomputed")
        draft.use("precompute_ref_log_probs", "task.reference")
    draft.ignore("precompute_ref_log_probs", OFF)
    if draft.has("model_ref") or draft.has("ref_model"):
        for key in ("model_ref", "ref_model"):
            draft.set("task.reference", "copy")
            draft.use(key, "task.reference")
    if draft.has("sync_ref_model"):
        draft.ignore("sync_ref_model", OFF)
        draft.ignore_all(group(OFF, "ref_model_mixup_alpha ref_model_sync_steps"))
    return str(kind)


def read_dtype(draft: Draft, key: str) -> None:
    """dtype that weights are loaded in; "auto" is the checkpoint's own, which is bf16 for nearly all."""
    words = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "bf16": "bf16",
             "fp16": "fp16", "fp32": "fp32"}  # fmt: skip
    if not draft.has(key):
        draft.ignore(key, EMPTY)
        return
    word = draft.text(key).removeprefix("torch.")
    if word == "auto":
        draft.assume("model.dtype", "bf16", f"{key} = auto is the checkpoint's dtype, bf16 for most models")
        draft.use(key, "model.dtype")
    elif word in words:
        draft.take(key, "model.dtype", lambda _: words[word])


def attention(draft: Draft, key: str) -> None:
    """attn_implementation, as transformers names it."""
    if not draft.has(key):
        draft.ignore(key, EMPTY)
        draft.assume("kernels.attention", "sdpa", "transformers' default where the model has it")
        return
    word = draft.text(key)
    known = {"eager": "eager", "sdpa": "sdpa", "flex_attention": "flex"}
    if "flash" in word or word == "fa2":
        draft.take(key, "kernels.attention", lambda _: "flash")
    elif word in known:
        draft.take(key, "kernels.attention", lambda _: known[word])


def _read_lengths(draft: Draft, kind: str) -> None:
    for key in ("max_seq_length", "max_length"):
        draft.take(key, "data.seq_len", draft.integer)
    draft.assume("data.seq_len", 1024, "TRL: max_length")
    if draft.has("packing"):
        draft.take("packing", "data.packing", draft.boolean)
    draft.ignore("packing", EMPTY)
    draft.assume("data.packing", False, "TRL: packing is off")
    if draft.has("padding_free") and draft.boolean("padding_free"):
        draft.set("data.packing", True)
        draft.use("padding_free", "data.packing")
    draft.ignore("padding_free", OFF)


def _read_peft(draft: Draft) -> None:
    """use_peft with lora_*, and quantisation by bitsandbytes."""
    on = draft.has("use_peft") and draft.boolean("use_peft")
    lora_keys = "lora_r lora_dropout lora_target_modules lora_modules_to_save use_dora lora_target_parameters"
    if on:
        draft.set("method.kind", "lora")
        draft.use("use_peft", "method.kind")
        draft.take("lora_r", "method.rank", draft.integer)
        draft.assume("method.rank", 16, "TRL: lora_r")
        draft.take("lora_dropout", "method.dropout", draft.number)
        draft.assume("method.dropout", 0.05, "TRL: lora_dropout")
        if draft.peek("lora_target_modules") in ("all-linear", ["all-linear"]):
            draft.set("method.targets", ("all-linear",))
            draft.use("lora_target_modules", "method.targets")
        draft.take("lora_target_modules", "method.targets", draft.texts)
        if draft.known("method.targets") is None:
            draft.note("lora_target_modules is not given: peft's own list for the architecture is taken")
        draft.take("lora_modules_to_save", "method.modules_to_save", draft.texts)
        draft.take("use_dora", "method.dora", draft.boolean)
        if draft.has("lora_target_parameters"):
            draft.not_modelled("lora_target_parameters", "pairs on parameters that are no modules")
    else:
        draft.ignore("use_peft", OFF)
    draft.ignore_all(group(OFF if not on else EMPTY, lora_keys))
    _read_quantisation(draft, on)


def _read_quantisation(draft: Draft, on: bool) -> None:
    if draft.has("load_in_4bit") and draft.boolean("load_in_4bit"):
        kind = draft.text("bnb_4bit_quant_type") if draft.has("bnb_4bit_quant_type") else "nf4"
        draft.set("method.base", kind)
        draft.use("load_in_4bit", "method.base")
        draft.use("bnb_4bit_quant_type", "method.base")
        draft.take("use_bnb_nested_quant", "method.double_quant", draft.boolean)
        draft.assume("method.double_quant", False, "TRL: use_bnb_nested_quant")
        read_storage(draft, "bnb_4bit_quant_storage")
        if not on:
            draft.note("load_in_4bit without use_peft: weights are quantised and cannot be trained in full")
    elif draft.has("load_in_8bit") and draft.boolean("load_in_8bit"):
        draft.set("method.base", "int8")
        draft.use("load_in_8bit", "method.base")
    draft.ignore_all(
        group(OFF, "load_in_4bit load_in_8bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage")
    )
    draft.ignore_all(group(OVERRULED, "bnb_4bit_compute_dtype"))


def read_storage(draft: Draft, key: str) -> None:
    """dtype in which packed 4-bit weights are kept: uint8 unless FSDP asks for another."""
    words = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    word = str(draft.peek(key)).removeprefix("torch.")
    if word in words:
        draft.take(key, "method.quant_storage", lambda _: words[word])
    draft.ignore(key, EMPTY)
