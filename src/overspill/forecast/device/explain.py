"""Every term of a forecast in words and numbers: what --explain prints. Formulas: docs/theory/states.md, layers.md."""

from __future__ import annotations

from collections.abc import Iterator

from overspill.forecast.device.core import forecast_ranks, run_of_rank
from overspill.forecast.layers.figures import layer_figures
from overspill.job import Job
from overspill.model import ModelShape
from overspill.units import format_nbytes

__all__ = ["terms"]


def terms(job: Job, shape: ModelShape) -> Iterator[str]:
    """Lines, from what rests to each phase's instant, of the rank that needs most."""
    rank = max(forecast_ranks(job, shape), key=lambda one: one.peak.total_nbytes)
    resolved, units = rank.resolved, rank.units
    sharding, facts = resolved.sharding, shape.facts
    assert facts is not None
    trained = units.total(lambda unit: float(unit.trained_numel))
    frozen = units.total(lambda unit: float(unit.frozen_numel))
    adapters = units.total(lambda unit: float(unit.adapter_numel))
    quantised = units.total(lambda unit: float(unit.quantised_nbytes))
    split = sharding.ranks if sharding.splits_weights else 1
    yield (
        f"weights = ({trained:,.0f} trained × {resolved.trained_itemsize} B + {frozen:,.0f} frozen × "
        f"{resolved.frozen_itemsize} B + {adapters:,.0f} in adapters × {resolved.adapter_itemsize} B + "
        f"{format_nbytes(quantised)} quantised) / {split} ranks = {format_nbytes(rank.rest.weights)}"
    )
    optimizer = resolved.optimizer
    split = sharding.ranks if sharding.splits_optimizer else 1
    yield (
        f"optimizer = {trained + adapters:,.0f} × ({optimizer.state:.4g} B of moments + {optimizer.master} B of "
        f"master) / {split} ranks = {format_nbytes(rank.rest.optimizer)}"
    )
    split = sharding.ranks if sharding.splits_gradients else 1
    yield (
        f"gradients = ({trained:,.0f} × {resolved.gradient_itemsize} B + {adapters:,.0f} in adapters × "
        f"{resolved.adapter_itemsize} B) / {split} ranks, made in backward"
    )
    yield (
        f"the step's temporaries = {optimizer.step:.4g} B × {trained + adapters:,.0f} / "
        f"{sharding.ranks if sharding.splits_optimizer else 1}"
    )
    yield f"workspaces of cuBLAS = {format_nbytes(rank.rest.workspace)}"
    yield (
        f"tokens of a micro-batch on this rank = {resolved.sequences} × {resolved.seq_len} / {resolved.context} = "
        f"{resolved.tokens:,}"
    )
    run_of = run_of_rank(job, facts, resolved)
    for kind, count, _ in units.layers:
        figures = layer_figures(kind, run_of(kind))
        yield (
            f"{count} × {kind.name}: a layer's input {format_nbytes(figures.boundary_nbytes)}; it keeps "
            f"{format_nbytes(figures.kept_nbytes)} when recorded; its backward needs "
            f"{format_nbytes(figures.backward_nbytes)}, recomputed {format_nbytes(figures.recomputed_nbytes)}"
        )
    for instant in rank.instants:
        parts = ", ".join(
            f"{name} {format_nbytes(value)}"
            for name in ("weights", "optimizer", "gradients", "activations", "logits", "communication", "temporaries")
            if (value := getattr(instant, name))
        )
        yield f"{instant.phase} = {format_nbytes(instant.total_nbytes)}: {parts}"
