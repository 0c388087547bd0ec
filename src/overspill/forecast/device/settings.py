"""What a job leaves open, settled: one value for everything that memory depends on, each default named.

`Resolved` is all that states.py and phases.py read. Where it comes from: frameworks.py, by framework and version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from overspill.forecast.layers.head import LossCode
from overspill.forecast.layers.style import Style

__all__ = ["Assumed", "OptimizerFacts", "Resolved", "Sharding"]


@dataclass(frozen=True, slots=True)
class Assumed:
    """A default that was taken. field: of the job; value: what was taken; why: one phrase."""

    field: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Bytes per trained element. state: moments and the like; master: a separate fp32 copy. step: temporaries of the
    step, per element of all trained parameters; step_largest: per element of the largest tensor alone.

    matrix_state, of optimizers whose state is smaller for matrices (Adafactor, GaLore): elements kept per row and per
    column of a matrix; else 0.
    """

    state: float
    master: int = 0
    step: float = 0.0
    step_largest: float = 0.0
    per_row: float = 0.0
    per_column: float = 0.0
    block_bytes: float = 0.0
    on_device: bool = True


ShardingKind = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "distributed_optimizer"]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How state is shared by data-parallel ranks. ranks: over which it is split; others: bytes and counts as named."""

    kind: ShardingKind = "none"
    ranks: int = 1
    reduce_bucket_numel: int = 0
    allgather_bucket_numel: int = 0
    prefetch_bucket_numel: int = 0
    max_live_numel: int = 0
    persistence_numel: int = 0
    overlap_comm: bool = False
    gathered_itemsize: int = 2
    reduce_itemsize: int = 2
    wrap_embeddings: bool = False
    whole_model_unit: bool = False
    reshard_after_forward: bool = True
    prefetched_units: int = 1
    retains_inputs: bool = False
    pending_reductions: int = 0
    copied_units: int = 0
    casts_shards: bool = False

    @property
    def splits_weights(self) -> bool:
        return self.kind in ("zero3", "fsdp1", "fsdp2") and self.ranks > 1

    @property
    def splits_gradients(self) -> bool:
        return self.kind in ("zero2", "zero3", "fsdp1", "fsdp2") and self.ranks > 1

    @property
    def splits_optimizer(self) -> bool:
        return self.kind not in ("none", "ddp") and self.ranks > 1


@dataclass(frozen=True)
class Resolved:
    """See the module. Itemsizes in bytes; sequences and tokens are one rank's of one micro-batch."""

    style: Style
    sharding: Sharding
    optimizer: OptimizerFacts
    loss: LossCode
    logits: LossCode
    sequences: int
    seq_len: int
    context: int
    tensor: int
    sequence_parallel: bool
    loss_parallel: bool
    expert: int
    expert_tensor: int
    pipeline: int
    microbatches_in_flight: int
    accumulation: int
    trained_itemsize: int
    adapter_itemsize: int
    gradient_itemsize: int
    frozen_itemsize: int
    caller_holds_logits: bool
    converts_outputs: bool
    loss_chunks: int
    checkpoint_every: int
    checkpointing: Literal["none", "full", "selective_op"]
    reentrant: bool
    offloads_boundaries: bool
    gradients_at_rest: bool
    update_in_backward: bool
    workspace_nbytes: int
    quantises_head: bool = False
    weights_on_device: bool = True
    gradients_on_device: bool = True
    expert_ranks: int = 1
    assumed: tuple[Assumed, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len // self.context
