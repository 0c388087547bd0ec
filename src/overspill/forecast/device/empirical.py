"""Terms that nobody can explain yet: seen in published figures, without a mechanism that derives them. At most three.

Each has a condition, a source and an interval in units of something that is derived; it is left out with
``forecast_device(..., empirical=False)``, and the scoreboard shows both. A term whose mechanism is found moves to where
it belongs, and one that turns out to be wrong goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from overspill.forecast.device.cached import Range
from overspill.forecast.device.core import Rank
from overspill.job import Job
from overspill.model.facts import ModelFacts

__all__ = ["LIMIT", "Found", "empirical_terms"]

#: No more terms than this: what needs more is a model that is wrong.
LIMIT: Final = 3
_FP32: Final = 4


@dataclass(frozen=True, slots=True)
class Found:
    """A term that applies. figure: what it is added to, allocated (and all above) or reserved (and nvidia-smi)."""

    name: str
    figure: Literal["allocated", "reserved"]
    source: str
    nbytes: Range


def empirical_terms(job: Job, facts: ModelFacts, rank: Rank) -> tuple[Found, ...]:
    """The terms whose condition a job meets."""
    return tuple(
        found for term in (_two_dimensional, _stranded_logits) if (found := term(job, facts, rank)) is not None
    )


def _two_dimensional(job: Job, facts: ModelFacts, rank: Rank) -> Found | None:
    """FSDP2 on a mesh with tensor parallelism under torch 2.4.0's development versions: 71 became 87 GB, under
    selective and full checkpointing alike, and went back. The share of allocated that came on top."""
    resolved, torch = rank.resolved, job.framework.versions.get("torch", "")
    release = torch.split("+")[0].split(".")[:3]
    if resolved.sharding.kind != "fsdp2" or resolved.tensor == 1 or release != ["2", "4", "0"]:
        return None
    whole = rank.peak.total_nbytes * (87 - 71) // 71
    return Found(
        "FSDP2 with tensor parallelism, torch 2.4.0", "allocated", "pytorch/torchtitan#191", Range(0, whole, whole)
    )


def _stranded_logits(job: Job, facts: ModelFacts, rank: Rank) -> Found | None:
    """A loss kernel that writes gradients over the logits, behind transformers' upcast and shift: one more block of the
    fp32 logits' size is cached than the replay has. The shifted copy is a row a sequence smaller than the logits, so
    that a block of the one may not serve the other; in the replay each finds its own again."""
    resolved = rank.resolved
    if resolved.loss != "in_place" or resolved.logits not in ("upcast_all", "upcast_in_loss", "pad_labels"):
        return None
    block = resolved.tokens * facts.vocab * _FP32 // (resolved.tensor if resolved.loss_parallel else 1)
    at_loss = max((one.total_nbytes for one in rank.instants if one.logits), default=0)
    above = max(0, at_loss + block - rank.peak.total_nbytes)
    return Found(
        "a second block of fp32 logits", "reserved",
        "foundation-model-stack/fms-acceleration, scripts/benchmarks/refs (torch 2.4, transformers 4.45 and 4.48)",
        Range(0, above, above + block if above else 0),
    )  # fmt: skip
