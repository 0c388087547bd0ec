"""What LitGPT does by version: which code its layers run, what its loop holds, how its FSDP adds micro-batches up.

The mechanisms, with the version and the source file of each: docs/theory/litgpt.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from overspill.forecast.layers.litgpt import FIRST_PROMPT
from overspill.forecast.layers.style import Adapter, LitGpt

if TYPE_CHECKING:
    from overspill.forecast.device.draft import Draft
    from overspill.forecast.device.settings import Sharding

__all__ = ["resolve_litgpt"]


def resolve_litgpt(draft: Draft) -> None:
    """LitGPT's own models under Fabric, in one dtype throughout (bf16-true): docs/theory/litgpt.md, by version."""
    job, values, method = draft.job, draft.values, draft.job.method
    version, size = draft.versions["litgpt"], values["trained_itemsize"]
    values["adapter_itemsize"] = size
    full = method.kind == "full"
    prompt = method.kind if method.kind == "adapter" or method.kind == "adapter_v2" else "none"
    code = LitGpt(
        prompt=prompt,
        wide_norm_weight=version < (0, 2) or version >= (0, 4, 8),
        late_repeat=version >= (0, 5, 5),
        pads_in_place=version >= (0, 3, 1),
        keeps_quantised_input=method.base in ("nf4", "fp4") and _bitsandbytes(draft, version) <= (0, 43, 0),
        head_chunk=0 if full else 128,
        chunk_softcap=version >= (0, 5, 5),
        names_both_norms=version < (0, 3),
        adds_attention_first=version >= (0, 5, 5),
    )
    adapter = Adapter("litgpt", method.rank, size, method.dropout) if method.kind == "lora" else None
    values["style"] = replace(values["style"], code="litgpt", norm="python", adapter=adapter, litgpt=code)
    values["caller_holds_logits"] = True
    values["quantises_head"] = method.base is not None
    values["unties"] = True  # GPT has wte and lm_head; only pretrain ties them
    values["frozen_embedding"] = not full
    values["first_prompt"] = FIRST_PROMPT if prompt != "none" else 0
    # lit-gpt of 2023 put the longest sample into the first batch, "so potential OOMs happen right away"
    values["longest_first"] = version < (0, 2)
    values["holds_last_step"] = version >= (0, 2)
    if values["longest_first"] and not job.data.lengths:
        draft.assume("data.lengths", "half of seq_len", "batches after the first, into which lit-gpt puts the longest")
    sharding: Sharding = values["sharding"]
    if sharding.kind == "fsdp1":
        if job.kernels.reentrant is None:
            values["reentrant"] = False
        # FSDPStrategy sets use_orig_params and wraps each Block; Fabric's no_backward_sync is FSDP's no_sync
        values["sharding"] = replace(
            sharding, flat_gradients=True, accumulates_whole=True, prefetched_units=1, retains_inputs=False,
            pending_reductions=0,
        )  # fmt: skip


def _bitsandbytes(draft: Draft, version: tuple[int, ...]) -> tuple[int, ...]:
    """What a job names, else the pin of LitGPT's own package (its metadata on PyPI)."""
    if "bitsandbytes" in draft.versions.named:
        return draft.versions["bitsandbytes"]
    pinned = (0, 42, 0) if version < (0, 5, 5) else (0, 44, 0)
    draft.assume("framework.versions.bitsandbytes", ".".join(map(str, pinned)), "pinned by LitGPT")
    return pinned
