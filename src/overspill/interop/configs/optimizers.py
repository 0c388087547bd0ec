"""Names of optimizers in other frameworks, as fields of a Job's [optimizer]: one table for all readers.

Sources: transformers' OptimizerNames (5.24), axolotl's CustomSupportedOptimizers (0.19), torchtune's recipes (0.6),
DeepSpeed's engine (0.17). A name whose state has no counterpart in the Job (AdEMAMix holds three moments, Adam-mini one
number a block) is refused by name, never read as another optimizer.
"""

from __future__ import annotations

from typing import Any, Final

from overspill.interop.configs.core import Draft

__all__ = ["COMPONENTS", "NAMES", "set_optimizer"]


def _as(name: str, **others: Any) -> dict[str, Any]:
    return {"optimizer.name": name, **{f"optimizer.{key}": value for key, value in others.items()}}


#: `optim` of TrainingArguments, `optimizer` of axolotl.
NAMES: Final[dict[str, dict[str, Any]]] = {
    "adamw_torch": _as("adamw"),
    "adamw_torch_xla": _as("adamw"),
    "adamw_torch_fused": _as("adamw", implementation="fused"),
    "adamw_torch_npu_fused": _as("adamw", implementation="fused"),
    "adamw_apex_fused": _as("adamw", implementation="fused"),
    "adamw_hf": _as("adamw", implementation="for_loop"),
    "adamw_anyprecision": _as("adamw", implementation="for_loop", state_dtype="fp32"),
    "adamw_bnb_8bit": _as("adamw_8bit"),
    "adamw_8bit": _as("adamw_8bit"),
    "adamw_torch_8bit": _as("adamw_8bit"),
    "ao_adamw_8bit": _as("adamw_8bit"),
    "adamw_torch_4bit": _as("adamw_4bit"),
    "ao_adamw_4bit": _as("adamw_4bit"),
    "ao_adamw_fp8": _as("adamw_fp8"),
    "paged_adamw": _as("adamw", paged=True),
    "paged_adamw_32bit": _as("adamw", paged=True),
    "paged_adamw_8bit": _as("adamw_8bit", paged=True),
    "adafactor": _as("adafactor"),
    "adagrad": _as("adagrad"),
    "sgd": _as("sgd"),
    "lion": _as("lion"),
    "lion_32bit": _as("lion"),
    "lion_8bit": _as("lion_8bit"),
    "paged_lion": _as("lion", paged=True),
    "paged_lion_32bit": _as("lion", paged=True),
    "paged_lion_8bit": _as("lion_8bit", paged=True),
    "rmsprop": _as("rmsprop"),
    "rmsprop_bnb": _as("rmsprop"),
    "rmsprop_bnb_32bit": _as("rmsprop"),
    "galore_adamw": _as("galore"),
    "galore_adamw_layerwise": _as("galore", in_backward=True),
    "apollo_adamw": _as("apollo"),
    "apollo_adamw_layerwise": _as("apollo", in_backward=True),
    "lomo": _as("lomo", in_backward=True),
    "adalomo": _as("adalomo", in_backward=True),
    "schedule_free_adamw": _as("schedule_free"),
    "schedule_free_radam": _as("schedule_free"),
    "muon": _as("muon"),
    "sophia": _as("sophia"),
}

#: The last part of a dotted class name, as in torchtune's `_component_` and DeepSpeed's `optimizer.type`.
COMPONENTS: Final[dict[str, dict[str, Any]]] = {
    "AdamW": _as("adamw"),
    "Adam": _as("adam"),
    "FusedAdam": _as("adamw", implementation="fused"),
    "DeepSpeedCPUAdam": _as("adamw", implementation="fused"),
    "SGD": _as("sgd"),
    "Adagrad": _as("adagrad"),
    "RMSprop": _as("rmsprop"),
    "Adafactor": _as("adafactor"),
    "Lion": _as("lion"),
    "Muon": _as("muon"),
    "AdamW8bit": _as("adamw_8bit"),
    "AdamW4bit": _as("adamw_4bit"),
    "AdamWFp8": _as("adamw_fp8"),
    "PagedAdamW": _as("adamw", paged=True),
    "PagedAdamW32bit": _as("adamw", paged=True),
    "PagedAdamW8bit": _as("adamw_8bit", paged=True),
    "Lion8bit": _as("lion_8bit"),
    "PagedLion": _as("lion", paged=True),
    "PagedLion8bit": _as("lion_8bit", paged=True),
    "SGD8bit": _as("sgd_8bit"),
}


def set_optimizer(draft: Draft, key: str, table: dict[str, dict[str, Any]]) -> bool:
    """Set [optimizer] from the name that stands at ``key``; False, with a field to give, for a name without row."""
    name = draft.text(key)
    row = table.get(name) or (table.get(name.lower()) if table is NAMES else None)
    if row is None:
        draft.use(key, "optimizer.name")
        draft.need("optimizer.name", f"{key} = {name} keeps a state that the forecast does not know")
        return False
    for field_name, value in row.items():
        draft.set(field_name, value)
    draft.use(key, *row)
    return True
