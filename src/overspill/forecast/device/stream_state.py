"""Which tensors a unit's weights, gradients and optimizer state are, for the replay: one for each parameter.

Their sizes decide into which of the allocator's segments they fall, and so what rounding costs. What is one buffer
(ZeRO's flat partitions, Megatron's parameter and gradient buffers, FSDP1's flat parameter) is said where it is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from overspill.forecast.device.settings import Resolved
from overspill.forecast.device.states import Unit, optimizer_nbytes
from overspill.model.facts import LayerKind

__all__ = ["Pieces", "state_itemsize", "unit_pieces"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """One unit's tensors on one rank before data-parallel sharding. weights: (elements, bytes at rest, whether of
    routed experts) of each. trained: elements of those that the optimizer has, adapters last. expert: of trained, those
    of routed experts."""

    unit: Unit
    weights: tuple[tuple[int, int, bool], ...]
    trained: tuple[int, ...]
    expert: tuple[bool, ...]

    def shards(self, resolved: Resolved) -> list[float]:
        """Elements of each trained tensor that a rank has, where ranks share them."""
        ranks = resolved.sharding.ranks
        return [
            numel / (resolved.expert_ranks if of_expert else ranks)
            for numel, of_expert in zip(self.trained, self.expert, strict=True)
        ]


def unit_pieces(unit: Unit, kind: LayerKind | None, resolved: Resolved) -> Pieces:
    """The tensors of one layer of ``kind``; None: of what stands outside the layers, which is one matrix each."""
    shapes = [(unit.numel + unit.quantised_numel, True, False)] if kind is None else _shapes(kind, resolved)
    matrices = sum(numel for numel, is_matrix, _ in shapes if is_matrix)
    weights, trained, expert = [], [], []
    own = unit.trained_numel + unit.frozen_numel + unit.quantised_numel
    total = sum(numel for numel, _, _ in shapes)
    itemsize = resolved.trained_itemsize if unit.trained_numel else resolved.frozen_itemsize
    for numel, is_matrix, is_expert in shapes:
        if unit.quantised_nbytes and is_matrix:
            weights.append((0, round(unit.quantised_nbytes * numel / matrices), is_expert))
            continue
        count = round(numel * own / total) if not unit.quantised_nbytes and total else numel
        weights.append((count, count * itemsize, is_expert and unit.trained_numel > 0))
        if unit.trained_numel:
            trained.append(round(unit.trained_numel * numel / total))
            expert.append(is_expert)
    if unit.adapter_numel:
        pieces = max(1, unit.tensors if not unit.trained_numel else unit.tensors // 2)
        count = -(-unit.adapter_numel // pieces)
        weights += [(count, count * resolved.adapter_itemsize, False)] * pieces
        trained += [count] * pieces
        expert += [False] * pieces
    return Pieces(unit, tuple(weights), tuple(trained), tuple(expert))


def _shapes(kind: LayerKind, resolved: Resolved) -> list[tuple[int, bool, bool]]:
    """(elements on this rank, whether it is a matrix, whether of routed experts) of each parameter."""
    linears = {linear.name: linear for linear in kind.linears}
    found = []
    for name, shape in kind.parameters:
        owner = linears.get(name.removesuffix(".weight")) or linears.get(name)
        is_expert = owner is not None and owner.is_expert
        split = resolved.expert * resolved.expert_tensor if is_expert else resolved.tensor if len(shape) > 1 else 1
        numel = -(-math.prod(shape) // split)
        is_matrix = owner is not None and len(shape) > 1
        modules = 1
        if is_expert and owner is not None and resolved.style.expert_linears:
            modules = max(1, owner.experts // resolved.expert)  # each expert's matrix is a parameter of its own
        found += [(numel // modules, is_matrix, is_expert)] * modules
    return found


def state_itemsize(unit: Unit, resolved: Resolved) -> float:
    """Bytes of optimizer state and master for each trained element, whatever the optimizer."""
    trained = unit.trained_numel + unit.adapter_numel
    return optimizer_nbytes(unit, resolved.optimizer, 1.0, 1.0) / trained if trained else 0.0
