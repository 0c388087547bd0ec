"""The allocator's model against the real CUDA allocator: allocated exact, reserved within 3 %.

Each test records a history on the GPU, replays its requests, and compares. With OVERSPILL_KEEP_HISTORIES=DIRECTORY the
recorded histories are kept there as JSON; those put into tests/assets/histories/ are replayed everywhere
(tests/pure/test_allocator_history.py).
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overspill.forecast.allocator import replay
from overspill.forecast.allocator_settings import AllocatorSettings
from overspill.forecast.history import read_history
from overspill.trace import CUDA, CUDA_HOPPER, AttentionKernel, TraceOptions, language_batch, trace_step
from overspill.trace.attention import attention_registered
from testing.gpu_history import STEPS, build
from testing.real_step import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA or ROCm device"),
]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "settings", ["", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4"]
)
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_a_replay_of_what_was_asked_holds_what_the_gpu_held(settings: str, checkpointing: str, tmp_path: Path) -> None:
    out = tmp_path / "history.json"
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "testing.gpu_history", checkpointing, str(out)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=300)
    found = json.loads(out.read_text())
    if keep := os.environ.get("OVERSPILL_KEEP_HISTORIES"):
        name = f"{checkpointing}-{settings.replace(':', '-') or 'default'}.json.gz"
        Path(keep).mkdir(parents=True, exist_ok=True)
        (Path(keep) / name).write_bytes(gzip.compress(json.dumps(found).encode()))
    history = read_history(found["rows"])
    result = replay(history.events, AllocatorSettings.parse(settings))
    assert result.allocated_peak_nbytes == found["allocated_peak_nbytes"]
    assert result.reserved_peak_nbytes == pytest.approx(found["reserved_peak_nbytes"], rel=0.03)
    assert history.reserved_peak_nbytes == found["reserved_peak_nbytes"]


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_a_trace_told_cudas_rules_agrees_with_the_gpu_within_2_percent(checkpointing: str) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(build("sdpa", checkpointing).to("cuda"), STEPS, device="cuda")
    real = torch.cuda.max_memory_allocated() - before
    rules = CUDA_HOPPER if torch.cuda.get_device_capability()[0] == 9 else CUDA
    traced = trace_step(
        lambda: build(attention_registered(), checkpointing),
        [[language_batch(*sizes) for sizes in step] for step in STEPS],
        TraceOptions(rules=rules, attention=AttentionKernel.FLASH, max_grad_norm=1.0),
    )
    assert traced.peak_nbytes == pytest.approx(real, rel=0.02)
