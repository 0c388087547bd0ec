"""FSDP's keys, as Accelerate, transformers and axolotl write them (with or without `fsdp_` before each), and
Accelerate's parallelism_config.

Sources: accelerate's FullyShardedDataParallelPlugin and ParallelismConfig (1.15), transformers' fsdp_config (5.24),
axolotl's FSDPConfig (0.19).
"""

from __future__ import annotations

import math
from typing import Any, Final

from overspill.interop.configs.core import Draft
from overspill.interop.configs.reasons import FEW_BYTES, LOADING, OFF, OVERRULED, SAVING, SPEED, group

__all__ = ["read_options", "read_parallelism", "read_table"]

_STRATEGIES: Final = {
    "full_shard": "full_shard",
    "1": "full_shard",
    "shard_grad_op": "shard_grad_op",
    "2": "shard_grad_op",
    "no_shard": "no_shard",
    "3": "no_shard",
    "hybrid_shard": "hybrid_shard",
    "4": "hybrid_shard",
    "hybrid_shard_zero2": "hybrid_shard_zero2",
    "5": "hybrid_shard_zero2",
}

_IGNORED: Final[dict[str, str]] = {
    **group(LOADING, "cpu_ram_efficient_loading sync_module_states"),
    **group(SAVING, "state_dict_type final_state_dict_type"),
    **group(SPEED, "use_orig_params xla xla_fsdp_settings xla_fsdp_grad_ckpt xla_fsdp_v2"),
    **group(FEW_BYTES, "ignored_modules"),
}


def read_options(draft: Draft, options: list[str]) -> None:
    """The words of TrainingArguments' `fsdp`: a strategy, offload, auto_wrap."""
    words = [word.lower() for word in options]
    draft.set("parallel.data", "fsdp1")
    draft.set("parallel.wrap", "layer" if "auto_wrap" in words else "root")
    for word in words:
        if word in _STRATEGIES:
            _set_strategy(draft, _STRATEGIES[word])
    if "offload" in words:
        _set_offload(draft, "host")


def _set_strategy(draft: Draft, strategy: str) -> None:
    if strategy == "no_shard":
        draft.set("parallel.data", "ddp")
    elif strategy in ("shard_grad_op", "hybrid_shard_zero2"):
        draft.set("parallel.reshard_after_forward", False)
    if strategy.startswith("hybrid"):
        draft.need("parallel.replicas", "hybrid sharding holds all shards once per machine; give their number")


def _set_offload(draft: Draft, tier: str) -> None:
    for name in ("weights", "gradients", "optimizer"):
        draft.set(f"offload.{name}", tier)


def read_table(draft: Draft, key: str, *, default_version: int) -> None:
    """The table of FSDP's settings at ``key``."""
    table = draft.table(key)
    names = {name.removeprefix("fsdp_"): f"{key}.{name}" for name in table}
    version = draft.integer(names["version"]) if "version" in names and draft.has(names["version"]) else default_version
    if draft.known("parallel.data") != "ddp":
        draft.set("parallel.data", "fsdp2" if version == 2 else "fsdp1")
    if "version" in names and draft.has(names["version"]):
        draft.use(names["version"], "parallel.data")
    for name, full in names.items():
        value = draft.peek(full)
        if name == "sharding_strategy":
            _strategy_at(draft, full, version)
        elif name == "reshard_after_forward":
            _reshard_at(draft, full)
        elif name == "offload_params":
            tier = "host" if draft.boolean(full) else "device"
            _set_offload(draft, tier)
            draft.use(full, "offload.weights", "offload.gradients", "offload.optimizer")
        elif name == "cpu_offload_pin_memory":
            draft.take(full, "offload.pinned", draft.boolean)
        elif name == "auto_wrap_policy":
            _wrap_at(draft, full)
        elif name == "transformer_layer_cls_to_wrap":
            if value:
                draft.set("parallel.wrap", "layer")
                draft.use(full, "parallel.wrap")
        elif name in ("activation_checkpointing", "activation_checkpointing_offload"):
            _checkpointing_at(draft, name, full)
        elif name == "backward_prefetch":
            if str(value).upper() in ("BACKWARD_PRE", "1", "NONE"):
                draft.ignore(full, SPEED)
            else:
                draft.not_modelled(full, "the forecast counts the unit that BACKWARD_PRE gathers ahead")
        elif name == "forward_prefetch":
            if draft.boolean(full):
                draft.not_modelled(full, "one more unit is gathered ahead in the forward")
        elif name == "limit_all_gathers":
            if draft.boolean(full):
                draft.ignore(full, SPEED)
            else:
                draft.not_modelled(full, "without a limit the processor may run ahead and gather more units")
        elif name == "mixed_precision_policy":
            _precision_at(draft, full)
        elif name == "min_num_params" and value and draft.number(full) > 0:
            draft.not_modelled(full, "units by size; the forecast wraps each layer")
        if name in _KNOWN:
            draft.ignore(full, _IGNORED.get(name, OFF))
    draft.assume("parallel.wrap", "layer", "FSDP units are the layers that the model names as not to be split")


_KNOWN: Final = {
    *_IGNORED,
    "version",
    "sharding_strategy",
    "reshard_after_forward",
    "offload_params",
    "cpu_offload_pin_memory",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "activation_checkpointing",
    "activation_checkpointing_offload",
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "mixed_precision_policy",
    "min_num_params",
}


def _strategy_at(draft: Draft, full: str, version: int) -> None:
    strategy = _STRATEGIES.get(str(draft.peek(full)).lower())
    if strategy is None:
        draft.ignore(full, OFF)
    elif version == 2:
        draft.ignore(full, OVERRULED)  # FSDP2 has reshard_after_forward instead
    else:
        _set_strategy(draft, strategy)
        draft.use(full, "parallel.data", "parallel.reshard_after_forward")


def _reshard_at(draft: Draft, full: str) -> None:
    value: Any = draft.peek(full)
    if isinstance(value, str) and value.lower() in _STRATEGIES:  # FSDP1 in newer files
        _set_strategy(draft, _STRATEGIES[value.lower()])
        draft.use(full, "parallel.data", "parallel.reshard_after_forward")
    elif value is not None:
        draft.take(full, "parallel.reshard_after_forward", draft.boolean)


def _wrap_at(draft: Draft, full: str) -> None:
    policy = str(draft.peek(full)).upper()
    if policy in ("TRANSFORMER_BASED_WRAP", "NO_WRAP"):
        draft.set("parallel.wrap", "layer" if policy == "TRANSFORMER_BASED_WRAP" else "root")
        draft.use(full, "parallel.wrap")
    elif policy == "SIZE_BASED_WRAP":
        draft.not_modelled(full, "units by size; the forecast wraps each layer")


def _checkpointing_at(draft: Draft, name: str, full: str) -> None:
    if draft.boolean(full):
        draft.set("model.gradient_checkpointing", True)
        fields = ["model.gradient_checkpointing"]
        if name.endswith("offload"):
            draft.set("offload.activations", "host")
            fields.append("offload.activations")
        draft.use(full, *fields)


def _precision_at(draft: Draft, full: str) -> None:
    value = draft.peek(full)
    if isinstance(value, str) and value.lower() in ("bf16", "fp16", "fp32"):
        draft.set("parallel.param_dtype", value.lower())
        draft.set("parallel.reduce_dtype", value.lower())
        draft.use(full, "parallel.param_dtype", "parallel.reduce_dtype")
        return
    if isinstance(value, dict):
        words = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16", "fp16": "fp16"}
        for key in value:
            dtype = words.get(str(value[key]).removeprefix("torch."))
            if key in ("param_dtype", "reduce_dtype") and dtype:
                draft.set(f"parallel.{key}", dtype)
                draft.use(f"{full}.{key}", f"parallel.{key}")
            else:
                draft.ignore(f"{full}.{key}", FEW_BYTES)


def read_parallelism(draft: Draft, key: str) -> None:
    """Accelerate's parallelism_config: sizes of the mesh, with or without `parallelism_config_` before each."""
    if draft.peek(key) is None or not isinstance(draft.peek(key), dict):
        draft.ignore(key, OFF)
        return
    names = {name.removeprefix("parallelism_config_"): f"{key}.{name}" for name in draft.table(key)}
    fields = {
        "dp_replicate_size": "parallel.replicas",
        "tp_size": "parallel.tensor",
        "cp_size": "parallel.context",
        "sp_size": "parallel.ulysses",
    }
    sizes = []
    for name, full in names.items():
        if name in fields:
            draft.take(full, fields[name], draft.integer)
            sizes.append(draft.integer(full) if draft.has(full) else 1)
        elif name == "dp_shard_size":
            sizes.append(draft.integer(full) if draft.has(full) else 1)
            draft.use(full, "parallel.gpus")
        elif name.startswith(("cp_", "sp_", "tp_")):  # backends and the like
            draft.ignore(full, SPEED)
    if all(size > 0 for size in sizes) and math.prod(sizes) > 1:
        draft.assume("parallel.gpus", math.prod(sizes), "the product of the sizes in parallelism_config")
