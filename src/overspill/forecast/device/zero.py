"""What ZeRO and DDP have on a device beside the shares: buckets, gathered parameters, a step's copies.

Formulas `zero-*` of docs/theory/frameworks.md. Sources: deepspeed/runtime/zero/stage_1_and_2.py, stage3.py,
partitioned_param_coordinator.py and config.py, 0.9 to 0.19; torch/nn/parallel/distributed.py.
"""

from __future__ import annotations

from overspill.forecast.device.settings import Resolved, Sharding
from overspill.forecast.device.states import Unit, Units

__all__ = [
    "backward_buffers_nbytes", "gathered_nbytes", "persistent_nbytes", "resting_buffers_nbytes", "step_nbytes",
    "turn_nbytes",
]  # fmt: skip

FP32 = 4


def _trained(unit: Unit) -> float:
    return unit.trained_numel + unit.adapter_numel


def resting_buffers_nbytes(units: Units, resolved: Resolved) -> int:
    """Stage 3 makes its reduce bucket once (IPGBucketZ3.buffer); DDP's buckets are as large as the gradients."""
    sharding = resolved.sharding
    if sharding.kind == "zero3":
        return sharding.reduce_bucket_numel * sharding.reduce_itemsize + persistent_nbytes(units, sharding)
    if sharding.kind == "ddp" and sharding.ranks > 1:
        whole = units.total(
            lambda unit: (
                unit.trained_numel * resolved.gradient_itemsize + unit.adapter_numel * resolved.adapter_itemsize
            )
        )
        return round(whole)
    return 0


def persistent_nbytes(units: Units, sharding: Sharding) -> int:
    """Stage 3 leaves parameters of at most ``persistence_numel`` elements gathered: vectors, small matrices."""

    def small(unit: Unit) -> float:
        matrices = sum(rows * columns for rows, columns in unit.matrices)
        found = sum(rows * columns for rows, columns in unit.matrices if rows * columns <= sharding.persistence_numel)
        vectors = max(0, unit.trained_numel - matrices)
        found += vectors if unit.matrices and unit.matrices[0][1] <= sharding.persistence_numel else 0
        if unit.adapter_numel and unit.adapter_numel / max(1, unit.tensors) <= sharding.persistence_numel:
            found += unit.adapter_numel
        return found

    return round(units.total(small)) * sharding.gathered_itemsize if sharding.splits_weights else 0


def backward_buffers_nbytes(units: Units, resolved: Resolved) -> int:
    """While gradients are made. Stages 1 and 2: a bucket of ``reduce_bucket_numel``, whole from the first gradient on,
    whatever the model's size (setup_buckets), and a second one with overlap_comm. Stage 3: the partitions of a full
    bucket, joined by a cat before the reduce-scatter (reduce_scatter_coalesced)."""
    sharding = resolved.sharding
    if sharding.kind in ("zero1", "zero2"):
        if sharding.kind == "zero1" and not sharding.stage_1_buckets:
            return 0
        count = 2 if sharding.overlap_comm else 1
        nbytes = count * sharding.reduce_bucket_numel * sharding.reduce_itemsize
        if resolved.gradients_on_host:
            largest = max(unit.largest_numel for _, _, unit in units.layers)
            nbytes += max(largest, units.embedding.largest_numel, units.head.largest_numel) * sharding.reduce_itemsize
        return nbytes
    if sharding.kind == "zero3":
        return round(min(sharding.reduce_bucket_numel, units.total(_trained))) * sharding.reduce_itemsize
    return 0


def gathered_nbytes(units: Units, unit: Unit, sharding: Sharding) -> int:
    """Stage 3, at one layer: its parameters, and what is fetched ahead (fetch_sub_module): up to the parameter that
    fills the prefetch bucket and stays below max_live_parameters."""
    if not sharding.splits_weights:
        return 0
    largest = max([unit.largest_numel, *(one.largest_numel for _, _, one in units.layers)])
    ahead = 0
    if sharding.prefetch_bucket_numel:
        ahead = min(sharding.prefetch_bucket_numel + largest, sharding.max_live_numel)
    numel = min(unit.numel + ahead, units.total(lambda one: one.numel))
    return round(numel) * sharding.gathered_itemsize + unit.quantised_nbytes


def turn_nbytes(units: Units, sharding: Sharding) -> int:
    """Stage 3, between forward and backward: a parameter whose next use is at most max_reuse_distance elements away is
    not released: of the model's end half that distance stays (__params_to_release of the coordinator)."""
    if not sharding.splits_weights:
        return 0
    whole = units.total(lambda one: one.numel)
    return round(min(whole, sharding.max_reuse_numel / 2)) * sharding.gathered_itemsize


def step_nbytes(units: Units, resolved: Resolved, share: float) -> float:
    """The fp32 copy of the gradients' partition, and the flat one that it is cast from; stage 3 goes by sub-groups."""
    sharding = resolved.sharding
    if sharding.kind not in ("zero1", "zero2", "zero3") or resolved.gradients_on_host:
        return 0.0
    numel = units.total(_trained) * share
    if sharding.kind == "zero3":
        numel = min(numel, sharding.sub_group_numel)
    return numel * (FP32 + resolved.gradient_itemsize)
