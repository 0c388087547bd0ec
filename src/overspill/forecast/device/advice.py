"""What would fit: the methods side by side, the largest batch and the longest sequence, and the cheapest changes.

Each answer is a forecast of a changed job, never an estimate of a difference. Prices are in work and bytes; seconds
need the machine's rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from overspill.catalog.accelerators import Accelerator
from overspill.forecast.device.core import forecast_ranks
from overspill.forecast.device.overhead import ALLOCATED_SPREAD
from overspill.forecast.device.result import Change, Verdict
from overspill.job import Job
from overspill.model import ModelShape
from overspill.units import format_nbytes

__all__ = ["Cell", "changes", "largest_micro_batch", "longest_seq_len", "method_grid", "quick_verdict", "with_fields"]

_LARGEST_BATCH = 4096
_LONGEST_SEQUENCE = 2**22


@dataclass(frozen=True)
class Cell:
    """One cell of the first minute's table."""

    method: str
    checkpointing: bool
    allocated_nbytes: int
    verdict: Verdict | None
    settings: dict[str, Any]


def with_fields(job: Job, fields: dict[str, Any]) -> Job:
    """The job with dotted fields replaced. Raises OverspillError OVS101 for what no job takes."""
    data = job.model_dump()
    for path, value in fields.items():
        table, _, key = path.partition(".")
        data[table][key] = value
    return Job.read(data, source="the changed job")


def _allocated(job: Job, shape: ModelShape) -> int:
    return max(rank.peak.total_nbytes for rank in forecast_ranks(job, shape))


def quick_verdict(need_nbytes: int, job: Job, card: Accelerator | None) -> Verdict | None:
    """From allocated alone, with the context; the full forecast says the probability."""
    if card is None:
        return None
    from overspill.catalog.overheads import context

    need = need_nbytes + (context().low_nbytes + context().high_nbytes) // 2
    room = card.usable_nbytes - job.device.held_nbytes
    if need > room * (1 + ALLOCATED_SPREAD / 3):
        return "does not fit"
    return "fits" if need <= room * (1 - job.device.headroom) else "tight"


def method_grid(job: Job, shape: ModelShape, card: Accelerator | None) -> list[Cell]:
    """full, LoRA and QLoRA, without and with checkpointing."""
    result = []
    for method, fields in _METHODS.items():
        for checkpointing in (False, True):
            settings = {**fields, "model.gradient_checkpointing": checkpointing}
            changed = with_fields(job, settings)
            need = _allocated(changed, shape)
            result.append(Cell(method, checkpointing, need, quick_verdict(need, changed, card), settings))
    return result


_METHODS: dict[str, dict[str, Any]] = {
    "full": {"method.kind": "full", "method.base": None},
    "LoRA": {"method.kind": "lora", "method.base": None},
    "QLoRA": {"method.kind": "lora", "method.base": "nf4", "method.double_quant": True},
}


def largest_micro_batch(job: Job, shape: ModelShape, card: Accelerator) -> int:
    """The largest train.micro_batch that is not "does not fit"; 0 when not even one sequence fits."""

    def holds(count: int) -> bool:
        changed = with_fields(job, {"train.micro_batch": count})
        return quick_verdict(_allocated(changed, shape), changed, card) != "does not fit"

    return _largest(holds, 1, _LARGEST_BATCH)


def longest_seq_len(job: Job, shape: ModelShape, card: Accelerator) -> int:
    """The longest data.seq_len, in steps of 256 tokens, that is not "does not fit", within the model's positions."""
    limit = shape.max_positions or _LONGEST_SEQUENCE

    def holds(steps: int) -> bool:
        changed = with_fields(job, {"data.seq_len": min(steps * 256, limit), "data.lengths": ()})
        return quick_verdict(_allocated(changed, shape), changed, card) != "does not fit"

    return min(_largest(holds, 1, max(1, limit // 256)) * 256, limit)


def _largest(holds: Any, low: int, high: int) -> int:
    if not holds(low):
        return 0
    while low < high:
        middle = min(high, low * 2) if low * 2 <= high else high
        if middle == low:
            break
        if holds(middle):
            low = middle
            continue
        high = middle - 1
        while low < high:
            centre = (low + high + 1) // 2
            if holds(centre):
                low = centre
            else:
                high = centre - 1
    return low


def changes(job: Job, shape: ModelShape, card: Accelerator | None) -> list[Change]:
    """Changes that save memory, each alone, the one that saves most for its price first; nothing that saves < 1 %."""
    before = _allocated(job, shape)
    found = []
    for name, fields, price in _candidates(job, shape):
        changed = with_fields(job, fields)
        after = _allocated(changed, shape)
        if before - after < before // 100:
            continue
        fits = quick_verdict(after, changed, card) in ("fits", "tight")
        found.append(
            Change(
                name=name,
                settings=fields,
                saved_nbytes=before - after,
                allocated_nbytes=after,
                price=price,
                fits=fits,
            )
        )
    found.sort(key=lambda change: (not change.fits, -change.saved_nbytes))
    return found


def _candidates(job: Job, shape: ModelShape) -> Iterator[tuple[str, dict[str, Any], str]]:
    tokens = job.train.micro_batch * job.data.seq_len
    forward = 2 * shape.total_numel * tokens
    if not job.model.gradient_checkpointing and job.kernels.checkpointing in ("auto", "none"):
        yield (
            "gradient checkpointing",
            {"model.gradient_checkpointing": True, "kernels.checkpointing": "auto"},
            f"one more forward, {forward / 1e12:.3g} TFLOP a micro-batch",
        )
    if job.kernels.loss in ("auto", "plain"):
        yield ("fused linear cross-entropy", {"kernels.loss": "fused_linear"}, "a library (Liger); no work")
    if job.train.micro_batch > 1:
        half = max(1, job.train.micro_batch // 2)
        yield (
            f"micro-batch {half}, accumulation {job.train.accumulation * 2}",
            {"train.micro_batch": half, "train.accumulation": job.train.accumulation * 2},
            "smaller matrices; the same step",
        )
    if job.optimizer.name in ("adamw", "adam") and job.method.kind == "full":
        if job.optimizer.implementation in ("auto", "foreach"):
            yield ("fused AdamW", {"optimizer.implementation": "fused"}, "none")
        yield ("8-bit AdamW", {"optimizer.name": "adamw_8bit"}, "moments in 8 bits: other numbers")
        if job.train.accumulation == 1:
            yield (
                "optimizer in backward", {"optimizer.in_backward": True}, "no gradient clipping, no accumulation"
            )  # fmt: skip
    if job.method.kind == "full":
        yield ("LoRA", {"method.kind": "lora"}, "trains adapters of rank 8, not the weights")
    elif job.method.base is None and job.method.kind == "lora":
        yield (
            "QLoRA (NF4)",
            {"method.base": "nf4", "method.double_quant": True},
            "the base in 4 bits; each product dequantises it",
        )
    if job.offload.activations == "device" and (job.model.gradient_checkpointing):
        boundary = tokens * _boundary_nbytes(shape)
        yield (
            "checkpoints in DRAM",
            {"offload.activations": "host"},
            f"{format_nbytes(2 * boundary)} over the link a micro-batch",
        )
    if job.offload.optimizer == "device" and job.method.kind == "full":
        yield (
            "optimizer state in DRAM",
            {"offload.optimizer": "host"},
            f"{format_nbytes(4 * shape.trainable_numel)} over the link a step",
        )


def _boundary_nbytes(shape: ModelShape) -> int:
    facts = shape.facts
    return 0 if facts is None else sum(2 * kind.hidden * kind.count for kind in facts.text.kinds)
