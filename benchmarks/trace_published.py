#!/usr/bin/env python3
"""A trace beside a published measurement: LoRA of Mistral-7B on an A100, max_memory_allocated.

    python benchmarks/trace_published.py

The run: foundation-model-stack/fms-acceleration, rows fms-049 and fms-053 of shared/truth/measured.csv: bf16, rank 16
on q, k, v, o with fp32 adapters, sequences packed to 4096, Hugging Face checkpointing (reentrant), flash attention 2,
transformers 4.48.1. The loss is the one thing that transformers 5 does differently: 4.48 casts the logits to fp32 and
makes a contiguous copy of all but the last position. Prints one JSON line per micro-batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PUBLISHED_GIB = {4: 24.871, 8: 36.082}


def main() -> None:
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    from overspill.trace import AttentionKernel, TraceOptions, language_batch, trace_step
    from overspill.trace.attention import attention_registered
    from overspill.units import GiB
    from testing.lora import add_lora

    def loss_of_4_48(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        logits = logits.float()
        shifted = logits[..., :-1, :].contiguous()
        wanted = labels[..., 1:].contiguous()
        return torch.nn.functional.cross_entropy(shifted.view(-1, vocab_size), wanted.view(-1))

    def build() -> Any:
        config = MistralConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            sliding_window=None,
            attn_implementation=attention_registered(),
        )
        config.use_cache = False
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = MistralForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
        add_lora(model, rank=16, inputs_need_grad=True, targets=("q_proj", "k_proj", "v_proj", "o_proj"))
        model.activation_checkpointing_enable({"use_reentrant": True})
        model.loss_function = loss_of_4_48
        return model

    for sequences, published in PUBLISHED_GIB.items():
        options = TraceOptions(attention=AttentionKernel.FLASH, max_grad_norm=1.0)
        trace = trace_step(build, [[language_batch(sequences, 4096)]] * 2, options)
        traced = trace.peak_nbytes / GiB
        print(
            json.dumps(
                {
                    "sequences": sequences,
                    "traced_gib": round(traced, 3),
                    "published_gib": published,
                    "difference": round(traced / published - 1, 5),
                    "phase": trace.peak.phase,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
