"""DeviceForecast: the memory of a job on a card, as data, and forecast_device(), which builds it.

Three figures with intervals, the phases, what rests, what it costs on the host and on disk, the verdict, and what would
make it fit. JSON by pydantic; the terminal's form is cli/device.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, computed_field, model_validator

from overspill.catalog.accelerators import Accelerator
from overspill.errors import OverspillError
from overspill.forecast.allocator_settings import AllocatorSettings
from overspill.forecast.device.cached import Range, cached, left_of_loading, uneven_nbytes
from overspill.forecast.device.core import Rank, forecast_ranks, run_of_rank
from overspill.forecast.device.empirical import empirical_terms
from overspill.forecast.device.overhead import Shown, needed, probability_above, shown
from overspill.forecast.device.phases import CATEGORIES, Instant
from overspill.forecast.device.stream import step_events
from overspill.forecast.events import Event
from overspill.job import Job
from overspill.model import ModelShape
from overspill.model.facts import ModelFacts
from overspill.schema import Frozen, Nbytes
from overspill.units import format_nbytes

__all__ = ["Change", "DeviceForecast", "Figure", "PhaseMemory", "Verdict", "forecast_device", "refuse_long"]

Verdict = Literal["fits", "tight", "does not fit"]
#: Below this probability of running out a job fits; above the other it does not. Between: tight.
FITS_BELOW, FAILS_ABOVE = 0.05, 0.5


class Figure(Frozen):
    """Bytes: likely, and a 90 % interval."""

    low_nbytes: Nbytes
    likely_nbytes: Nbytes
    high_nbytes: Nbytes

    @classmethod
    def of(cls, one: Range) -> Figure:
        return cls(low_nbytes=max(0, one.low), likely_nbytes=max(0, one.likely), high_nbytes=max(0, one.high))


class PhaseMemory(Frozen):
    """The highest instant of one phase, allocated, by category."""

    phase: str
    total_nbytes: Nbytes
    by_category: dict[str, int]


class Change(Frozen):
    """A change of the job that saves memory. settings: fields of the job; price: what it costs."""

    name: str
    settings: dict[str, Any]
    saved_nbytes: int
    allocated_nbytes: Nbytes
    price: str
    fits: bool


class AssumedDefault(Frozen):
    """A default that was taken because the job leaves the field open."""

    field: str
    value: str
    why: str


class DeviceForecast(Frozen):
    """What one card holds while a job trains on it, on the rank that needs most.

    allocated: alive tensors (torch.cuda.max_memory_allocated); reserved: what torch's allocator holds; smi: what
    nvidia-smi shows for the process. probability: of running out on this card, from what the job needs when the
    allocator gives back what it caches.
    """

    model: str
    family: str
    parameters: int = Field(ge=0)
    trainable_parameters: int = Field(ge=0)
    tokens_per_micro_batch: int = Field(ge=0)
    gpu: str | None = None
    gpus: int = 1
    usable_nbytes: Nbytes | None = None
    held_nbytes: Nbytes = 0
    headroom: float = 0.1
    allocated: Figure
    needed: Figure
    resting_nbytes: Nbytes
    peak_phase: str
    peak_category: str
    stage: int = 0
    phases: tuple[PhaseMemory, ...]
    host_pinned_nbytes: Nbytes = 0
    host_pageable_nbytes: Nbytes = 0
    disk_nbytes: Nbytes = 0
    probability: float | None = Field(default=None, description="Of running out of memory on this card.")
    verdict: Verdict | None = None
    reason: str = ""
    assumed: tuple[AssumedDefault, ...] = ()
    notes: tuple[str, ...] = ()
    empirical: tuple[str, ...] = Field(default=(), description="Terms in it that nobody can explain yet.")
    shrinks: dict[str, int] = Field(
        default_factory=dict, description="Of the peak: bytes that more ranks would split, and that they would not."
    )
    _shown: Callable[[], Shown] | None = PrivateAttr(default=None)
    _read: dict[str, Any] = PrivateAttr(default_factory=dict)

    @computed_field(description="What torch's allocator holds.")  # type: ignore[prop-decorator]
    @cached_property
    def reserved(self) -> Figure:
        """From the replay of the step's allocations, which is made when it is first asked for."""
        return self._figure("reserved")

    @computed_field(description="What nvidia-smi shows for the process.")  # type: ignore[prop-decorator]
    @cached_property
    def smi(self) -> Figure:
        """Reserved, with the context and the communicators."""
        return self._figure("smi")

    def _figure(self, name: str) -> Figure:
        if name in self._read:
            return Figure.read(self._read[name])
        assert self._shown is not None, "a forecast is built by forecast_device, or read from its JSON"
        return Figure.of(getattr(self._shown(), name))

    @model_validator(mode="wrap")
    @classmethod
    def _computed_come_back(cls, data: Any, build: Any) -> Self:
        if not isinstance(data, dict):
            return build(data)  # type: ignore[no-any-return]
        read = {name: data[name] for name in ("reserved", "smi") if name in data}
        made: Self = build({name: value for name, value in data.items() if name not in read})
        made._read.update(read)
        return made


def forecast_device(
    job: Job, shape: ModelShape, card: Accelerator | None = None, *, name: str = "", empirical: bool = True
) -> DeviceForecast:
    """Forecast a job on a card, without torch, in milliseconds.

    Args:
        shape: of the model.
        card: from catalog.accelerators; None: no verdict, figures only.
        name: of the model, for reports.
        empirical: with the terms that nobody can explain yet (empirical.py).

    Raises:
        OverspillError: OVS201 for a model whose layers are not known, OVS101 for targets that match nothing or a layout
            that does not hold, OVS205 for a sequence beyond the model's positions.
    """
    refuse_long(job, shape)
    hopper = card is not None and (card.compute_capability or "0").split(".")[0] in ("9", "10", "12")
    ranks = forecast_ranks(job, shape, hopper=hopper)
    rank = max(ranks, key=lambda one: one.peak.total_nbytes)
    return build(job, shape, rank, card, name=name, empirical=empirical)


def build(
    job: Job, shape: ModelShape, rank: Rank, card: Accelerator | None, *, name: str, empirical: bool = True
) -> DeviceForecast:
    """The forecast of one rank as data."""
    facts = shape.facts
    assert facts is not None
    peak = rank.peak
    held = job.device.held_nbytes
    usable = card.usable_nbytes if card is not None else None
    room = usable - held if usable is not None else None
    torch = job.framework.versions.get("torch")
    settings = AllocatorSettings.parse(rank.resolved.alloc_conf)
    if card is not None and card.vendor == "AMD":
        # "expandable_segments not supported on this platform": CUDACachingAllocator.cpp under HIP.
        settings = replace(settings, expandable_segments=False)
    found = empirical_terms(job, facts, rank) if empirical else ()
    more = [one.nbytes for one in found if one.figure == "allocated"]
    allocated, need = needed(peak.total_nbytes, rank.resolved, torch=torch)
    for one in more:
        allocated, need = allocated + one, need + one

    @cache
    def figures() -> Shown:
        beyond = _beyond(job, facts, rank, settings)
        for one in found:
            if one.figure == "reserved":
                beyond = beyond + one.nbytes
        whole = _loaded_nbytes(job, rank)
        return shown(
            allocated, beyond, rank.resolved, capacity_nbytes=room, torch=torch, whole_nbytes=whole
        )  # fmt: skip

    probability = verdict = None
    reason = ""
    if room is not None and card is not None:
        probability = probability_above(need, room)
        verdict, reason = _verdict(peak, need, room, job.device.headroom, probability, card, held)
    made = DeviceForecast(
        model=name or job.model.path,
        family=shape.family,
        parameters=shape.total_numel,
        trainable_parameters=_trained(job, rank),
        tokens_per_micro_batch=rank.resolved.sequences * rank.resolved.seq_len,
        gpu=card.name if card is not None else None,
        gpus=job.parallel.gpus,
        usable_nbytes=usable,
        held_nbytes=held,
        headroom=job.device.headroom,
        allocated=Figure.of(allocated),
        needed=Figure.of(need),
        resting_nbytes=rank.rest.total_nbytes,
        peak_phase=peak.phase,
        peak_category=_largest_category(peak),
        stage=rank.stage,
        phases=tuple(_phase(one) for one in rank.instants),
        host_pinned_nbytes=rank.host_pinned_nbytes,
        host_pageable_nbytes=rank.host_pageable_nbytes,
        disk_nbytes=rank.disk_nbytes,
        probability=probability,
        verdict=verdict,
        reason=reason,
        assumed=tuple(
            AssumedDefault(field=one.field, value=one.value, why=one.why) for one in rank.resolved.assumed
        ),
        notes=rank.resolved.notes,
        empirical=tuple(f"{one.name} ({one.source})" for one in found),
        shrinks=_shrinks(rank),
    )  # fmt: skip
    made._shown = figures
    return made


def _beyond(job: Job, facts: ModelFacts, rank: Rank, settings: AllocatorSettings) -> Range:
    """What the allocator caches beside what is alive."""
    resolved, run_of = rank.resolved, run_of_rank(job, facts, rank.resolved)
    steps = min(2, resolved.steps or 2)

    def events(recorded: bool) -> list[Event]:
        return step_events(facts, rank.units, resolved, run_of, stage=rank.stage, steps=steps, recorded=recorded)

    said = job.device.avoid_record_streams is not None
    held_back = resolved.records_streams and resolved.tensor > 1
    beyond = cached(
        events(recorded=held_back and said),
        settings,
        assumed=job.device.alloc_conf is None and bool(resolved.alloc_conf),
        recorded=events(recorded=True) if held_back and not said else None,
    )
    beyond += uneven_nbytes(rank.units, resolved, run_of)
    if whole := _loaded_nbytes(job, rank):
        beyond += left_of_loading(whole, resolved.sharding.ranks)
    return beyond


def refuse_long(job: Job, shape: ModelShape) -> None:
    """Raises OverspillError OVS205 for a sequence beyond the positions that the model has learned."""
    limit = shape.max_positions
    learned = shape.facts is not None and shape.facts.positions == "learned"
    if limit and job.data.seq_len > limit and learned:
        raise OverspillError(
            "OVS205",
            "The sequence is longer than the positions that the model has learned.",
            field="data.seq_len",
            value=job.data.seq_len,
            limit=limit,
        )


def _loaded_nbytes(job: Job, rank: Rank) -> int:
    """Of a quantised base under FSDP: the model whole, before it is split."""
    if job.method.base is None or not rank.resolved.sharding.kind.startswith("fsdp"):
        return 0
    return rank.rest.weights * rank.resolved.sharding.ranks


def _trained(job: Job, rank: Rank) -> int:
    split = rank.resolved.tensor
    return round(rank.units.total(lambda unit: float(unit.trained_numel + unit.adapter_numel))) * (
        split if job.method.kind == "full" else 1
    )


def _phase(one: Instant) -> PhaseMemory:
    values = {name: getattr(one, name) for name in CATEGORIES}
    return PhaseMemory(phase=one.phase, total_nbytes=one.total_nbytes, by_category=values)


def _largest_category(one: Instant) -> str:
    return max(CATEGORIES, key=lambda name: getattr(one, name))


def _verdict(
    peak: Instant, need: Range, room: int, headroom: float, probability: float, card: Accelerator, held: int
) -> tuple[Verdict, str]:
    others = f" ({format_nbytes(held)} are held by others)" if held else ""
    there = f"{format_nbytes(room)} of the {card.name}{others}"
    where = f"in {peak.phase}, most of it {_largest_category(peak)}"
    if probability >= FAILS_ABOVE:
        missing = need.likely - room
        return "does not fit", (
            f"It needs {format_nbytes(need.likely)} {where}: {format_nbytes(max(0, missing))} more than the {there}."
        )
    wanted = room * (1 - headroom)
    if probability >= FITS_BELOW or need.likely > wanted:
        return "tight", (
            f"It needs {format_nbytes(need.likely)} {where}, of {there}: less than the {headroom:.0%} that are to stay "
            f"free, or a chance of {probability:.0%} to run out."
        )
    return "fits", f"It needs {format_nbytes(need.likely)} {where}, of {there}."


def _shrinks(rank: Rank) -> dict[str, int]:
    """Which part of the peak more data-parallel ranks would split (issue of buffers that do not shrink)."""
    peak, sharding = rank.peak, rank.resolved.sharding
    split = 0
    if sharding.splits_weights:
        split += min(peak.weights, rank.rest.weights)  # a model that is loaded whole is whole on every rank
    if sharding.splits_optimizer:
        split += peak.optimizer
    if sharding.splits_gradients:
        split += peak.gradients
    return {"with more ranks": split, "whatever their number": peak.total_nbytes - split}
