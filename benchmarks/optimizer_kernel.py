#!/usr/bin/env python3
"""How close is the fused optimizer kernel to what the memory allows?  One JSON line per system on stdout.

  python benchmarks/optimizer_kernel.py                                  # all systems, interleaved rounds
  python benchmarks/optimizer_kernel.py --system overspill --system torch_fused --n 100000000 --reps 7

Systems of one call run in turns (round 1 of each, round 2 of each, …) on the same fp32 arrays, so that a machine
whose speed drifts is unfair to none. "stream" moves Adam's seven streams with trivial arithmetic: the limit.
Of the keys, GBps = params_per_s × bytes_per_param, each stream counted once;
other_cpu is the share of one core that other processes took: above 0.1 discard the timing.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from beside import Beside
from overspill import _native
from overspill.optim.kernels import KERNELS

SYSTEMS = {
    "stream": "the seven streams of fp32 Adam with trivial arithmetic",
    "overspill": "fp32 weights, gradients and moments",
    "overspill_split": "bf16 weights and gradients, 16-bit residual, fp32 moments",
    "overspill_fp32_master": "bf16 weights and gradients, fp32 master and moments",
    "overspill_bf16_moments": "bf16 weights, gradients and moments, 16-bit residual",
    "torch_fused": "torch.optim.AdamW(fused=True) on the same fp32 arrays",
}
BYTES_PER_PARAM = {
    "stream": 28,
    "overspill": 28,
    "overspill_split": 26,
    "overspill_fp32_master": 28,
    "overspill_bf16_moments": 18,
    "torch_fused": 28,
}
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
HZ = os.sysconf("SC_CLK_TCK")


def machine_busy_seconds() -> float:
    """CPU seconds of all processes; waiting does not count."""
    with open("/proc/stat", encoding="ascii") as stat:  # noqa: PTH123 (a special file, read at once)
        ticks = [int(cell) for cell in stat.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / HZ


def own_busy_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def wait_until_quiet(patience_seconds: float, limit: float = 0.25) -> None:
    """Return once others take less than `limit` of a core, or when patience ends: other_cpu then tells."""
    end = time.perf_counter() + patience_seconds
    while time.perf_counter() < end:
        begin, busy, own = time.perf_counter(), machine_busy_seconds(), own_busy_seconds()
        time.sleep(0.5)
        others = (machine_busy_seconds() - busy) - (own_busy_seconds() - own)
        if others / (time.perf_counter() - begin) < limit:
            return


@dataclass
class Arena:
    """Named arrays, each a mapping of its own, made on first use and shared by all systems of one call."""

    n: int
    huge_pages: bool
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)

    def get(self, name: str, dtype: torch.dtype, start: float = 0.0) -> torch.Tensor:
        if name not in self.arrays:
            mapping = mmap.mmap(-1, max(self.n, 1) * dtype.itemsize)
            if self.huge_pages:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            tensor = torch.frombuffer(mapping, dtype=dtype, count=self.n)
            if start and dtype.is_floating_point:
                tensor.normal_(std=start)
            else:
                tensor.zero_()
            self.arrays[name] = tensor
        return self.arrays[name]


def make_step(system: str, arena: Arena, pool: _native.ThreadPool) -> Callable[[], object]:
    """A call that does one optimizer step; state is there before it returns."""
    f32, bf16 = torch.float32, torch.bfloat16
    if system == "stream":
        arrays = [arena.get(name, f32) for name in ("stream a", "stream b", "stream c")]
        grads = arena.get("fp32 grads", f32, 0.01)
        return lambda: _native.stream_(*arrays, grads, pool)
    if system == "torch_fused":
        parameter = torch.nn.Parameter(arena.get("fp32 weights", f32, 0.02))
        parameter.grad = arena.get("fp32 grads", f32, 0.01)
        optimizer = torch.optim.AdamW([parameter], lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
        state = {"step": torch.tensor(1.0), "exp_avg": arena.get("m", f32), "exp_avg_sq": arena.get("v", f32)}
        optimizer.state[parameter] = state
        return optimizer.step
    kernel = KERNELS["adamw"]
    group = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    segments, scalars = np.array([[0, arena.n, 0]]), np.array([kernel.scalars_row(group, 10)])
    moment = ("bf16 ", bf16) if system == "overspill_bf16_moments" else ("", f32)
    states = {"exp_avg": arena.get(f"{moment[0]}m", moment[1]), "exp_avg_sq": arena.get(f"{moment[0]}v", moment[1])}
    if system == "overspill":
        weights, grads, master = arena.get("fp32 weights", f32, 0.02), arena.get("fp32 grads", f32, 0.01), None
    else:
        weights, grads = arena.get("bf16 weights", bf16, 0.02), arena.get("bf16 grads", bf16, 0.01)
        if system == "overspill_fp32_master":
            master = arena.get("fp32 weights", f32, 0.02)
        else:
            master = arena.get("residual", torch.int16)
    return lambda: kernel.apply(
        weights=weights, grads=grads, master=master, states=states, segments=segments, scalars=scalars, pool=pool
    )


def first_step_error(threads: int) -> float:
    """The largest difference of a first AdamW step from its closed form, over 1000 elements."""
    generator = torch.Generator().manual_seed(0)
    weights, grads = torch.randn(1000, generator=generator) * 0.02, torch.randn(1000, generator=generator) * 0.01
    kernel = KERNELS["adamw"]
    group = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    expected = weights.double() * (1 - LR * WEIGHT_DECAY) - LR * grads.double() / (grads.double().abs() + EPS)
    states = {"exp_avg": torch.zeros(1000), "exp_avg_sq": torch.zeros(1000)}
    kernel.apply(
        weights=weights,
        grads=grads,
        master=None,
        states=states,
        segments=np.array([[0, 1000, 0]]),
        scalars=np.array([kernel.scalars_row(group, 1)]),
        pool=_native.ThreadPool(threads),
    )
    return float((weights.double() - expected).abs().max())


def measure(
    steps: Mapping[str, Callable[[], object]], reps: int, patience_seconds: float, others_beside: list[Beside]
) -> tuple[dict[str, list[float]], dict[str, float], float]:
    """Seconds of each round, seconds of the first step, and the share of a core that others took meanwhile."""
    firsts = {}
    for system, step in steps.items():
        start = time.perf_counter()
        step()
        firsts[system] = time.perf_counter() - start
    wait_until_quiet(patience_seconds)
    seconds: dict[str, list[float]] = {system: [] for system in steps}
    begin, busy, own = time.perf_counter(), machine_busy_seconds(), own_busy_seconds()
    for _ in range(reps):
        for system, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[system].append(time.perf_counter() - start)
        for beside in others_beside:
            beside.run()
    elapsed = time.perf_counter() - begin
    others = max(0.0, (machine_busy_seconds() - busy) - (own_busy_seconds() - own)) / elapsed
    return seconds, firsts, others


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--system", action="append", choices=list(SYSTEMS), help="may be repeated; default: all")
    parser.add_argument("--n", type=int, default=100_000_000, help="parameters")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reps", type=int, default=7, help="interleaved rounds; the median counts")
    parser.add_argument("--huge-pages", action="store_true", help="madvise(MADV_HUGEPAGE) every array")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for a quiet machine")
    parser.add_argument("--beside", action="append", default=[], help="a command that prints such lines, once a round")
    options = parser.parse_args()
    others_beside = [Beside(command) for command in options.beside]
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    systems = list(dict.fromkeys(options.system or SYSTEMS))
    pool = _native.ThreadPool(options.threads)
    start = time.perf_counter()
    arena = Arena(options.n, options.huge_pages)
    steps = {system: make_step(system, arena, pool) for system in systems}
    init_seconds = time.perf_counter() - start
    seconds, firsts, others = measure(steps, options.reps, options.patience, others_beside)
    error = first_step_error(options.threads)
    for system in systems:
        median = statistics.median(seconds[system])
        row = {
            "bench": "adam",
            "system": system,
            "layout": "flat",
            "n": options.n,
            "threads": options.threads,
            "init_s": round(init_seconds, 3),
            "first_step_s": round(firsts[system], 4),
            "median_s": round(median, 5),
            "min_s": round(min(seconds[system]), 5),
            "max_s": round(max(seconds[system]), 5),
            "params_per_s": round(options.n / median),
            "bytes_per_param": BYTES_PER_PARAM[system],
            "GBps": round(options.n * BYTES_PER_PARAM[system] / median / 1e9, 2),
            "first_step_max_err": error if system.startswith("overspill") else None,
            "other_cpu": round(others, 3),
            "huge_pages": options.huge_pages,
            "simd": _native.simd_level(),
            "note": SYSTEMS[system],
        }
        print(json.dumps(row), flush=True)
    for beside in others_beside:
        for row in beside.rows():
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
