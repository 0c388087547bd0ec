#!/usr/bin/env python3
"""How long a trace of a large model takes, from its configuration to allocated and reserved memory.

    python benchmarks/trace_time.py                  # every case
    python benchmarks/trace_time.py llama-70b        # some

Each case is a fresh process: the model is built on meta, two training steps are traced and replayed through the
allocator's model. `seconds` counts from there; `import_seconds` is torch, transformers and the model's class. No
weights are needed: shapes are the published configurations of these models. Prints one JSON line per case.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_LLAMA_70B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
#: name: (config class, model class, shape, method, checkpointing)
CASES: dict[str, tuple[str, str, dict[str, Any], str, bool]] = {
    "llama-70b": ("LlamaConfig", "LlamaForCausalLM", _LLAMA_70B, "full", False),
    "llama-70b-checkpointing": ("LlamaConfig", "LlamaForCausalLM", _LLAMA_70B, "full", True),
    "llama-70b-lora-checkpointing": ("LlamaConfig", "LlamaForCausalLM", _LLAMA_70B, "lora", True),
    "qwen2.5-72b-checkpointing": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {
            "vocab_size": 152064,
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
        "full",
        True,
    ),
    "gemma3-27b-checkpointing": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262208,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
        },
        "full",
        True,
    ),
    "qwen3-235b-a22b-checkpointing": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
        },
        "full",
        True,
    ),
}


def run(case: str) -> dict[str, Any]:
    """One case, in this process."""
    start = time.perf_counter()
    import torch
    import transformers

    import overspill.trace.interception  # noqa: F401
    from overspill.trace import AttentionKernel, TraceOptions, language_batch, trace_step
    from overspill.trace.attention import attention_registered
    from testing.lora import add_lora

    config_name, model_name, shape, method, checkpointing = CASES[case]
    config_class, model_class = getattr(transformers, config_name), getattr(transformers, model_name)
    imported = time.perf_counter()

    def build() -> Any:
        config = config_class(**shape, attn_implementation=attention_registered())
        config.use_cache = False
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = model_class(config)
        finally:
            torch.set_default_dtype(torch.float32)
        if method == "lora":
            add_lora(model, rank=16)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        return model

    options = TraceOptions(attention=AttentionKernel.FLASH, max_grad_norm=1.0)
    trace = trace_step(build, [[language_batch(1, 4096)]] * 2, options)
    traced = time.perf_counter()
    replayed = trace.replay()
    return {
        "case": case,
        "import_seconds": round(imported - start, 2),
        "seconds": round(time.perf_counter() - imported, 2),
        "replay_seconds": round(time.perf_counter() - traced, 2),
        "events": len(trace.events),
        "layers_traced": [r.kept for _, r in trace.repetitions],
        "notes": trace.notes,
        "peak_phase": trace.peak.phase,
        "allocated_nbytes": trace.peak_nbytes,
        "reserved_nbytes": replayed.reserved_peak_nbytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--inside", action="store_true", help="run the one case in this process")
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(run(arguments.cases[0])), flush=True)
        return
    for case in arguments.cases or CASES:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.trace_time", "--inside", case]
        subprocess.run(command, check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
