"""axolotl's YAML. Source: its schemas (0.19: utils/schemas/*.py, integrations/*/args.py) and what its loaders make of
them: weights are loaded in bf16 where bf16 is on, 4-bit weights are nf4 with quantised scales.
"""

from __future__ import annotations

import math
from typing import Any, Final

from overspill.interop.configs import axolotl_keys, fsdp
from overspill.interop.configs import hf_training_arguments as hf
from overspill.interop.configs.core import Draft
from overspill.interop.configs.optimizers import NAMES, set_optimizer
from overspill.interop.configs.patterns import module_ends
from overspill.interop.configs.reasons import (
    DATA,
    EMPTY,
    FEW_BYTES,
    LEARNING,
    OFF,
    OVERRULED,
    POLICY_ONLY,
    SPEED,
    group,
)
from overspill.interop.configs.trl import attention

__all__ = ["MARKS", "read"]

MARKS: Final = ("base_model", "sequence_len", "adapter", "micro_batch_size", "val_set_size", "pretraining_dataset")

_RL: Final = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "simpo",
              "grpo": "rl", "gdpo": "rl", "ebft": "rl"}  # fmt: skip


def read(draft: Draft) -> None:
    """An axolotl configuration."""
    draft.set("framework.name", "axolotl")
    draft.take("base_model", "model.path", draft.text)
    draft.need("model.path", "base_model is not in the file")
    _read_precision(draft)
    _read_adapter(draft)
    _read_task(draft)
    _read_batches(draft)
    _read_optimizer(draft)
    _read_checkpointing(draft)
    _read_kernels(draft)
    _read_parallel(draft)
    for key, what in axolotl_keys.NOT_MODELLED.items():
        value = draft.peek(key)
        if value is None or value is False or value == [] or value == {}:
            draft.ignore(key, OFF)
        else:
            draft.not_modelled(key, what)
    draft.ignore_all(axolotl_keys.IGNORED)


def _read_precision(draft: Draft) -> None:
    """torch_dtype follows bf16; with `auto` it is bf16 on a card that has it (resolve_dtype)."""
    value = draft.peek("bf16", "auto")
    if draft.has("fp8") and draft.boolean("fp8"):
        draft.set("model.autocast", "fp8")
        draft.use("fp8", "model.autocast")
    draft.ignore("fp8", OFF)
    on16 = [key for key in ("fp16", "float16") if draft.has(key) and draft.boolean(key)]
    pure = value == "full"
    half = value in ("auto", "full", None) or draft.boolean("bf16")
    if draft.has("bfloat16") and draft.boolean("bfloat16"):
        half = True
        draft.use("bfloat16", "model.dtype", "model.autocast")
    if on16 and value in ("auto", None, False):
        half = False
    if half:
        draft.set("model.dtype", "bf16")
        if not pure and draft.known("model.autocast") is None:
            draft.set("model.autocast", "bf16")
        draft.use("bf16", "model.dtype", "model.autocast")
        if value in ("auto", None):
            del draft.findings.fields["model.dtype"]
            draft.assume("model.dtype", "bf16", "axolotl: bf16 = auto is bf16 on a card that has it")
    elif on16:
        draft.set("model.dtype", "fp16")
        draft.set("model.autocast", "fp16")
        for key in on16:
            draft.use(key, "model.dtype", "model.autocast")
    else:
        draft.assume("model.dtype", "fp32", "axolotl: neither bf16 nor fp16")
    draft.ignore_all(group(OFF, "bf16 fp16 bfloat16 float16 float32"))


def _read_adapter(draft: Draft) -> None:
    kind = draft.peek("adapter")
    if kind in ("lora", "qlora"):
        draft.set("method.kind", "lora")
        draft.use("adapter", "method.kind")
        _read_lora(draft)
    elif kind in ("llama-adapter", "llama_adapter"):
        draft.take("adapter", "method.kind", lambda _: "adapter")
    else:
        draft.ignore("adapter", OFF) if kind is None else None
    if draft.has("load_in_4bit") and draft.boolean("load_in_4bit"):
        draft.set("method.base", "nf4")
        draft.use("load_in_4bit", "method.base")
        draft.assume("method.double_quant", True, "axolotl: bnb_4bit_use_double_quant")
        draft.assume("method.quant_storage", "bf16", "axolotl: bnb_4bit_quant_storage")
        if kind is None:
            draft.note("load_in_4bit without an adapter: quantised weights cannot be trained in full")
    elif draft.has("load_in_8bit") and draft.boolean("load_in_8bit"):
        draft.set("method.base", "int8")
        draft.use("load_in_8bit", "method.base")
    elif draft.has("gptq") and draft.boolean("gptq"):
        draft.set("method.base", "gptq4")
        draft.use("gptq", "method.base")
    if draft.has("quantize_moe_experts"):
        draft.take("quantize_moe_experts", "method.quantised_experts", draft.boolean)
    if draft.has("reinit_weights") and draft.boolean("reinit_weights"):
        draft.set("model.init", "random")
        draft.use("reinit_weights", "model.init")
    draft.ignore_all(group(OFF, "load_in_4bit load_in_8bit gptq quantize_moe_experts reinit_weights"))
    draft.ignore_all(group(OFF, axolotl_keys.LORA))


def _read_lora(draft: Draft) -> None:
    draft.take("lora_r", "method.rank", draft.integer)
    draft.need("method.rank", "axolotl needs lora_r")
    draft.take("lora_dropout", "method.dropout", draft.number)
    modules: Any = draft.peek("lora_target_modules")
    if draft.has("lora_target_linear") and draft.boolean("lora_target_linear"):
        draft.set("method.targets", ("all-linear",))
        draft.use("lora_target_linear", "method.targets")
        draft.ignore("lora_target_modules", OVERRULED)
    elif isinstance(modules, str) and modules != "all-linear":
        draft.set("method.targets", module_ends(modules))
        draft.use("lora_target_modules", "method.targets")
        draft.note("lora_target_modules is a pattern: modules are counted by the ends that it allows")
    elif modules:
        draft.take("lora_target_modules", "method.targets", draft.texts)
    draft.take("lora_modules_to_save", "method.modules_to_save", draft.texts)
    if draft.has("peft_use_dora"):
        draft.take("peft_use_dora", "method.dora", draft.boolean)


def _read_task(draft: Draft) -> None:
    if draft.has("rl"):
        kind = _RL.get(draft.text("rl").lower())
        if kind:
            draft.set("task.kind", kind)
            draft.use("rl", "task.kind")
        else:
            draft.use("rl", "task.kind")
            draft.need("task.kind", f"rl = {draft.peek('rl')} is not a method that the forecast knows")
        if kind == "rl":
            draft.note(POLICY_ONLY)
    elif any(draft.has(key) and draft.boolean(key) for key in ("reward_model", "process_reward_model")):
        draft.set("task.kind", "reward")
        draft.use("reward_model", "task.kind")
        draft.use("process_reward_model", "task.kind")
    elif draft.has("pretraining_dataset"):
        draft.set("task.kind", "pretrain")
        draft.use("pretraining_dataset", "task.kind")
    else:
        draft.assume("task.kind", "sft", "axolotl: no rl, reward_model or pretraining_dataset")
    draft.ignore_all(group(OFF, "rl reward_model process_reward_model"))
    draft.ignore("pretraining_dataset", DATA)
    if draft.has("precompute_ref_log_probs") and draft.boolean("precompute_ref_log_probs"):
        draft.set("task.reference", "precomputed")
        draft.use("precompute_ref_log_probs", "task.reference")
    draft.ignore("precompute_ref_log_probs", OFF)
    for key in ("neftune_noise_alpha", "noisy_embedding_alpha"):
        if draft.has(key):
            draft.set("task.neftune", True)
            draft.use(key, "task.neftune")
        draft.ignore(key, OFF)


def _read_batches(draft: Draft) -> None:
    draft.take("sequence_len", "data.seq_len", draft.integer)
    draft.assume("data.seq_len", 512, "axolotl: sequence_len")
    draft.take("sample_packing", "data.packing", draft.boolean)
    draft.assume("data.packing", False, "axolotl: sample_packing is off")
    draft.take("micro_batch_size", "train.micro_batch", draft.integer)
    draft.assume("train.micro_batch", 1, "axolotl: micro_batch_size")
    draft.take("gradient_accumulation_steps", "train.accumulation", draft.integer)
    if draft.has("batch_size"):
        rows, micro = draft.integer("batch_size"), int(draft.known("train.micro_batch") or 1)
        if draft.known("train.accumulation") is None and micro > 0 and rows % micro == 0:
            draft.set("train.accumulation", rows // micro)
            draft.use("batch_size", "train.accumulation")
        draft.ignore("batch_size", OVERRULED)
    draft.assume("train.accumulation", 1, "axolotl: gradient_accumulation_steps")
    draft.take("eval_batch_size", "evaluation.micro_batch", draft.integer)
    draft.take("seed", "train.seed", draft.integer)
    draft.take("dataloader_num_workers", "data.num_workers", draft.integer)
    steps = draft.integer("max_steps") if draft.has("max_steps") else -1
    if steps > 0:
        draft.take("max_steps", "train.steps", draft.integer)
        draft.ignore("num_epochs", OVERRULED)
    draft.ignore("max_steps", OFF)
    draft.take("num_epochs", "train.epochs", draft.number)
    for key, field_name in (("eval_steps", "train.eval_every"), ("save_steps", "train.save_every")):
        if draft.has(key) and draft.number(key) >= 1:
            draft.take(key, field_name, draft.integer)
        draft.ignore(key, LEARNING)


def _read_optimizer(draft: Draft) -> None:
    if draft.has("optimizer"):
        set_optimizer(draft, "optimizer", NAMES)
    draft.assume("optimizer.name", "adamw", "axolotl: optimizer = adamw_torch_fused")
    if draft.known("optimizer.name") is None:
        draft.assume("optimizer.implementation", "fused", "axolotl: optimizer = adamw_torch_fused")
    draft.ignore("optimizer", EMPTY)
    draft.take("learning_rate", "optimizer.lr", draft.number)
    draft.take("weight_decay", "optimizer.weight_decay", draft.number)
    draft.take("adam_epsilon", "optimizer.eps", draft.number)
    draft.take("max_grad_norm", "optimizer.max_grad_norm", draft.number)
    draft.assume("optimizer.max_grad_norm", 1.0, "TrainingArguments: max_grad_norm")
    if draft.has("adam_beta1") or draft.has("adam_beta2"):
        first = draft.number("adam_beta1") if draft.has("adam_beta1") else 0.9
        second = draft.number("adam_beta2") if draft.has("adam_beta2") else 0.999
        draft.set("optimizer.betas", [first, second])
        draft.use("adam_beta1", "optimizer.betas")
        draft.use("adam_beta2", "optimizer.betas")
    draft.ignore_all(group(EMPTY, "adam_beta1 adam_beta2"))
    kinds = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}
    if draft.word("lr_scheduler") in kinds:
        draft.take("lr_scheduler", "schedule.kind", lambda key: kinds[draft.text(key)])
    draft.ignore("lr_scheduler", LEARNING)
    draft.take("cosine_min_lr_ratio", "schedule.min_lr_ratio", draft.number)
    if draft.has("warmup_steps") and draft.number("warmup_steps") >= 1:
        draft.take("warmup_steps", "schedule.warmup_steps", draft.integer)
    draft.ignore("warmup_steps", LEARNING)


def _read_checkpointing(draft: Draft) -> None:
    value = draft.peek("gradient_checkpointing")
    key = "gradient_checkpointing"
    if isinstance(value, str) and value in ("offload", "unsloth", "offload_disk"):
        draft.set("model.gradient_checkpointing", True)
        draft.set("offload.activations", "disk" if value == "offload_disk" else "host")
        draft.use(key, "model.gradient_checkpointing", "offload.activations")
    elif value is not None:
        draft.take(key, "model.gradient_checkpointing", draft.boolean)
    draft.ignore(key, EMPTY)
    draft.assume("model.gradient_checkpointing", False, "axolotl: gradient_checkpointing")
    for name in draft.table("gradient_checkpointing_kwargs"):
        full = f"gradient_checkpointing_kwargs.{name}"
        if name == "use_reentrant":
            draft.take(full, "kernels.reentrant", draft.boolean)
        elif name in ("preserve_rng_state", "determinism_check", "debug", "early_stop"):
            draft.ignore(full, FEW_BYTES)
    if draft.known("model.gradient_checkpointing") and not draft.has("rl") and not draft.has("unfrozen_parameters"):
        draft.assume("kernels.reentrant", True, "axolotl: use_reentrant, without gradient_checkpointing_kwargs")
    mode = draft.peek("activation_offloading")
    if mode in ("legacy", "disk", "hidden_states") or (mode is not None and draft.boolean("activation_offloading")):
        draft.set("offload.activations", "disk" if mode == "disk" else "host")
        fields = ["offload.activations"]
        if mode != "hidden_states" and draft.known("method.kind") == "lora":
            draft.set("model.gradient_checkpointing", False)
            fields.append("model.gradient_checkpointing")
            draft.note("axolotl turns checkpointing off where activations are offloaded and adapters are trained")
        draft.use("activation_offloading", *fields)
    draft.ignore("activation_offloading", OFF)
    if draft.has("selective_checkpointing"):
        draft.set("kernels.checkpointing", "selective_op")
        draft.use("selective_checkpointing", "kernels.checkpointing")
    draft.ignore("selective_checkpointing", OFF)


def _read_kernels(draft: Draft) -> None:
    old = {"flash_attention": "flash", "sdp_attention": "sdpa", "flex_attention": "flex", "eager_attention": "eager",
           "xformers_attention": "flash"}  # fmt: skip
    for key, word in old.items():
        if draft.has(key) and draft.boolean(key):
            draft.set("kernels.attention", word)
            draft.use(key, "kernels.attention")
        draft.ignore(key, OFF)
    attention(draft, "attn_implementation")
    plugins = " ".join(draft.texts("plugins")).lower() if draft.has("plugins") else ""
    fields = []
    if "cut_cross_entropy" in plugins and draft.boolean("cut_cross_entropy", True):
        draft.set("kernels.loss", "fused_linear")
        draft.use("cut_cross_entropy", "kernels.loss")
        fields.append("kernels.loss")
    if "liger" in plugins:
        fields += _read_liger(draft)
    if fields:
        draft.use("plugins", *dict.fromkeys(fields))
    for name in draft.texts("plugins") if draft.has("plugins") else ():
        if not any(word in name.lower() for word in ("cut_cross_entropy", "liger")):
            draft.note(f"plugins: {name} changes nothing in the forecast by itself")
    draft.ignore_all(group(OFF, "plugins cut_cross_entropy liger_layer_norm liger_kernel_impl " + " ".join(_LIGER)))
    for key, loss in (("chunked_cross_entropy", "chunked"), ("flash_attn_cross_entropy", "fused"),
                      ("unsloth_cross_entropy_loss", "fused")):  # fmt: skip
        if draft.has(key) and draft.boolean(key):
            draft.set("kernels.loss", loss)
            draft.use(key, "kernels.loss")
        draft.ignore(key, OFF)
    if draft.has("torch_compile"):
        draft.take("torch_compile", "kernels.compile", lambda key: draft.peek(key) == "auto" or draft.boolean(key))
    draft.ignore("torch_compile", OFF)
    if draft.has("tiled_mlp"):
        draft.take("tiled_mlp", "kernels.tiled_mlp", draft.boolean)
    draft.ignore_all(group(OFF, "tiled_mlp"))


_LIGER: Final[dict[str, tuple[str, Any]]] = {
    "liger_rope": ("kernels.fused_rope", True),
    "liger_rms_norm": ("kernels.fused_norm", True),
    "liger_glu_activation": ("kernels.fused_mlp", True),
    "liger_swiglu": ("kernels.fused_mlp", True),
    "liger_cross_entropy": ("kernels.loss", "fused"),
    "liger_fused_linear_cross_entropy": ("kernels.loss", "fused_linear"),
}


def _read_liger(draft: Draft) -> list[str]:
    fields = []
    for key, (field_name, value) in _LIGER.items():
        if draft.has(key) and draft.boolean(key):
            draft.set(field_name, value)
            draft.use(key, field_name)
            fields.append(field_name)
    draft.ignore_all(group(SPEED, "liger_layer_norm liger_use_token_scaling liger_rms_norm_gated liger_kernel_impl"))
    return fields


def _read_parallel(draft: Draft) -> None:
    hf.read_deepspeed(draft)
    words: Any = draft.peek("fsdp")
    version = draft.integer("fsdp_version") if draft.has("fsdp_version") else None
    if words or draft.peek("fsdp_config"):
        if isinstance(words, list | str) and words:
            fsdp.read_options(draft, words.split() if isinstance(words, str) else [str(word) for word in words])
            draft.use("fsdp", "parallel.data")
        if version is not None:
            draft.use("fsdp_version", "parallel.data")
        draft.ignore("fsdp", EMPTY)
        fsdp.read_table(draft, "fsdp_config", default_version=version or 1)
    draft.ignore_all(group(OFF, "fsdp fsdp_config fsdp_version fsdp_final_state_dict_type"))
    sizes = []
    for key, field_name in (
        ("dp_shard_size", ""),
        ("dp_replicate_size", "parallel.replicas"),
        ("tensor_parallel_size", "parallel.tensor"),
        ("context_parallel_size", "parallel.context"),
        ("sequence_parallel_degree", "parallel.context"),
        ("expert_parallel_size", "parallel.expert"),
    ):
        if not draft.has(key):
            draft.ignore(key, EMPTY)
            continue
        if field_name:
            draft.take(key, field_name, draft.integer)
        else:
            draft.use(key, "parallel.gpus")
        if field_name != "parallel.expert":
            sizes.append(max(1, draft.integer(key)))
    for key in ("world_size", "ray_num_workers"):
        draft.take(key, "parallel.gpus", draft.integer)
    product = math.prod(sizes)
    why = "the product of the parallel sizes" if product > 1 else "the file names no number of processes; give --gpus"
    draft.assume("parallel.gpus", product, why)
