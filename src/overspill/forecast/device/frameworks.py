"""From a job to `Resolved`: what each framework does by default, by version. The mechanisms: docs/theory/frameworks.md.

One function a group of frameworks; each starts from torch's own behaviour and changes what is its own. A default that
was taken is named in `Resolved.assumed`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from overspill.catalog.launchers import launcher_of
from overspill.catalog.optimizers import optimizers_of
from overspill.errors import OverspillError
from overspill.forecast.device import native
from overspill.forecast.device.draft import ITEMSIZE
from overspill.forecast.device.draft import Draft as _Draft
from overspill.forecast.device.draft import set_optimizer as _set_optimizer
from overspill.forecast.device.litgpt import resolve_litgpt
from overspill.forecast.device.settings import Resolved, Sharding
from overspill.forecast.device.versions import Versions
from overspill.forecast.layers.head import LossCode
from overspill.forecast.layers.style import Adapter, Style
from overspill.job import Job
from overspill.model.facts import ModelFacts

__all__ = ["resolve"]

MiB = 2**20
#: cuBLAS's workspace of a handle: :4096:2:16:8 KiB, on Hopper and later 32 MiB
#: (aten/src/ATen/cuda/CublasHandlePool.cpp).
#: The forward's thread and the autograd thread have a handle each.
CUBLAS_WORKSPACE_NBYTES = (4096 * 2 + 16 * 8) * 1024
HOPPER_WORKSPACE_NBYTES = 32 * MiB
_HF = ("torch", "overspill", "hf_trainer", "trl", "accelerate", "axolotl", "llamafactory", "unsloth", "deepspeed")
#: Families whose flash-attention code copied keys and values to all heads before transformers 4.48.
_REPEATED_KV = ("mistral", "mixtral", "qwen2_moe", "phi3")


def resolve(job: Job, facts: ModelFacts, *, hopper: bool = False) -> Resolved:
    """Settle what the job leaves open. hopper: the card is of compute capability 9 or later.

    Raises OverspillError OVS101 for an optimizer that the framework has not.
    """
    _refuse_optimizer(job)
    draft = _Draft(job, facts, Versions(job.framework.versions))
    name = job.framework.name
    _common(draft, hopper=hopper)
    if name in _HF:
        _hf(draft)
    elif name == "litgpt":
        resolve_litgpt(draft)
        _set_optimizer(draft, state_itemsize=draft.values["trained_itemsize"])
        if job.method.base is not None:  # bnb.optim.PagedAdamW: managed memory, which torch does not count
            draft.values["optimizer"] = replace(draft.values["optimizer"], on_device=False)
    elif name == "torchtune":
        native.torchtune(draft)
    elif name == "torchtitan":
        native.torchtitan(draft)
    elif name == "megatron":
        _megatron(draft)
    else:
        native.llm_foundry(draft)
    _allocator(draft)
    for library in draft.versions.assumed:
        draft.assume(f"framework.versions.{library}", "newest", "no version is named")
    return Resolved(**draft.values, assumed=tuple(draft.assumed), notes=tuple(draft.notes))


def _allocator(draft: _Draft) -> None:
    """How the process was started: PYTORCH_CUDA_ALLOC_CONF and NCCL's way of keeping tensors alive."""
    job, values = draft.job, draft.values
    name, conf = job.framework.name, job.device.alloc_conf
    launcher = launcher_of(name, draft.versions.named.get(name)) if conf is None else None
    if launcher is not None:
        conf = launcher.alloc_conf
        draft.assume("device.alloc_conf", conf, launcher.source)
    values["alloc_conf"] = conf or ""
    # From torch 2.8 on ProcessGroupNCCL keeps references instead (pytorch#148590); the variable is ignored since.
    avoids = job.device.avoid_record_streams or draft.versions["torch"] >= (2, 8)
    values["records_streams"] = not avoids
    values["steps"] = job.train.steps


def _refuse_optimizer(job: Job) -> None:
    name, known = job.framework.name, optimizers_of(job.framework.name)
    if known is not None and job.optimizer.name not in known.names:
        raise OverspillError(
            "OVS101", f"{name} has no such optimizer.", field="optimizer.name", value=job.optimizer.name,
            limit=", ".join(known.names), next_step="In a plain loop (framework.name = torch) any can be used.",
        )  # fmt: skip


def _common(draft: _Draft, *, hopper: bool) -> None:
    job, layout = draft.job, draft.job.parallel
    weight = ITEMSIZE[job.model.dtype]
    autocast = job.model.autocast is not None
    compute = ITEMSIZE[job.model.autocast] if job.model.autocast else weight
    checkpointing = job.kernels.checkpointing
    if checkpointing == "auto":
        checkpointing = "full" if job.model.gradient_checkpointing else "none"
    every = job.kernels.checkpoint_every
    if checkpointing == "selective":
        checkpointing, every = "full", max(2, every)
    workspace = HOPPER_WORKSPACE_NBYTES if hopper else CUBLAS_WORKSPACE_NBYTES
    adapter = job.method.adapter_dtype
    adapter_size = 4 if adapter == "auto" else ITEMSIZE[adapter]
    sequences, seq_len = _batch(draft)
    draft.values.update(
        style=Style(residual=weight, compute=compute, weight=weight,
                    autocast=autocast, quantised=job.method.base is not None,
                    attention=_attention(draft)),
        optimizer=None,
        loss="native",
        logits="native",
        sequences=sequences,
        seq_len=seq_len,
        context=layout.context * layout.ulysses,
        tensor=layout.tensor,
        sequence_parallel=layout.tensor > 1 and layout.sequence_parallel,
        loss_parallel=layout.tensor > 1 and layout.loss_parallel,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        pipeline=layout.pipeline,
        microbatches_in_flight=1,
        accumulation=job.train.accumulation,
        trained_itemsize=weight,
        adapter_itemsize=adapter_size,
        gradient_itemsize=weight,
        frozen_itemsize=weight,
        caller_holds_logits=False,
        converts_outputs=False,
        loss_chunks=1,
        checkpoint_every=every,
        checkpointing=checkpointing,
        reentrant=bool(job.kernels.reentrant),
        offloads_boundaries=job.offload.activations != "device",
        gradients_at_rest=False,
        update_in_backward=job.optimizer.in_backward,
        weights_on_host=job.offload.weights != "device",
        # Who updates on the host sends each gradient there when it has been reduced.
        gradients_on_host=job.offload.gradients != "device" or job.offload.optimizer != "device",
        workspace_nbytes=2 * workspace,
        sharding=_sharding(draft),
        expert_ranks=max(
            1, layout.data_ranks * layout.context * layout.tensor // (layout.expert * layout.expert_tensor)
        ),
    )  # fmt: skip


def _batch(draft: _Draft) -> tuple[int, int]:
    job = draft.job
    sequences = job.train.micro_batch
    if job.task.kind in ("dpo", "kto", "orpo", "simpo", "reward"):
        sequences *= 2  # chosen and rejected go through in one batch
    seq_len = job.data.seq_len + job.task.vision_tokens
    if job.data.lengths and not job.data.packing:
        seq_len = max(job.data.lengths)  # a batch is padded to its longest
    return sequences, seq_len


def _attention(draft: _Draft) -> Any:
    chosen = draft.job.kernels.attention
    if chosen == "auto":
        draft.assume("kernels.attention", "sdpa", "the default of transformers since 4.36, and of torch's own loops")
        chosen = "sdpa"
    return {"sdpa": "flash_aten", "flash": "flash", "eager": "eager", "math": "math", "flex": "flex"}[chosen]


def _sharding(draft: _Draft) -> Sharding:
    layout = draft.job.parallel
    ranks = layout.data_ranks
    kind = layout.data
    if kind == "auto":
        kind = "none" if ranks == 1 else "ddp"
    if ranks * layout.context == 1 and kind in ("ddp", "none"):
        kind = "none"
    full = draft.job.method.kind == "full"
    weight = ITEMSIZE[draft.job.model.dtype]
    gathered = weight if layout.param_dtype == "auto" else ITEMSIZE[layout.param_dtype]
    if layout.param_dtype == "auto" and draft.job.model.autocast and kind in ("fsdp1", "fsdp2"):
        gathered = ITEMSIZE[draft.job.model.autocast]
    reduce = gathered if layout.reduce_dtype == "auto" else ITEMSIZE[layout.reduce_dtype]
    split = ranks // layout.replicas
    if kind in ("fsdp1", "fsdp2", "zero1", "zero2", "zero3", "distributed_optimizer"):
        split *= layout.context * layout.ulysses if kind != "distributed_optimizer" else layout.context
    return Sharding(
        kind=kind,
        ranks=max(1, split),
        reduce_bucket_numel=_or(layout.reduce_bucket_numel, 500_000_000),
        allgather_bucket_numel=_or(layout.allgather_bucket_numel, 500_000_000),
        prefetch_bucket_numel=_or(layout.prefetch_bucket_numel, 50_000_000),
        max_live_numel=_or(layout.max_live_parameters, 1_000_000_000),
        persistence_numel=_or(layout.persistence_numel, 100_000),
        overlap_comm=bool(layout.overlap_comm) if layout.overlap_comm is not None else kind == "zero3",
        gathered_itemsize=gathered,
        reduce_itemsize=reduce,
        wrap_embeddings=layout.wrap_embeddings,
        whole_model_unit=layout.wrap == "root",
        reshard_after_forward=layout.reshard_after_forward,
        # [Note: Prefetch] FSDP1 fetches the next unit of backward by the order seen in forward. Under transformers'
        # checkpointing each unit runs its forward again inside backward, and nothing is fetched ahead.
        prefetched_units=0 if kind == "fsdp1" and draft.job.model.gradient_checkpointing else 1,
        retains_inputs=kind == "fsdp1" and not full and split > 1,
        # [Note: Pending] A unit's gradients are reduced on another stream while the next unit's backward runs; its
        # buffers are held until then. FSDP2 besides copies a gathered unit out of the collective's buffer. From torch
        # 2.5 on (pytorch#129721) it copies gradients into the reduction's input at once and keeps that input alone,
        # until the next unit is about to reduce; and no collective's output outlives its copies in backward.
        pending_reductions=1 if kind in ("fsdp1", "fsdp2") and not draft.job.model.gradient_checkpointing else 0,
        copied_units=1 if kind == "fsdp2" else 0,
        copied_in_backward=1 if kind == "fsdp2" and draft.versions["torch"] < (2, 5) else 0,
        reduces_one_behind=kind == "fsdp2" and draft.versions["torch"] >= (2, 5),
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _hf(draft: _Draft) -> None:
    """transformers' models under HF Trainer, TRL, Accelerate, a plain loop, or DeepSpeed."""
    job, versions, values = draft.job, draft.versions, draft.values
    transformers = versions["transformers"]
    style: Style = values["style"]
    kernels, method = job.kernels, job.method
    flash = style.attention == "flash"
    family = draft.facts.family
    repeat = (flash and family in _REPEATED_KV and transformers < (4, 48)) or (
        style.attention == "flash_aten" and transformers < (4, 48)
    )
    adapter = None
    if method.kind == "lora":
        adapter = Adapter(
            "fused" if kernels.fused_adapters else "peft", method.rank, values["adapter_itemsize"], method.dropout
        )
    residual, norm_wide = style.residual, False
    split = values["sharding"].splits_weights
    if method.base is not None and method.upcast in ("norms", "all") and split:
        draft.notes.append("A quantised base that is sharded is not upcast (TRL: is_sharded_qlora).")
    elif method.base is not None and method.upcast in ("norms", "all"):
        residual, norm_wide = (
            4,
            True,
        )  # a norm with fp32 weights gives fp32, and each linear answers in its input's dtype
    values["style"] = replace(
        style,
        residual=residual,
        norm="kernel" if kernels.fused_norm else "python",
        norm_fp32_output=norm_wide,
        rope="in_place" if kernels.fused_rope else "python",
        mlp="recompute" if kernels.fused_mlp else "python",
        repeat_kv=repeat,
        adapter=adapter,
        expert_linears=transformers < (5, 0),
        grouped_experts=transformers >= (5, 0),
    )
    values["logits"] = _hf_logits(transformers)
    values["loss"] = _hf_loss(draft, values["logits"])
    if job.kernels.reentrant is None and values["checkpointing"] == "full":
        values["reentrant"] = transformers < (5, 0)
    values["converts_outputs"] = job.model.autocast is not None and job.framework.name != "torch"
    sharding: Sharding = values["sharding"]
    weight = values["trained_itemsize"]
    if sharding.kind in ("fsdp1", "fsdp2") and job.model.autocast and method.kind == "full":
        upcast = job.parallel.upcast_trained
        if upcast is None:
            upcast = True
            draft.assume("parallel.upcast_trained", True, "Accelerate keeps trained FSDP shards in fp32 under autocast")
        if upcast:
            weight = 4
    values["trained_itemsize"] = values["gradient_itemsize"] = weight
    half = (weight if method.kind == "full" else values["adapter_itemsize"]) < 4
    if half and (job.framework.name == "deepspeed" or sharding.kind.startswith("zero")):
        # DeepSpeed's BF16_Optimizer, FP16_Optimizer and ZeRO keep fp32 masters and moments beside half weights.
        _set_optimizer(draft, state_itemsize=4, master=4)
    elif method.kind == "lora":
        _set_optimizer(draft, state_itemsize=values["adapter_itemsize"])
    else:
        _set_optimizer(draft, state_itemsize=weight)
    if sharding.kind in ("zero1", "zero2", "zero3"):
        native.deepspeed(draft)
    if values["reentrant"] and method.kind == "lora" and values["checkpointing"] != "none":
        draft.notes.append(
            "Reentrant checkpointing gives no gradient where a layer's input needs none: with frozen embeddings call "
            "model.enable_input_require_grads(), or use_reentrant=False."
        )


def _hf_logits(transformers: tuple[int, ...]) -> LossCode:
    if transformers < (4, 46):
        return "upcast_all"
    return "upcast_in_loss" if transformers < (4, 50) else "pad_labels"


def _hf_loss(draft: _Draft, plain: LossCode) -> LossCode:
    chosen = draft.job.kernels.loss
    if chosen == "auto":
        draft.assume("kernels.loss", "plain", "transformers' own cross-entropy")
        chosen = "plain"
    return {"plain": plain, "fused": "in_place", "fused_linear": "fused_linear", "chunked": "chunked"}[chosen]


def _megatron(draft: _Draft) -> None:
    """Megatron-Core with TransformerEngine: bf16 weights, fp32 main gradients that rest, a distributed optimizer."""
    job, values = draft.job, draft.values
    values["style"] = replace(
        values["style"],
        code="megatron",
        norm="kernel",
        rope="kernel",
        mlp="kernel",
        grouped_experts=True,
    )
    values["loss"] = "te_fused" if job.kernels.loss == "fused" else "vocab_parallel"
    values["gradient_itemsize"] = 4
    values["gradients_at_rest"] = True
    stages = values["pipeline"]
    values["microbatches_in_flight"] = min(stages, values["accumulation"])
    kind = job.parallel.data
    if kind == "auto":
        draft.assume("parallel.data", "distributed_optimizer", "--use-distributed-optimizer, as in its examples")
        values["sharding"] = replace(values["sharding"], kind="distributed_optimizer",
                                     ranks=max(1, job.parallel.data_ranks * job.parallel.context))  # fmt: skip
    _set_optimizer(draft, state_itemsize=4, fused=True, master=4)
