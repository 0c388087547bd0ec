"""What DeepSpeed's ZeRO keeps on a device beside the shares: buckets, gathered parameters, what an offload leaves
there.

Formulas `zero-*` of docs/theory/frameworks.md. Sources: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py,
partitioned_param_coordinator.py and config.py, 0.9 to 0.19.
"""

from __future__ import annotations

from overspill.forecast.device.settings import Sharding
from overspill.forecast.device.states import Unit, Units

__all__ = ["zero_gathered_nbytes"]


def zero_gathered_nbytes(units: Units, unit: Unit, sharding: Sharding) -> int:
    """Stage 3: this unit, and what is fetched ahead, at most max_live_parameters beside it; persistent ones always."""
    whole = units.total(lambda one: one.numel)
    ahead = min(sharding.prefetch_bucket_numel + unit.numel, sharding.max_live_numel + unit.numel, whole)
    return round(ahead) * sharding.gathered_itemsize
