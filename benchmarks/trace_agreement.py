#!/usr/bin/env python3
"""How well a trace agrees with real training steps: on the emulated accelerator, phase by phase.

    python benchmarks/trace_agreement.py

A process registers the emulated accelerator, trains small models of several families on it (a plain loop of two
micro-batches, then one longer, then one), and reads `torch.accelerator.max_memory_allocated` for each phase; the trace
is told that device's rules (overspill.trace.EMULATED). Prints one JSON line per case, then the largest difference.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STEPS = [[(2, 128), (2, 128)], [(2, 192)], [(2, 128)]]
SHAPE = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 352, "max_position_embeddings": 512}
#: family, LoRA, checkpointing, autocast to bf16
CASES = [
    ("llama", lora, checkpointing, autocast)
    for lora in (False, True)
    for checkpointing in ("none", "reentrant", "non-reentrant")
    for autocast in (False, True)
] + [(family, lora, "none", False) for family in ("qwen3", "olmo2", "gpt_neox", "phi3") for lora in (False, True)]


def main() -> None:
    import torch

    from overspill.trace import EMULATED, TraceOptions, language_batch, trace_step
    from testing import emulated_accelerator
    from testing.lora import add_lora
    from testing.real_step import grouped, train
    from testing.small_models import small_model

    emulated_accelerator.register()
    worst = 0.0
    for family, lora, checkpointing, autocast in CASES:

        def build(family: str = family, lora: bool = lora, checkpointing: str = checkpointing) -> Any:
            shape = SHAPE if family != "gpt_neox" else {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}
            model = small_model(family, layers=3, checkpointing=checkpointing, **shape)
            return add_lora(model, inputs_need_grad=checkpointing == "reentrant") if lora else model

        dtype = torch.bfloat16 if autocast else None
        trace = trace_step(
            build,
            [[language_batch(*sizes) for sizes in step] for step in STEPS],
            TraceOptions(rules=EMULATED, max_grad_norm=1.0, autocast=dtype),
        )
        found = grouped(trace.peaks)
        model = build().to("emulated")
        gc.collect()
        peaks: dict[str, int] = {}
        phases = [""]

        def at(phase: str, peaks: dict[str, int] = peaks, phases: list[str] = phases) -> None:
            if phases[-1]:
                peaks[phases[-1]] = max(peaks.get(phases[-1], 0), torch.accelerator.max_memory_allocated())
            torch.accelerator.reset_peak_memory_stats()
            phases.append(phase)

        train(model, STEPS, device="emulated", at=at, autocast=dtype)
        at("")
        torch.accelerator.synchronize()
        del model
        differences = {p: found[p] / peaks[p] - 1 for p in ("forward", "backward", "clip", "step")}
        worst = max(worst, *(abs(d) for d in differences.values()))
        print(
            json.dumps(
                {
                    "family": family,
                    "method": "lora" if lora else "full",
                    "checkpointing": checkpointing,
                    "autocast": autocast,
                    "measured_nbytes": max(peaks.values()),
                    "traced_nbytes": trace.peak_nbytes,
                    "differences": {p: round(d, 5) for p, d in differences.items()},
                }
            ),
            flush=True,
        )
    print(json.dumps({"largest_difference": round(worst, 5)}), flush=True)


if __name__ == "__main__":
    main()
