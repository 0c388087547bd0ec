"""forecast(): from a job, a machine and a model's shape to one Forecast, in milliseconds.

It puts together activations.py (what torch takes), state.py (what the state takes and moves), budget.py (how a budget
divides) and simulate.py (how long a step lasts). It loads no weights and no torch. The verdict rests on the phase
with the highest peak, never on a sum over phases.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from overspill.errors import OverspillError
from overspill.forecast.activations import Batch, Phase, activation_phases
from overspill.forecast.budget import CHUNK_NUMEL, Division, divide, smallest_budget
from overspill.forecast.simulate import Rates, simulate_step_seconds
from overspill.forecast.state import TrainingState, training_state
from overspill.job import Job
from overspill.machine import Disk, Machine
from overspill.model import ModelShape, read_config
from overspill.plan import Overlap, Plan, StateFormat, Tier
from overspill.schedule import StepPlan, plan_chunks
from overspill.schema import Frozen, Nbytes
from overspill.units import MiB, format_nbytes

__all__ = [
    "BASE_NBYTES",
    "WORKER_NBYTES",
    "Forecast",
    "PhasePeak",
    "default_budget",
    "forecast",
    "reserve_of",
    "shape_of",
    "step_seconds",
]

#: Anonymous memory of Python with torch, transformers and a tokenizer before the first parameter: 274 to 302 MiB in
#: runs with torch 2.13 and transformers 5.24 (docs/theory/memory.md, `base`). A run measures its own.
BASE_NBYTES = 300 * MiB
#: A forked data worker: 8 MiB of its own, and pages of the parent that it keeps when the parent writes to them.
#: Measured: benchmarks/results/2026-11-29-budget.md.
WORKER_NBYTES = 16 * MiB
#: Of what is free, this share is taken when the job sets no budget; the rest is left to the page cache and others.
DEFAULT_BUDGET_SHARE = 0.9
#: Below this share of headroom a fit is called tight. Source: the closed form's own residuals (docs/theory/memory.md).
TIGHT_SHARE = 0.05
_CHUNKS_SIMULATED = 256


class PhasePeak(Frozen):
    """The worst instant of one phase: what torch takes, and what is held in all (with the resident state)."""

    phase: str
    activations_nbytes: Nbytes
    logits_nbytes: Nbytes
    scratch_nbytes: Nbytes
    total_nbytes: Nbytes


class Forecast(Frozen):
    """What a job needs on a machine. Bytes by tier and class as in StepReport; ``null``: not known.

    activations_nbytes: activations, logits and scratch at the worst phase, which a plan reserves. peak_nbytes: all
    that counts against the budget. base_nbytes comes on top of it. read and written: disk, per optimizer step;
    committing: of a step that commits.
    """

    family: str
    parameters: int = Field(ge=0)
    trainable_parameters: int = Field(ge=0)
    tokens_per_step: int = Field(ge=0)
    held_nbytes: dict[str, dict[str, int]]
    phases: tuple[PhasePeak, ...] = ()
    peak_phase: str
    activations_nbytes: Nbytes
    peak_nbytes: Nbytes
    budget_nbytes: Nbytes
    base_nbytes: Nbytes
    smallest_budget_nbytes: Nbytes
    disk_nbytes: Nbytes
    read_nbytes: dict[str, int]
    written_nbytes: dict[str, int]
    written_nbytes_committing: dict[str, int]
    step_seconds: float | None = None
    busy_cores: float = Field(default=0.0, ge=0, description="Cores that others took while speeds were measured.")
    verdict: Literal["fits", "tight", "does not fit"]
    reason: str
    exact: bool = Field(default=True, description="Numbers are those of the optimizer with its state in full.")
    notes: tuple[str, ...] = Field(default=(), description="What the state's format changes, one sentence each.")


def forecast(
    job: Job,
    machine: Machine,
    shape: ModelShape | None = None,
    *,
    plan: Plan | None = None,
    base_nbytes: int | None = None,
    reserve_nbytes: int | None = None,
) -> Forecast:
    """Forecast a job on a machine.

    Args:
        shape: the model's; default: read from config.json in job.model.path.
        plan: the plan to forecast; default: what the budget allows, as `planner` would divide it.
        base_nbytes: measured memory of interpreter and libraries; default: BASE_NBYTES.
        reserve_nbytes: for activations and scratch, where the decoder is not known and no formula gives it.

    Raises:
        OverspillError: OVS201 for a model that cannot be read, or whose activations are not known.
    """
    shape = shape_of(job) if shape is None else shape.freeze(job.model.freeze)
    base = BASE_NBYTES if base_nbytes is None else base_nbytes
    state = training_state(job, shape)
    phases = _phases(job, shape)
    reserve = reserve_of(job, shape, reserve_nbytes) if plan is None else plan.activations_nbytes
    wish, fraction = job.plan.optimizer_state, job.plan.disk_fraction
    smallest = smallest_budget(state, reserve, wish, fraction)
    budget = plan.memory_nbytes if plan else job.plan.memory
    if budget is None:
        budget = default_budget(machine, base)
    if plan is None:
        division = divide(state, reserve, budget, wish, fraction)
        shown = division or divide(state, reserve, smallest, wish, fraction)
        assert shown is not None, "the smallest budget must divide"
    else:
        cached = state.numel - round(plan.optimizer_state.disk * state.numel)
        staging = plan.staging_nbytes if plan.uses_disk else 0
        resident = state.weights_nbytes + state.gradients_nbytes + reserve
        division = shown = Division(resident, staging, plan.chunk_numel, cached, state.numel)

    cached_nbytes = shown.cached_numel * state.per_element.optimizer
    peak = shown.resident_nbytes + shown.staging_nbytes + cached_nbytes
    disk_numel = shown.numel - shown.cached_numel
    read, written = state.step_traffic(disk_numel, commits=False)
    _, committing = state.step_traffic(disk_numel, commits=True)
    highest = max(phases, key=lambda phase: phase.nbytes, default=Phase("not known"))
    verdict, reason = _verdict(peak, smallest, budget, machine, fits=division is not None)
    overlap = plan.overlap if plan else Overlap(job.plan.overlap)
    form = plan.state_format if plan else StateFormat(master=job.plan.master, moments=job.plan.moments)
    return Forecast(
        family=shape.family,
        parameters=shape.total_numel,
        trainable_parameters=shape.trainable_numel,
        tokens_per_step=job.train.micro_batch * job.train.accumulation * job.data.seq_len,
        held_nbytes=_held(state, shown, reserve),
        phases=tuple(_peak_of(phase, peak - reserve) for phase in phases),
        peak_phase=highest.name,
        activations_nbytes=reserve,
        peak_nbytes=peak,
        budget_nbytes=budget,
        base_nbytes=base,
        smallest_budget_nbytes=smallest,
        disk_nbytes=state.disk_nbytes(plan.keep_last if plan else job.plan.keep_last),
        read_nbytes={Tier.DISK.value: read},
        written_nbytes={Tier.DISK.value: written},
        written_nbytes_committing={Tier.DISK.value: committing},
        step_seconds=step_seconds(
            job,
            machine,
            shape,
            shown,
            overlap,
            every_steps=plan.durability.every_steps if plan else 0,
            read_threads=plan.read_threads if plan else 2,
            write_threads=plan.write_threads if plan else 2,
        ),
        busy_cores=machine.busy_cores,
        verdict=verdict,
        reason=reason,
        exact=form.exact,
        notes=form.notes,
    )


def shape_of(job: Job) -> ModelShape:
    """The shape of the job's model, frozen parameters marked. Raises OverspillError OVS201, OVS101."""
    return ModelShape.from_config(read_config(job.model.path)).freeze(job.model.freeze)


def default_budget(machine: Machine, base_nbytes: int) -> int:
    """The budget of a job that sets none. Formula `default budget`."""
    return max(0, int(DEFAULT_BUDGET_SHARE * (machine.available_nbytes - base_nbytes)))


def reserve_of(job: Job, shape: ModelShape, reserve_nbytes: int | None = None) -> int:
    """Activations, logits and scratch at the worst phase, and data workers: the figure that a plan reserves.

    Raises OverspillError OVS201 where the decoder is not known and ``reserve_nbytes`` does not say it.
    """
    if reserve_nbytes is not None:
        return reserve_nbytes
    phases = _phases(job, shape)
    if not phases:
        raise OverspillError(
            "OVS201",
            "The activations of this module are not known from its parameters alone.",
            field="model",
            value=shape.family,
            next_step="Give reserve_nbytes, or the module's config to ModelShape.from_parameters.",
        )
    return max(phase.nbytes for phase in phases) + job.data.num_workers * WORKER_NBYTES


def step_seconds(
    job: Job,
    machine: Machine,
    shape: ModelShape,
    division: Division,
    overlap: Overlap,
    *,
    every_steps: int,
    read_threads: int,
    write_threads: int,
) -> float | None:
    """Formula `step time`: the schedule's simulation; None where a speed that it needs was not measured.

    A large model is simulated with larger chunks, whose number is what costs time here; bytes stay the same.
    """
    disk = _slowest_mix(machine.disks)
    uses_disk = division.cached_numel < division.numel or every_steps > 0
    if not machine.matmul_flops_per_s or not machine.memory_bytes_per_s or (uses_disk and disk is None):
        return None
    state = training_state(job, shape)
    tokens = job.train.micro_batch * job.train.accumulation * job.data.seq_len
    # 2 FLOPs a weight and token in forward, 4 in backward, and the forward again with checkpointing.
    forward = [2 * numel * tokens / machine.matmul_flops_per_s for numel in state.block_numels]
    again = 3 if job.model.gradient_checkpointing else 2
    smallest_chunk = -(-state.numel // _CHUNKS_SIMULATED // 2048) * 2048
    chunk = max(division.chunk_numel if division.staging_nbytes else CHUNK_NUMEL, smallest_chunk, 2048)
    per_element = state.per_element
    buffers = division.staging_nbytes // (chunk * per_element.optimizer) if per_element.optimizer else 0
    plan = StepPlan(
        blocks=len(state.block_numels),
        chunks=plan_chunks(state.block_numels, chunk_numel=chunk, resident_numel=division.cached_numel),
        buffers=max(buffers, 2),
        state_nbytes=per_element.optimizer,
        weight_nbytes=per_element.weights,
        update_nbytes=per_element.update,
        overlap=overlap,
    )
    rates = Rates(
        read_bytes_per_s=disk.read_bytes_per_s if disk else 0.0,
        write_bytes_per_s=disk.write_bytes_per_s if disk else 0.0,
        mixed_bytes_per_s=disk.mixed_bytes_per_s if disk else 0.0,
        memory_bytes_per_s=machine.memory_bytes_per_s,
        forward_seconds=tuple(forward),
        backward_seconds=tuple(again * seconds for seconds in forward),
    )
    return simulate_step_seconds(
        plan, rates, read_threads=read_threads, write_threads=write_threads, every_steps=every_steps
    )


def _slowest_mix(disks: tuple[Disk, ...]) -> Disk | None:
    """The disk that the state would wait for, of those measured."""
    measured = [disk for disk in disks if disk.read_bytes_per_s and disk.write_bytes_per_s and disk.mixed_bytes_per_s]
    return min(measured, key=lambda disk: disk.mixed_bytes_per_s, default=None)


def _phases(job: Job, shape: ModelShape) -> tuple[Phase, ...]:
    if shape.decoder is None:
        return ()
    element = 2 if job.model.dtype == "bf16" else 4
    return activation_phases(
        shape,
        Batch(job.train.micro_batch, job.data.seq_len, element, checkpointing=job.model.gradient_checkpointing),
    )


def _peak_of(phase: Phase, state_nbytes: int) -> PhasePeak:
    return PhasePeak(
        phase=phase.name,
        activations_nbytes=phase.activations_nbytes,
        logits_nbytes=phase.logits_nbytes,
        scratch_nbytes=phase.scratch_nbytes,
        total_nbytes=state_nbytes + phase.nbytes,
    )


def _held(state: TrainingState, division: Division, reserve: int) -> dict[str, dict[str, int]]:
    per_element, cached, staged = state.per_element, division.cached_numel, division.numel - division.cached_numel
    return {
        Tier.HOST.value: {
            "weights": state.weights_nbytes,
            "gradients": state.gradients_nbytes,
            "master": cached * per_element.master,
            "moments": cached * per_element.moments,
            "activations": reserve,
            "staging": division.staging_nbytes,
        },
        Tier.DISK.value: {"master": staged * per_element.master, "moments": staged * per_element.moments},
    }


def _verdict(
    peak: int, smallest: int, budget: int, machine: Machine, *, fits: bool
) -> tuple[Literal["fits", "tight", "does not fit"], str]:
    if not fits:
        return "does not fit", (
            f"The budget of {format_nbytes(budget)} is below the {format_nbytes(smallest)} "
            "that must be in memory at once."
        )
    if peak > budget:
        return "does not fit", f"The plan holds {format_nbytes(peak)}, more than its budget of {format_nbytes(budget)}."
    if machine.available_nbytes and budget > machine.available_nbytes:
        return "does not fit", (
            f"The budget of {format_nbytes(budget)} is more than the {format_nbytes(machine.available_nbytes)} "
            "that this machine has free."
        )
    if budget - smallest < TIGHT_SHARE * budget:
        return "tight", (
            f"The budget of {format_nbytes(budget)} is within {TIGHT_SHARE:.0%} of the least that works, "
            f"{format_nbytes(smallest)}."
        )
    return "fits", f"At its peak training holds {format_nbytes(peak)} of the {format_nbytes(budget)} budget."
