"""What rests on one rank between steps, and the highest moment of a phase: bytes by category."""

from __future__ import annotations

from dataclasses import dataclass

from overspill.forecast.device.settings import Resolved
from overspill.forecast.device.states import Unit, Units, optimizer_nbytes
from overspill.forecast.device.zero import resting_buffers_nbytes
from overspill.forecast.tape import Category

__all__ = ["CATEGORIES", "Instant", "Resting", "gradient_nbytes", "reduced_nbytes", "resting"]

CATEGORIES = tuple(category.name.lower() for category in Category)


@dataclass(frozen=True, slots=True)
class Instant:
    """The highest moment of one phase. nbytes by category; they sum to what torch calls allocated."""

    phase: str
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    communication: int = 0
    temporaries: int = 0

    @property
    def total_nbytes(self) -> int:
        return (
            self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.communication
            + self.temporaries
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Resting:
    """Between steps: weights with adapters, optimizer state with master, gradients that are kept, library workspaces,
    buffers of communication."""

    weights: int
    optimizer: int
    gradients: int
    workspace: int
    buffers: int = 0

    @property
    def total_nbytes(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.workspace + self.buffers


def resting(units: Units, resolved: Resolved, *, step_done: bool = True) -> Resting:
    """Formula `resting`. step_done False: before the first step, when there is no optimizer state yet."""
    sharding = resolved.sharding
    weight_share = 1 / sharding.ranks if sharding.splits_weights else 1.0
    if resolved.weights_on_host:
        weight_share = 0.0
    optimizer_share = 1 / sharding.ranks if sharding.splits_optimizer else 1.0
    gradient_share = 1 / sharding.ranks if sharding.splits_gradients else 1.0
    expert_share = 1 / resolved.expert_ranks if sharding.splits_optimizer else 1.0

    def weights(unit: Unit) -> float:
        # Experts are split over the ranks that expert parallelism has left.
        expert = unit.expert_numel if sharding.splits_weights else 0
        own = weight_share * (
            (unit.trained_numel - expert) * resolved.trained_itemsize
            + unit.frozen_numel * resolved.frozen_itemsize
            + unit.adapter_numel * resolved.adapter_itemsize
            + unit.quantised_nbytes
        )
        return own + (expert * resolved.trained_itemsize * expert_share if weight_share else 0.0)

    state = 0.0
    if step_done and resolved.optimizer.on_device:
        state = units.total(
            lambda unit: optimizer_nbytes(unit, resolved.optimizer, optimizer_share, optimizer_share, expert_share)
        )
    elif resolved.optimizer.master and resolved.optimizer.on_device:
        state = units.total(
            lambda unit: (unit.trained_numel + unit.adapter_numel) * optimizer_share * resolved.optimizer.master
        )
    kept = 0.0
    if resolved.gradients_at_rest:
        kept = units.total(lambda unit: gradient_share * gradient_nbytes(unit, resolved))
    buffers = resting_buffers_nbytes(units, resolved)
    return Resting(round(units.total(weights)), round(state), round(kept), resolved.workspace_nbytes, buffers)


def reduced_nbytes(unit: Unit, resolved: Resolved, share: float) -> float:
    """Of one unit on one rank. share: of what expert parallelism has not divided, where gradients are split."""
    whole = share * gradient_nbytes(unit, resolved)
    if share == 1 or not unit.expert_numel or not resolved.sharding.splits_gradients or not share:
        return whole
    return whole + unit.expert_numel * resolved.gradient_itemsize * (1 / resolved.expert_ranks - share)


def gradient_nbytes(unit: Unit, resolved: Resolved) -> float:
    """Of one unit, before it is split over ranks."""
    if resolved.sharding.flat_gradients:
        return unit.numel * resolved.sharding.gathered_itemsize if unit.trained_numel + unit.adapter_numel else 0
    return unit.trained_numel * resolved.gradient_itemsize + unit.adapter_numel * resolved.adapter_itemsize
