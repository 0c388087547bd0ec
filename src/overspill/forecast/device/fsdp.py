"""FSDP's buffers on a device: gathered units, gradients before they are reduced. Formulas `fsdp-*` of
docs/theory/frameworks.md.

Sources: torch/distributed/fsdp/_runtime_utils.py and _flat_param.py (FSDP1), torch/distributed/fsdp/_fully_shard
(FSDP2), torch 2.1 to 2.13; sizes checked by benchmarks/storages.py.
"""

from __future__ import annotations

from overspill.forecast.device.settings import Sharding
from overspill.forecast.device.states import Unit, Units

__all__ = ["layer_nbytes", "root_gradient_nbytes", "root_nbytes", "unreduced_nbytes", "whole_nbytes"]


def root_nbytes(units: Units, parts: tuple[Unit, ...], sharding: Sharding) -> int:
    """What stands outside the layers is one unit, gathered from the first forward to the last backward; where
    embeddings and head are units of their own, only ``parts`` are."""
    if not sharding.splits_weights:
        return 0
    outer = parts if sharding.wrap_embeddings else (units.embedding, units.head, units.root)
    numel = sum(unit.numel for unit in outer)
    if sharding.whole_model_unit:
        numel += sum(count * unit.numel for _, count, unit in units.layers)
    return numel * sharding.gathered_itemsize


def layer_nbytes(unit: Unit, alive: int, sharding: Sharding) -> int:
    """``alive`` gathered units of this size, collectives' outputs that wait for their copies counted among them."""
    if not sharding.splits_weights or sharding.whole_model_unit:
        return 0
    return (unit.numel * sharding.gathered_itemsize + unit.quantised_nbytes) * alive


def root_gradient_nbytes(units: Units, sharding: Sharding) -> int:
    """The head's gradient, where the root holds the head: the root is reduced after the last layer."""
    if sharding.kind not in ("fsdp1", "fsdp2") or not sharding.splits_gradients or sharding.wrap_embeddings:
        return 0
    return units.head.trained_numel * sharding.gathered_itemsize


def unreduced_nbytes(unit: Unit, previous: Unit, sharding: Sharding, *, first: bool = False) -> int:
    """Gradients of one unit before they are reduced, beside what a rank keeps of them. previous: the unit whose
    backward ran before; first: that is the head. Formula `fsdp-reduction`."""
    if sharding.kind not in ("fsdp1", "fsdp2") or sharding.ranks == 1:
        return 0
    trained = unit.trained_numel + unit.adapter_numel
    full = trained * sharding.gathered_itemsize
    if sharding.reduces_one_behind:
        before = previous.trained_numel + previous.adapter_numel
        if first and not sharding.wrap_embeddings:
            before = 0  # the root is reduced last
        return full + before * sharding.reduce_itemsize
    wide = trained * sharding.reduce_itemsize if sharding.reduce_itemsize != sharding.gathered_itemsize else 0
    if sharding.kind == "fsdp1" and not sharding.counts_active:
        # The parameters' gradients and the flat one that they are joined to; then, this unit's weights let go, the flat
        # one and its copy for the reduction, which the host lets go when the hook returns.
        return max(full * (1 + sharding.pending_reductions), wide)
    return (full + wide) * (1 + sharding.pending_reductions)


def whole_nbytes(unit: Unit, sharding: Sharding) -> int:
    """A unit's gradients in the dtype that they come in, and in the reduction's where that differs."""
    trained = unit.trained_numel + unit.adapter_numel
    if sharding.flat_gradients and trained:
        trained = unit.numel
    wide = trained * sharding.reduce_itemsize if sharding.reduce_itemsize != sharding.gathered_itemsize else 0
    return trained * sharding.gathered_itemsize + wide
