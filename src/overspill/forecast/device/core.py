"""forecast_device(): from a job and a model's shape to one rank's memory, phase by phase, in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from overspill.errors import OverspillError
from overspill.forecast.device.frameworks import resolve
from overspill.forecast.device.offload import off_device_nbytes
from overspill.forecast.device.phases import Instant, Resting, instants, resting
from overspill.forecast.device.settings import Resolved
from overspill.forecast.device.states import Unit, Units, build_units, targets_of
from overspill.forecast.layers.run import Run
from overspill.job import Job
from overspill.model import ModelShape
from overspill.model.facts import LayerKind, ModelFacts

__all__ = ["Rank", "forecast_ranks", "run_of_rank"]


@dataclass(frozen=True)
class Rank:
    """One rank's forecast. stage: of the pipeline, from 0."""

    stage: int
    resolved: Resolved
    units: Units
    rest: Resting
    instants: tuple[Instant, ...]
    host_pinned_nbytes: int = 0
    host_pageable_nbytes: int = 0
    disk_nbytes: int = 0

    @property
    def peak(self) -> Instant:
        return max(self.instants, key=lambda one: one.total_nbytes)


def forecast_ranks(job: Job, shape: ModelShape, *, hopper: bool = False) -> tuple[Rank, ...]:
    """One rank of each pipeline stage; ranks within a stage are alike.

    Raises OverspillError OVS201 for a shape without facts, OVS101 for targets that match nothing or stages without a
    layer.
    """
    facts = shape.facts
    if facts is None:
        raise OverspillError(
            "OVS201", "This model's layers are not known from its parameters alone.", field="model", value=shape.family,
            next_step="Give its config.json, or trace it: `overspill.trace`.",
        )  # fmt: skip
    resolved = resolve(job, facts, hopper=hopper)
    stages = resolved.pipeline
    return tuple(_rank(job, facts, resolved, stage, stages) for stage in range(stages))


def _rank(job: Job, facts: ModelFacts, resolved: Resolved, stage: int, stages: int) -> Rank:
    counts = _counts(facts, stage, stages)
    units = build_units(job, facts, resolved, counts)
    if stages > 1:
        nothing = Unit("none", 0, 0, 0, 0, 0, 0)
        units = replace(
            units,
            embedding=units.embedding if stage == 0 else nothing,
            head=units.head if stage == stages - 1 else nothing,
        )
    host_pinned, host_pageable, disk = off_device_nbytes(job, units, resolved)
    return Rank(
        stage,
        resolved,
        units,
        resting(units, resolved),
        tuple(instants(facts, units, resolved, run_of_rank(job, facts, resolved), stage)),
        host_pinned_nbytes=host_pinned,
        host_pageable_nbytes=host_pageable,
        disk_nbytes=disk,
    )


def run_of_rank(job: Job, facts: ModelFacts, resolved: Resolved) -> Callable[[LayerKind], Run]:
    """How a rank runs a layer of a kind."""
    targeted = targets_of(job, facts)
    full = job.method.kind == "full"
    flat = resolved.sharding.flat_gradients
    gone = resolved.sharding.splits_gradients or resolved.update_in_backward or resolved.gradients_at_rest
    # With accumulation the gradients are there already, and a layer's new ones are added to them and go.
    keeps = flat or not (gone or resolved.accumulation > 1)

    def run_of(kind: LayerKind) -> Run:
        return Run(
            resolved.style,
            resolved.tokens,
            resolved.seq_len,
            trained=lambda name: full or flat,
            targeted=targeted,
            tensor=resolved.tensor,
            sequence_parallel=resolved.sequence_parallel,
            expert=resolved.expert,
            expert_tensor=resolved.expert_tensor,
            keeps_grads=keeps,
        )

    return run_of


def _counts(facts: ModelFacts, stage: int, stages: int) -> dict[str, int]:
    """Layers of each kind on a stage: consecutive layers, the first stages taking one more when they do not divide."""
    counts: dict[str, int] = {}
    for stack in facts.stacks:
        layers = stack.layers
        share, more = divmod(layers, stages)
        begin = stage * share + min(stage, more)
        end = begin + share + (stage < more)
        for kind in stack.kinds:
            counts[f"{stack.role}:{kind.name}"] = sum(begin <= position < end for position in kind.positions)
    return counts
