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
    """How state is shared by data-parallel ranks. ranks: over which it is split; others: bytes and counts as named.

    flat_gradients: a unit's one flat parameter gets a gradient as long as itself where anything in it is trained (FSDP1
    with use_orig_params): frozen weights are views of it and get gradients too, joined when the unit is done.
    accumulates_whole: micro-batches that are not the last do not reduce (FSDP1's no_sync).
    """

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
    copied_in_backward: int = 0
    reduces_one_behind: bool = False
    counts_active: bool = False
    max_reuse_numel: int = 1_000_000_000
    sub_group_numel: int = 1_000_000_000
    stage_1_buckets: bool = True
    casts_shards: bool = False
    flat_gradients: bool = False
    accumulates_whole: bool = False

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
    """See the module. Itemsizes in bytes; sequences and tokens are one rank's of one micro-batch.

    unties: tied parameters are two. frozen_embedding: the first layer's input needs no gradient; first_prompt: the
    first layer with LLaMA-Adapter's prompt. longest_first: the longest batch is the first, before any gradient.
    holds_last_step: the loop keeps the last logits, and with them their graph, until the model has answered again.
    alloc_conf: PYTORCH_CUDA_ALLOC_CONF. records_streams: tensors of asynchronous collectives are recorded on NCCL's
    stream. steps: how many the run has, where that is said: before the first there is no optimizer state.
    """

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
    unties: bool = False
    frozen_embedding: bool = False
    first_prompt: int = 0
    longest_first: bool = False
    holds_last_step: bool = False
    compiled_loss: bool = False
    gradients_on_host: bool = False
    weights_on_host: bool = False
    loads_whole: bool = False
    expert_ranks: int = 1
    alloc_conf: str = ""
    records_streams: bool = False
    steps: int | None = None
    assumed: tuple[Assumed, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_len // self.context
