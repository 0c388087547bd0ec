"""The tables of a job that describe training on GPUs in any framework: what a forecast reads.

`overspill train` runs a part of what can be described here, and refuses the rest by name (job/runs.py); the forecast
takes all of it. Each value that a framework decides by itself when the user says nothing has the default "auto" (or
None) here; forecast/defaults.py resolves it by framework and version, and says so.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from overspill.schema import Frozen, Nbytes

__all__ = [
    "DeviceConfig",
    "EvaluationConfig",
    "FrameworkConfig",
    "KernelConfig",
    "MethodConfig",
    "OffloadConfig",
    "ParallelConfig",
    "TaskConfig",
]

Dtype = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
Quantisation = Literal["nf4", "fp4", "int8", "gptq4", "awq4", "aqlm2", "hqq4", "fp8", "mxfp4"]
Tier = Literal["device", "host", "disk"]


class MethodConfig(Frozen):
    """What is trained: every weight, some layers, or adapters beside a frozen base."""

    kind: Literal["full", "lora", "layers", "adapter", "adapter_v2", "oft"] = Field(
        default="full",
        description="full; lora (with a quantised base: QLoRA); layers: only those of train_layers; adapter and "
        "adapter_v2: LLaMA-Adapter; oft: orthogonal blocks (OFT).",
    )
    rank: int = Field(default=8, ge=1, description="Rank of each LoRA pair.")
    targets: tuple[str, ...] = Field(
        default=(),
        description='Ends of the names of modules that get a pair, or "all-linear"; none: the framework\'s default.',
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the input of each LoRA pair.")
    dora: bool = Field(default=False, description="Weight-decomposed LoRA (DoRA).")
    oft_block: int = Field(default=32, ge=2, description="oft: rows of each orthogonal block.")
    adapter_dtype: Dtype = Field(default="auto", description="dtype of adapter weights.")
    modules_to_save: tuple[str, ...] = Field(
        default=(), description="Modules trained in full beside the adapters; each is kept twice, as peft does."
    )
    resized_vocab: int | None = Field(
        default=None, ge=1, description="Rows of embeddings and head after new tokens were added."
    )
    base: Quantisation | None = Field(default=None, description="Quantisation of the frozen base weights.")
    double_quant: bool = Field(default=False, description="nf4, fp4: the block scales are quantised too.")
    group_size: int = Field(default=128, ge=0, description="gptq4, awq4: rows that share a scale; 0: a whole column.")
    quant_storage: Dtype = Field(default="auto", description="dtype that packed 4-bit weights are stored in.")
    upcast: Literal["auto", "none", "norms", "all"] = Field(
        default="auto",
        description="Of a quantised base: which other weights become fp32 (prepare_model_for_kbit_training).",
    )
    quantised_experts: bool | None = Field(
        default=None,
        description="Experts that are stacked in one tensor are quantised too; none: as the framework's version does.",
    )
    train_layers: int | None = Field(default=None, ge=0, description='kind = "layers": the last layers trained.')
    train_head: bool = Field(default=False, description='kind = "layers": norm and head are trained too.')
    train_embeddings: bool = Field(default=False, description='kind = "layers": the embeddings are trained too.')
    freeze_vision: bool = Field(default=True, description="Of a vision-language model: its vision tower is frozen.")


class TaskConfig(Frozen):
    """What is learnt. Preference methods run two sequences a row and may hold a reference model."""

    kind: Literal["pretrain", "sft", "dpo", "kto", "orpo", "simpo", "reward", "distill", "rl"] = Field(
        default="sft", description="distill: to a teacher's logits; rl: the policy's step of PPO, GRPO and the like."
    )
    teacher: str | None = Field(default=None, description="distill: the teacher, as model.path.")
    reference: Literal["auto", "copy", "adapter off", "precomputed", "none"] = Field(
        default="auto", description="The reference policy: a copy of the model, the base without adapters, or neither."
    )
    vision_tokens: int = Field(default=0, ge=0, description="Image patches a sequence that pass the vision tower.")
    neftune: bool = Field(default=False, description="NEFTune noise on the embeddings.")


class ParallelConfig(Frozen):
    """How the job is spread over GPUs. gpus = tensor × pipeline × context × data; data is what remains."""

    gpus: int = Field(default=1, ge=1, description="Number of GPUs in all.")
    data: Literal["auto", "none", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "distributed_optimizer"] = Field(
        default="auto", description="How data-parallel ranks share state; auto: none for one GPU, else the framework's."
    )
    replicas: int = Field(default=1, ge=1, description="Groups that each hold all shards (HSDP, ZeRO++ hpz, MiCS).")
    tensor: int = Field(default=1, ge=1, description="Tensor-parallel ranks.")
    sequence_parallel: bool = Field(default=True, description="With tensor > 1: norms and residuals are split too.")
    loss_parallel: bool = Field(default=True, description="With tensor > 1: logits stay split over the vocabulary.")
    context: int = Field(default=1, ge=1, description="Context-parallel ranks (ring attention).")
    ulysses: int = Field(default=1, ge=1, description="Sequence-parallel ranks that exchange heads (Ulysses).")
    pipeline: int = Field(default=1, ge=1, description="Pipeline stages.")
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = Field(
        default="1f1b", description="In which order a stage runs micro-batches."
    )
    virtual_stages: int = Field(default=1, ge=1, description="Model chunks a stage, with interleaved.")
    expert: int = Field(default=1, ge=1, description="Expert-parallel ranks, within data × tensor.")
    expert_tensor: int = Field(default=1, ge=1, description="Tensor-parallel ranks of an expert.")
    wrap: Literal["layer", "root"] = Field(default="layer", description="FSDP units: each layer, or the model whole.")
    wrap_embeddings: bool = Field(default=False, description="FSDP: embeddings and head are units of their own.")
    reshard_after_forward: bool = Field(default=True, description="FSDP: gather again in backward.")
    param_dtype: Dtype = Field(default="auto", description="FSDP mixed precision: dtype of gathered weights.")
    reduce_dtype: Dtype = Field(default="auto", description="dtype in which gradients are reduced.")
    upcast_trained: bool | None = Field(
        default=None, description="Trained weights are kept in fp32 shards; none: as the framework's version does."
    )
    reduce_bucket_numel: int | None = Field(default=None, ge=0, description="ZeRO: elements of a reduce bucket.")
    allgather_bucket_numel: int | None = Field(default=None, ge=0, description="ZeRO 1, 2: of an all-gather bucket.")
    prefetch_bucket_numel: int | None = Field(default=None, ge=0, description="ZeRO 3: elements fetched ahead.")
    max_live_parameters: int | None = Field(default=None, ge=0, description="ZeRO 3: elements gathered at most.")
    persistence_numel: int | None = Field(default=None, ge=0, description="ZeRO 3: smaller tensors are not split.")
    sub_group_numel: int | None = Field(default=None, ge=0, description="ZeRO 3: elements updated in one call.")
    auto_buckets: bool = Field(
        default=False,
        description='ZeRO: sizes left out follow the hidden size, as where transformers fills in "auto".',
    )
    overlap_comm: bool | None = Field(default=None, description="ZeRO: reduce beside backward, in two buckets.")
    zero_init: bool | None = Field(default=None, description="ZeRO 3: the model is never whole on one rank.")

    @property
    def data_ranks(self) -> int:
        """Ranks over which data is split (and state, where it is): gpus / (tensor × pipeline × context × ulysses)."""
        return self.gpus // (self.tensor * self.pipeline * self.context * self.ulysses)

    @model_validator(mode="after")
    def _layout_fills_the_gpus(self) -> Self:
        model = self.tensor * self.pipeline * self.context * self.ulysses
        if self.gpus % model:
            raise ValueError(
                f"parallel.gpus = {self.gpus} is no multiple of tensor × pipeline × context × ulysses = {model}"
            )
        if self.data_ranks % self.replicas:
            raise ValueError(f"parallel.replicas = {self.replicas} does not divide the {self.data_ranks} data ranks")
        if (self.data_ranks * self.tensor * self.context) % (self.expert * self.expert_tensor):
            raise ValueError(
                f"parallel.expert × expert_tensor = {self.expert * self.expert_tensor} does not divide "
                f"data × context × tensor = {self.data_ranks * self.context * self.tensor}"
            )
        return self


class OffloadConfig(Frozen):
    """Which tier each class of state rests in, for frameworks that move whole classes."""

    optimizer: Tier = Field(default="device", description="Moments, and the fp32 master copy.")
    gradients: Tier = Field(default="device", description="Gradients, once they are complete.")
    weights: Tier = Field(default="device", description="Weights, while they are not computed with.")
    activations: Tier = Field(default="device", description="The inputs of checkpointed layers.")
    optimizer_fraction: float = Field(default=1.0, ge=0, le=1, description="Share of optimizer state that is moved.")
    pinned: bool = Field(default=True, description="Host buffers are pinned.")


class KernelConfig(Frozen):
    """Which kernels run, as far as memory depends on them."""

    attention: Literal["auto", "eager", "sdpa", "math", "flash", "flex"] = Field(
        default="auto", description="Which attention runs; math is sdpa without a fused kernel."
    )
    loss: Literal["auto", "plain", "fused", "fused_linear", "chunked"] = Field(
        default="auto",
        description="plain: torch's cross-entropy on fp32 logits; fused: in place (Liger, Unsloth); fused_linear: "
        "head and loss together, so that logits never exist whole; chunked: by loss_chunk_tokens.",
    )
    loss_chunk_tokens: int | None = Field(default=None, ge=1, description="Tokens of a chunk, with chunked.")
    fused_mlp: bool = Field(default=False, description="SwiGLU or GeGLU in one kernel that recomputes (Liger).")
    tiled_mlp: bool = Field(default=False, description="The MLP runs over slices of the sequence (ALST).")
    fused_norm: bool = Field(default=False, description="RMSNorm in one kernel (Liger, TransformerEngine).")
    fused_rope: bool = Field(default=False, description="Rotary embedding in one kernel.")
    fused_adapters: bool = Field(default=False, description="LoRA pairs in one function that recomputes (Unsloth).")
    compile: bool = Field(default=False, description="torch.compile.")
    checkpointing: Literal["auto", "none", "full", "selective", "selective_op"] = Field(
        default="auto",
        description="auto: as model.gradient_checkpointing; selective: some layers (checkpoint_every); selective_op: "
        "matmul outputs by policy are kept, the rest is recomputed (torchtitan's per-op, Megatron's selective).",
    )
    checkpoint_every: int = Field(default=1, ge=1, description="Of how many layers one is checkpointed.")
    reentrant: bool | None = Field(default=None, description="Reentrant checkpointing; none: the framework's default.")


class EvaluationConfig(Frozen):
    """Evaluation during training."""

    micro_batch: int | None = Field(default=None, ge=1, description="Sequences per forward; none: as in training.")
    keeps_logits: bool = Field(
        default=False, description="Logits of all evaluation batches are kept on the GPU until they are compared."
    )
    batches: int | None = Field(default=None, ge=1, description="With keeps_logits: batches kept at once.")


class FrameworkConfig(Frozen):
    """Who runs the loop. Defaults that a framework takes depend on it and on versions."""

    name: Literal[
        "torch", "overspill", "hf_trainer", "trl", "accelerate", "axolotl", "llamafactory", "unsloth", "deepspeed",
        "torchtune", "torchtitan", "litgpt", "megatron", "llm_foundry",
    ] = Field(default="torch", description="Whose loop and defaults.")  # fmt: skip
    versions: dict[str, str] = Field(
        default_factory=dict, description='Libraries, as {"torch": "2.13.0"}; what is left out: any of its date.'
    )
    date: str | None = Field(default=None, description="ISO date of the run, where versions are not known.")


class DeviceConfig(Frozen):
    """The card, and what else is on it."""

    gpu: str | None = Field(default=None, description="Name in the catalogue, as rtx4090; or of one of your own.")
    held_nbytes: Nbytes = Field(default=0, description="Memory that other processes or a display hold.")
    headroom: float = Field(default=0.10, ge=0, lt=1, description="Share of usable memory that is to stay free.")
    alloc_conf: str | None = Field(
        default=None, description="PYTORCH_CUDA_ALLOC_CONF; none: what the framework's launcher sets."
    )
    avoid_record_streams: bool | None = Field(
        default=None, description="TORCH_NCCL_AVOID_RECORD_STREAMS; none: torch's default of that version."
    )
    system: Literal["linux", "wsl", "windows"] = Field(
        default="linux", description="On WSL and Windows the driver pages instead of failing."
    )
