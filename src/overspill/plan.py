"""Plan: where every state class lives, when the update runs, and what a crash may cost.

A plan is resolved: it holds decisions, not wishes. `planner` makes one from a Job and a Machine; `schedule`
turns it into operations; `train` executes those and `forecast` simulates them. Words as in docs/reference/words.md.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from overspill.schema import Frozen, Nbytes
from overspill.units import MiB

__all__ = ["Durability", "Overlap", "Placement", "Plan", "StateClass", "StateFormat", "Tier"]


class StateClass(StrEnum):
    """What a byte of training state is for; the pool and the reports count bytes by it."""

    WEIGHTS = "weights"  # the compute copy
    MASTER = "master"  # fp32 master copy, or the 16-bit residual that completes a bf16 weight to one
    MOMENTS = "moments"  # exp_avg, exp_avg_sq, momentum
    GRADIENTS = "gradients"
    ACTIVATIONS = "activations"  # with logits and scratch: reserved by forecast on a CPU, they come from malloc
    STAGING = "staging"  # buffers through which disk state passes


class Tier(StrEnum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Placement(Frozen):
    """Which share of a class's blocks lives in which tier; the three add up to 1."""

    device: float = Field(default=0.0, ge=0, le=1)
    host: float = Field(default=0.0, ge=0, le=1)
    disk: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if abs(self.device + self.host + self.disk - 1) > 1e-9:
            raise ValueError("the shares of device, host and disk must add up to 1")
        return self


class StateFormat(Frozen):
    """How state is stored. Only a format may change numbers, never a placement.

    master: ``split`` keeps the 16 bits that complete a bf16 weight to an fp32 master (2 B per parameter,
    lossless); ``fp32`` keeps a separate fp32 master (4 B). fp32 weights are their own master.
    moments: ``fp32``, or ``bf16`` (half the bytes, not exact, labelled so).
    """

    master: Literal["split", "fp32"] = "split"
    moments: Literal["fp32", "bf16"] = "fp32"

    @property
    def exact(self) -> bool:
        return self.moments == "fp32"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a forecast and a run say of the format: nothing, unless it changes numbers."""
        if self.exact:
            return ()
        return ("Moments are kept in bf16, which is not exact: numbers differ from those of moments in fp32.",)


class Overlap(StrEnum):
    """When updates run: all done when ``step()`` returns, or before the next use of each block."""

    STEP = "step"
    FORWARD = "forward"


class Durability(Frozen):
    """After how many optimizer steps the state is committed to disk. ``every_steps = 0``: only at checkpoints."""

    every_steps: int = Field(default=0, ge=0)


class Plan(Frozen):
    """The resolved decisions for one run on one machine.

    memory_nbytes is the host budget: everything that the session owns plus ``activations_nbytes`` (activations,
    logits and scratch, which torch takes from malloc on a CPU). The interpreter and the libraries, measured as
    `base`, come on top.
    """

    memory_nbytes: Nbytes = Field(description="Host memory that training may use above the interpreter and libraries.")
    activations_nbytes: Nbytes = Field(
        default=0, description="Share of memory_nbytes reserved for torch's own allocations."
    )
    optimizer_state: Placement = Field(default_factory=lambda: Placement(host=1.0))
    state_format: StateFormat = Field(default_factory=StateFormat)
    overlap: Overlap = Overlap.STEP
    durability: Durability = Field(default_factory=Durability)
    keep_last: int = Field(default=1, ge=0, description="How many checkpoints are kept; each may pin one more version.")
    directories: tuple[Path, ...] = Field(
        default=(), description="Where disk state lives; several disks share the load."
    )
    directory_weights: tuple[float, ...] = Field(
        default=(), description="Share of each directory, as measured bytes per second; none: equal shares."
    )
    chunk_numel: int = Field(
        default=1024 * 1024, ge=2048, multiple_of=2048, description="Elements moved and updated as one."
    )
    staging_nbytes: Nbytes = Field(default=64 * MiB, description="Buffers through which disk state passes.")
    read_threads: int = Field(default=2, ge=1)
    write_threads: int = Field(default=2, ge=1)
    kernel_threads: int = Field(default=1, ge=1)
    nonfinite: Literal["allow", "skip", "raise"] = "allow"
    grad_dtype: Literal["param", "fp32"] = "param"
    max_grad_norm: float | None = Field(default=None, gt=0)
    verify_reads: bool = Field(default=False, description="Check the checksum of every read, not only at resume.")

    @field_validator("directory_weights")
    @classmethod
    def _one_weight_each(cls, weights: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        if weights and len(weights) != len(info.data.get("directories", ())):
            raise ValueError("give one weight for each directory, or none")
        if not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise ValueError("a weight is a positive number")
        return weights

    @property
    def uses_disk(self) -> bool:
        return self.optimizer_state.disk > 0
