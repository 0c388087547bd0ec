"""plan(): a job's wishes, a machine and a model's shape, resolved into a Plan, or an error that says what is short.

The division of memory is forecast/budget.py's; here are the choices around it: the budget when none is given, the
durability, the threads. It searches nothing yet: on one machine with two tiers the best division is known (cache as
much optimizer state as fits, earliest blocks first; docs/theory/architecture.md, "Sizes that were chosen").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from overspill.errors import OverspillError
from overspill.forecast.budget import CHUNK_NUMEL, Division, divide, smallest_budget
from overspill.forecast.core import BASE_NBYTES, WORKER_NBYTES, default_budget, reserve_of, shape_of, step_seconds
from overspill.forecast.state import TrainingState, training_state
from overspill.job import Job
from overspill.machine import Machine
from overspill.model import ModelShape
from overspill.plan import Durability, Overlap, Placement, Plan, StateFormat
from overspill.units import format_nbytes

__all__ = ["plan"]

#: A prediction may be short of the truth by this factor; durability must not be.
_STEP_SECONDS_MARGIN = 2.0
#: A choice: from 2 to 8 threads the same mixed speed was measured (docs/decisions/0002-disk-store.md).
_MOST_IO_THREADS = 4
#: More steps than any run has, so that any work at risk is a number of them.
_MOST_STEPS = 2.0**53


def plan(
    job: Job,
    machine: Machine,
    shape: ModelShape | None = None,
    *,
    directories: Sequence[str | Path] = (),
    base_nbytes: int | None = None,
    reserve_nbytes: int | None = None,
) -> Plan:
    """Resolve a job's wishes for a machine.

    Args:
        shape: the model's; default: read from config.json in job.model.path.
        directories: where disk state lives when the job names none, RUN/state.
        base_nbytes: measured memory of interpreter and libraries; default: forecast.BASE_NBYTES.
        reserve_nbytes: for activations and scratch, where the decoder is not known and no formula gives it.

    Raises:
        OverspillError: OVS301 when the budget is below the smallest that works, naming the largest need; OVS302 when
            the budget is more than the machine has free; OVS201 for a model that cannot be read; OVS205 for
            sequences longer than the model's positions.
    """
    shape = shape_of(job) if shape is None else shape.freeze(job.model.freeze)
    if shape.max_positions is not None and job.data.seq_len > shape.max_positions:
        raise OverspillError(
            "OVS205",
            "The sequences are longer than the model's positions.",
            field="data.seq_len",
            value=job.data.seq_len,
            limit=shape.max_positions,
        )
    wishes = job.plan
    state = training_state(job, shape)
    reserve = reserve_of(job, shape, reserve_nbytes)
    budget = _budget(job, machine, BASE_NBYTES if base_nbytes is None else base_nbytes)
    fraction = wishes.disk_fraction if wishes.optimizer_state == "mixed" else None
    division = divide(state, reserve, budget, wishes.optimizer_state, fraction)
    if division is None:
        workers_nbytes = job.data.num_workers * WORKER_NBYTES if reserve_nbytes is None else 0  # part of the reserve
        _refuse(job, state, reserve, budget, workers_nbytes=workers_nbytes)

    places = tuple(Path(one) for one in (wishes.directories or directories))
    overlap = Overlap(wishes.overlap)
    read_threads = write_threads = max(2, min(_MOST_IO_THREADS, machine.threads))
    seconds = step_seconds(
        job,
        machine,
        shape,
        division,
        overlap,
        every_steps=0,
        read_threads=read_threads,
        write_threads=write_threads,
    )
    return Plan(
        memory_nbytes=budget,
        activations_nbytes=reserve,
        optimizer_state=_placement(division),
        state_format=StateFormat(master=wishes.master, moments=wishes.moments),
        overlap=overlap,
        durability=_durability(job, seconds),
        keep_last=wishes.keep_last,
        directories=places,
        directory_weights=_weights(places, machine),
        chunk_numel=division.chunk_numel if division.staging_nbytes else CHUNK_NUMEL,
        staging_nbytes=division.staging_nbytes,
        read_threads=read_threads,
        write_threads=write_threads,
        kernel_threads=job.train.threads or max(1, min(machine.physical_cores, machine.threads)),
        nonfinite=wishes.nonfinite,
        grad_dtype=wishes.grad_dtype,
        max_grad_norm=job.optimizer.max_grad_norm,
        verify_reads=wishes.verify_reads,
    )


def _budget(job: Job, machine: Machine, base_nbytes: int) -> int:
    wanted = job.plan.memory
    if wanted is None:
        return default_budget(machine, base_nbytes)
    if machine.available_nbytes and wanted > machine.available_nbytes:
        raise OverspillError(
            "OVS302",
            "The memory budget is larger than what this machine can give.",
            field="plan.memory",
            value=format_nbytes(wanted),
            limit=f"{format_nbytes(machine.available_nbytes)} available of {format_nbytes(machine.memory_nbytes)}",
        )
    return wanted


def _refuse(job: Job, state: TrainingState, reserve: int, budget: int, *, workers_nbytes: int) -> NoReturn:
    """OVS301, naming the largest single need, how much it is, and the smallest budget that works."""
    wish = job.plan.optimizer_state
    fraction = job.plan.disk_fraction if wish == "mixed" else None
    smallest = smallest_budget(state, reserve, wish, fraction)
    needs = {
        "weights": state.weights_nbytes,
        "gradients": state.gradients_nbytes,
        "activations, logits and scratch": reserve - workers_nbytes,
        "data workers": workers_nbytes,
        "optimizer state and staging": smallest - state.weights_nbytes - state.gradients_nbytes - reserve,
    }
    largest = max(needs, key=lambda name: needs[name])
    listed = ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in needs.items() if nbytes)
    hints = [f"Set plan.memory to {_rounded_up(smallest)} or more"]
    if needs["activations, logits and scratch"] > budget // 4:
        shorter = "" if job.model.gradient_checkpointing else ", set model.gradient_checkpointing = true"
        hints.append(f"lower train.micro_batch or data.seq_len{shorter}")
    if workers_nbytes > budget // 4:
        hints.append(f"lower data.num_workers: each of the {job.data.num_workers} takes {format_nbytes(WORKER_NBYTES)}")
    if wish in ("host", "mixed"):
        hints.append('set plan.optimizer_state = "auto", which moves optimizer state to disk')
    raise OverspillError(
        "OVS301",
        f"Training does not fit the memory budget: its largest need is {largest} with "
        f"{format_nbytes(needs[largest])}, and what must be in memory at once is {format_nbytes(smallest)} ({listed}).",
        field="plan.memory",
        value=format_nbytes(budget),
        limit=f"at least {format_nbytes(smallest)}",
        next_step="; or ".join(hints) + ".",
    )


def _rounded_up(nbytes: int) -> str:
    return f'"{-(-nbytes // 1024**2)}MiB"'


def _placement(division: Division) -> Placement:
    disk = division.disk_fraction
    return Placement(host=1.0 - disk, disk=disk)


def _weights(places: Sequence[Path], machine: Machine) -> tuple[float, ...]:
    """What each directory's disk was measured to do; nothing, and so equal shares, where one was not measured."""
    speeds = {Path(disk.directory): disk.mixed_bytes_per_s for disk in machine.disks}
    weights = tuple(speeds.get(place, 0.0) for place in places)
    return weights if len(weights) > 1 and all(weights) else ()


def _durability(job: Job, seconds: float | None) -> Durability:
    """Formula `durability`: as many steps as fit the work at risk; every step where the time of one is not known."""
    wish = job.plan.durability
    if wish == "checkpoint":
        return Durability(every_steps=0)
    if wish == "step":
        return Durability(every_steps=1)
    if wish != "auto":
        return Durability(every_steps=int(wish))
    if seconds is None or seconds <= 0:
        return Durability(every_steps=1)
    steps = min(job.plan.at_risk / (_STEP_SECONDS_MARGIN * seconds), _MOST_STEPS)
    return Durability(every_steps=max(1, math.floor(steps)))
