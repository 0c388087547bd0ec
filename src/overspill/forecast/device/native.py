"""What torch's own trainers (torchtune, torchtitan), llm-foundry and DeepSpeed's engine do by default, by version.

The mechanisms: docs/theory/frameworks.md. Each function changes what frameworks.py has filled in.
"""

from __future__ import annotations

from dataclasses import replace

from overspill.forecast.device.draft import ITEMSIZE, Draft, set_optimizer
from overspill.forecast.device.settings import Sharding
from overspill.forecast.layers.style import Adapter, Style

__all__ = ["deepspeed", "llm_foundry", "torchtitan", "torchtune"]

#: The last torchtitan release whose configurations ask for plain cross-entropy; later ones ask for it in chunks.
NEWEST_WITH_PLAIN_LOSS = (0, 2, 99)


def deepspeed(draft: Draft) -> None:
    """DeepSpeed's engine under ZeRO: the whole module in the compute dtype, an fp32 master of this rank's partition.

    deepspeed/runtime/engine.py, _configure_distributed_model, and runtime/zero, 0.9 to 0.19; docs/theory/frameworks.md.
    """
    job, values = draft.job, draft.values
    sharding: Sharding = values["sharding"]
    size = ITEMSIZE[job.model.autocast or job.model.dtype]
    style: Style = values["style"]
    adapter = None if style.adapter is None else replace(style.adapter, itemsize=size)
    values["style"] = replace(
        style, residual=size if style.residual == style.weight else style.residual, weight=size, compute=size,
        autocast=False, adapter=adapter,
    )  # fmt: skip
    for name in ("trained_itemsize", "gradient_itemsize", "frozen_itemsize", "adapter_itemsize"):
        values[name] = size
    values["converts_outputs"] = False
    third = sharding.kind == "zero3"
    on_host = job.offload.optimizer != "device"
    values["gradients_on_host"] = on_host
    values["gradients_at_rest"] = third and not on_host  # grad_partitions_flat_buffer
    values["weights_on_host"] = third and job.offload.weights != "device"
    zero_init = job.parallel.zero_init
    if third and zero_init is None:
        # transformers' from_pretrained partitions while it loads, once TrainingArguments have read the file.
        zero_init = job.framework.name not in ("deepspeed", "torch")
        draft.assume("parallel.zero_init", zero_init, "a script without zero.Init loads the model whole on each rank")
    values["loads_whole"] = third and not zero_init
    if values["loads_whole"]:
        draft.notes.append("Without zero.Init each rank first has the whole model on its device (engine.py moves it).")
    values["sharding"] = replace(
        sharding,
        gathered_itemsize=size,
        reduce_itemsize=size if job.parallel.reduce_dtype == "auto" else ITEMSIZE[job.parallel.reduce_dtype],
        stage_1_buckets=draft.versions["deepspeed"] >= (0, 5),  # from then on stage 1 is stage 2's optimizer
    )
    # In stage 3 an fp32 partition is its own master (stage3.py, _create_fp32_partitions).
    master = 0 if third and size == 4 else 4
    set_optimizer(draft, state_itemsize=4, fused=job.framework.name == "deepspeed", master=master)


def torchtune(draft: Draft) -> None:
    """torchtune's recipes: one dtype throughout, its own modules and LoRA, NF4 by torchao."""
    job, values, method = draft.job, draft.values, draft.job.method
    kernels = job.kernels
    size = values["trained_itemsize"]
    values["adapter_itemsize"] = size
    adapter = Adapter("torchtune", method.rank, size, method.dropout) if method.kind == "lora" else None
    values["style"] = replace(
        values["style"],
        code="torchtune",
        compiled=kernels.compile,
        norm="kernel" if kernels.compile else "wide" if draft.versions["torchtune"] >= (0, 5) else "python",
        rope="kernel" if kernels.compile else "complex",
        mlp="kernel_pair" if kernels.compile else "python",
        repeat_kv=True,
        adapter=adapter,
        # NF4Tensor.get_original_weight: two halves as int64 indices, as values and scaled, then stacked (torchao 0.4 to
        # 0.12; measured by benchmarks/storages.py). Compiled, it is one kernel.
        dequantise_itemsize=0 if kernels.compile else 14,
    )
    chosen = kernels.loss
    if chosen == "auto":
        chosen = "chunked" if draft.versions["torchtune"] >= (0, 4) else "plain"
        draft.assume("kernels.loss", chosen, "the recipe's default of that version")
    values["loss"] = {"plain": "upcast", "chunked": "chunked", "fused": "in_place", "fused_linear": "fused_linear"}[
        chosen
    ]
    values["logits"] = "upcast"
    values["loss_chunks"] = 8
    values["caller_holds_logits"] = False
    # compile_loss() returns a compiled plain loss, which the full recipes drop; of a chunked one it compiles a method.
    values["compiled_loss"] = kernels.compile and (chosen == "chunked" or method.kind == "lora")
    values["reentrant"] = False
    set_optimizer(draft, state_itemsize=size, fused=draft.versions["torchtune"] >= (0, 3))
    sharding: Sharding = values["sharding"]
    if sharding.kind == "fsdp1":
        values["sharding"] = replace(sharding, retains_inputs=False)


def torchtitan(draft: Draft) -> None:
    """torchtitan: fp32 shards under FSDP, bf16 where it computes, gradients reduced in fp32."""
    job, values = draft.job, draft.values
    kernels = job.kernels
    compute = ITEMSIZE[job.model.autocast or "bf16"]
    compiled = kernels.compile
    values["style"] = replace(
        values["style"],
        residual=compute,
        compute=compute,
        weight=compute,
        autocast=False,
        code="torchtitan",
        compiled=compiled,
        norm="kernel" if compiled or kernels.fused_norm else "composite",
        rope="kernel" if compiled else "complex",
        mlp="kernel_pair" if compiled else "python",
        repeat_kv=True,
    )
    version = draft.versions["torchtitan"]
    chosen = kernels.loss
    if chosen == "auto":
        chosen = "chunked" if version > NEWEST_WITH_PLAIN_LOSS else "plain"
        draft.assume("kernels.loss", chosen, "torchtitan's loss of that version")
    values["loss"] = {"plain": "upcast", "chunked": "chunked", "fused": "in_place", "fused_linear": "fused_linear"}[
        chosen
    ]
    values["logits"] = "upcast"
    values["loss_chunks"] = 8
    # Before 0.0.2 the training loop kept `pred` until the next step; then `del pred` stands before loss.backward().
    values["caller_holds_logits"] = version < (0, 0, 2)
    values["compiled_loss"] = compiled and version >= (0, 1)  # build_cross_entropy_loss compiles it with the model
    values["reentrant"] = False
    values["trained_itemsize"] = values["gradient_itemsize"] = 4
    sharding: Sharding = values["sharding"]
    values["sharding"] = replace(
        sharding,
        gathered_itemsize=compute,
        reduce_itemsize=4,
        # apply_fsdp: tok_embeddings and [norm, output] are units of their own from 0.1 on; before, the root held them.
        wrap_embeddings=sharding.wrap_embeddings or (sharding.kind == "fsdp2" and version >= (0, 1)),
        # What torchtitan logs are active bytes. FSDP1 hands blocks to a second stream (record_stream), where they stay
        # active until the device gets there; the host is let two units ahead (_FreeEventQueue of _limiter_utils.py).
        prefetched_units=2 if sharding.kind == "fsdp1" else 1,
        pending_reductions=2 if sharding.kind == "fsdp1" else sharding.pending_reductions,
        counts_active=True,
    )
    set_optimizer(draft, state_itemsize=4, fused=version >= (0, 0, 2))


def llm_foundry(draft: Draft) -> None:
    """Composer under FSDP: autocast in bf16, mixed_precision PURE (bf16 reductions) or DEFAULT (fp32 reductions)."""
    values = draft.values
    values["style"] = replace(values["style"], residual=2, compute=2, weight=2, autocast=False)
    values["loss"] = "native"
    values["trained_itemsize"] = values["gradient_itemsize"] = 4
    values["reentrant"] = False
    sharding: Sharding = values["sharding"]
    values["sharding"] = replace(sharding, gathered_itemsize=2)
    set_optimizer(draft, state_itemsize=4)
