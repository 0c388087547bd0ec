"""Optimizers as bytes per trained element: state, master copy, and what a step needs while it runs.

Sources: torch/optim (_multi_tensor_adamw keeps one list of intermediates, the square roots, torch 2.1 to 2.13);
bitsandbytes' 8-bit state with an fp32 maximum per block of 256; torchao's low-bit optimizers; the papers of
Adafactor, GaLore, APOLLO, LOMO and BAdam. docs/theory/optimizers.md derives each row.
"""

from __future__ import annotations

from overspill.forecast.device.settings import OptimizerFacts
from overspill.job import OffloadConfig, OptimizerConfig

__all__ = ["optimizer_facts"]

_BLOCK_256 = 4 / 256  # one fp32 maximum per block of 256 elements (bitsandbytes)
_BLOCK_128 = 4 / 128  # one fp32 scale per block of 128 (torchao, 4 bit)


def optimizer_facts(
    config: OptimizerConfig,
    offload: OffloadConfig,
    *,
    state_itemsize: int,
    parameter_itemsize: int,
    fused: bool = False,
    master: int = 0,
) -> OptimizerFacts:
    """state_itemsize: of torch's own optimizers, whose moments have the parameters' dtype. fused: the framework asks
    for torch's fused step when the job leaves it open."""
    if config.state_dtype != "auto":
        state_itemsize = 4 if config.state_dtype == "fp32" else 2
    if config.master_dtype == "fp32":
        master = 4
    how = config.implementation
    if how == "auto":
        how = "fused" if fused else "foreach"
    foreach = float(state_itemsize) if how == "foreach" else 0.0
    looped = float(2 * state_itemsize) if how == "for_loop" else 0.0
    on_device = offload.optimizer == "device" and not config.paged
    name = config.name

    def facts(state: float, step: float = 0.0, largest: float = 0.0, **more: float) -> OptimizerFacts:
        return OptimizerFacts(
            state=state,
            master=master,
            step=step,
            step_largest=largest,
            on_device=on_device,
            **more,
        )

    if name in ("adamw", "adam", "badam", "schedule_free", "sophia"):
        return facts(2 * state_itemsize, foreach, looped)
    if name == "adamw_8bit":
        return facts(2 * (1 + _BLOCK_256))
    if name == "adamw_fp8":
        return facts(2 * (1 + _BLOCK_256), largest=8)
    if name == "adamw_4bit":
        return facts(2 * (0.5 + _BLOCK_128), largest=8)
    if name == "lion":
        return facts(state_itemsize, largest=float(state_itemsize))
    if name in ("lion_8bit", "sgd_8bit"):
        return facts(1 + _BLOCK_256)
    if name == "sgd":
        return facts(state_itemsize if config.momentum else 0, foreach if config.weight_decay else 0.0)
    if name in ("adagrad", "rmsprop"):
        return facts(state_itemsize, foreach, looped)
    if name == "muon":
        return facts(state_itemsize, largest=3 * 2.0)  # Newton-Schulz in bf16: X, A, and B X
    if name == "adafactor":
        return facts(0, largest=2 * 4.0, per_row=1, per_column=1)
    if name in ("galore", "apollo"):
        return facts(0, largest=2 * 4.0, per_column=2.0 * config.rank / 1.0)
    return facts(0, largest=4.0)  # lomo, adalomo: the update is made of the gradient alone
