"""Records what training asks of the real CUDA allocator; a process of its own, so that the allocator starts empty.

python -m testing.gpu_history CHECKPOINTING OUT.json     # under the PYTORCH_CUDA_ALLOC_CONF to be recorded
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from overspill.forecast.history import compact
from testing.real_step import train
from testing.small_models import small_model

__all__ = ["STEPS", "build", "record"]

#: A longest batch that does not come first.
STEPS = [[(4, 512), (4, 512)], [(4, 1024)], [(4, 256)]]
SHAPE = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "max_position_embeddings": 2048}


def build(attention: str, checkpointing: str) -> Any:
    return small_model(
        "llama", layers=6, attention=attention, dtype=torch.bfloat16, checkpointing=checkpointing, **SHAPE
    )


def record(checkpointing: str) -> dict[str, Any]:
    """Trains on the GPU; what was asked, and the allocator's own peaks."""
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None)
    train(build("sdpa", checkpointing).to("cuda"), STEPS, device="cuda")
    torch.cuda.synchronize()
    gc.collect()
    stats = torch.cuda.memory_stats()
    return {
        "settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "rows": compact(torch.cuda.memory._snapshot()),
        "allocated_peak_nbytes": stats["allocated_bytes.all.peak"],
        "reserved_peak_nbytes": stats["reserved_bytes.all.peak"],
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(record(sys.argv[1])))
