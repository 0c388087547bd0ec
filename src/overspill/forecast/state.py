"""What the training state takes: bytes per element by class, and the traffic of a step over disk and DRAM.

The formulas `state`, `traffic` and `disk space` of docs/theory/memory.md, from a job and a shape alone. They count
blocks with their padding, as a session allocates them. What torch allocates beside the state is activations.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overspill.job import Job
from overspill.model import ModelShape

__all__ = ["StateBytes", "TrainingState", "state_bytes", "training_state"]

_PAGE_NBYTES = 4096
_ELEMENT_NBYTES = {"bf16": 2, "fp32": 4}
_FP32 = 4
_RESIDUAL = 2  # the 16 bits that complete a bf16 weight to an fp32 master


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes per trained element, by class."""

    weights: int
    gradients: int
    master: int
    moments: int

    @property
    def optimizer(self) -> int:
        """What a placement moves: master and moments."""
        return self.master + self.moments

    @property
    def version(self) -> int:
        """One committed version on disk; it holds the weights in every format (docs/decisions/0006)."""
        return self.optimizer + self.weights

    @property
    def update(self) -> int:
        """Formula `traffic`: DRAM read and written by the kernel: gradients in, weights and state in and out."""
        weights_in = 0 if self.master == _FP32 else self.weights
        return self.gradients + weights_in + self.weights + 2 * self.optimizer


def state_bytes(job: Job) -> StateBytes:
    """Formula `state`: by optimizer, dtype of the weights, and the formats that the plan asks for."""
    weights = _ELEMENT_NBYTES[job.model.dtype]
    # fp32 weights are their own master.
    master = 0 if weights == _FP32 else _RESIDUAL if job.plan.master == "split" else _FP32
    name = job.optimizer.name
    kept = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 1 if job.optimizer.momentum else 0}[name]
    return StateBytes(
        weights=weights,
        gradients=_FP32 if job.plan.grad_dtype == "fp32" else weights,
        master=master,
        moments=kept * (_FP32 if job.plan.moments == "fp32" else 2),
    )


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state of one job, in elements and bytes. block_numels: trained blocks in forward order, with padding."""

    per_element: StateBytes
    block_numels: tuple[int, ...]
    frozen_nbytes: int

    @property
    def numel(self) -> int:
        return sum(self.block_numels)

    @property
    def weights_nbytes(self) -> int:
        return self.numel * self.per_element.weights + self.frozen_nbytes

    @property
    def gradients_nbytes(self) -> int:
        return self.numel * self.per_element.gradients

    @property
    def optimizer_nbytes(self) -> int:
        return self.numel * self.per_element.optimizer

    def disk_nbytes(self, keep_last: int) -> int:
        """Formula `disk space`: the committed version, the working one, and one for each checkpoint that pins it."""
        return (2 + keep_last) * (self.numel * self.per_element.version + self.frozen_nbytes)

    def step_traffic(self, disk_numel: int, *, commits: bool) -> tuple[int, int]:
        """Formula `traffic`: bytes read from and written to disk by a step, ``disk_numel`` elements being staged."""
        read = disk_numel * self.per_element.optimizer
        return read, self.numel * self.per_element.version if commits else read


def training_state(job: Job, shape: ModelShape) -> TrainingState:
    element = _ELEMENT_NBYTES[job.model.dtype]
    frozen = [p.numel * element for p in shape.owned if not p.trainable]
    return TrainingState(
        per_element=state_bytes(job),
        block_numels=tuple(block.numel for block in shape.blocks()),
        frozen_nbytes=_whole_pages(frozen),
    )


def _whole_pages(nbytes: Sequence[int]) -> int:
    return sum(-(-one // _PAGE_NBYTES) * _PAGE_NBYTES for one in nbytes)
