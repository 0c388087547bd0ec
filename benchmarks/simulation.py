#!/usr/bin/env python3
"""The measured step beside the schedule's own simulation, with compute and bandwidth measured in the same round.

    python benchmarks/simulation.py --model 150m --staging-mib 96 --resident-share 0.1 --dir DIR

Each round measures compute (a run with all state in memory and no overlap gives forward, backward and update alone),
the disk (benchmarks/disk.py, the store's own path), and the run in question; then simulates that run's schedule with
those rates. Prints one JSON line per round and a median; writes results/DATE-simulation.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from overspill.forecast.simulate import Rates, simulate_step_seconds
from overspill.plan import Overlap
from overspill.schedule import StepPlan, plan_chunks

HERE = Path(__file__).resolve().parent
STATE_NBYTES, WEIGHT_NBYTES = 10, 2  # exact split format on bf16 weights
UPDATE_NBYTES = 2 * STATE_NBYTES + 2 * WEIGHT_NBYTES + 2


def run_json(script: str, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(HERE / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows or "error" in rows[-1]:
        raise SystemExit(f"{' '.join(command)}: {rows or done.stderr[-500:]}")
    return rows


def disk_rates(args: argparse.Namespace) -> dict[str, float]:
    rates = {}
    for op in ("read", "write", "mixed"):
        rows = run_json("disk.py", "--op", op, "--gb", "1", "--reps", "3", "--dir", args.dir, "--system", "overspill")
        rates[op] = max(row["GBps"] for row in rows) * 1e9
    return rates


def simulate(run: dict[str, Any], compute: dict[str, Any], disk: dict[str, float], args: argparse.Namespace) -> float:
    """Seconds that the schedule of ``run`` takes with these rates; compute is spread over blocks by their weights."""
    numels = run["block_numels"]
    chunks = plan_chunks(numels, chunk_numel=run["chunk_numel"], resident_numel=run["resident_numel"])
    overlap = Overlap(args.overlap)
    plan = StepPlan(len(numels), chunks, run["buffers"], STATE_NBYTES, WEIGHT_NBYTES, UPDATE_NBYTES, overlap)
    total = sum(numels)
    rates = Rates(
        read_bytes_per_s=disk["read"],
        write_bytes_per_s=disk["write"],
        mixed_bytes_per_s=disk["mixed"],
        memory_bytes_per_s=total * UPDATE_NBYTES / compute["opt_s"],
        forward_seconds=tuple(compute["fwd_s"] * numel / total for numel in numels),
        backward_seconds=tuple(compute["bwd_s"] * numel / total for numel in numels),
    )
    return simulate_step_seconds(plan, rates, read_threads=2, write_threads=2, every_steps=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="150m")
    parser.add_argument("--dir", default="scratch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--staging-mib", type=int, default=96)
    parser.add_argument("--resident-share", type=float, default=0.1)
    parser.add_argument("--overlap", default="forward", choices=["step", "forward"])
    parser.add_argument("--out", default=str(HERE / "results"))
    args = parser.parse_args()
    common = ["--model", args.model, "--steps", str(args.steps), "--dir", args.dir]
    rows = []
    for index in range(args.rounds):
        compute = run_json("e2e.py", *common, "--placement", "host", "--overlap", "step", "--kernel-threads", "1")[-1]
        disk = disk_rates(args)
        share = ["--resident-share", str(args.resident_share), "--staging-mib", str(args.staging_mib)]
        run = run_json("e2e.py", *common, *share, "--overlap", args.overlap)[-1]
        simulated = simulate(run, compute, disk, args)
        row = {
            "round": index,
            "step_s": run["step_s"],
            "simulated_s": round(simulated, 4),
            "of_simulation": round(run["step_s"] / simulated, 3),
            "compute_s": [compute[key] for key in ("fwd_s", "bwd_s", "opt_s")],
            "disk_GBps": {key: round(value / 1e9, 2) for key, value in disk.items()},
            "stall_s": run["stall_s"],
            "other_cpu": [compute["other_cpu"], run["other_cpu"]],
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    ratio = statistics.median(row["of_simulation"] for row in rows)
    facts = (
        f"{args.model}, {args.overlap}, staging {args.staging_mib} MiB, {args.resident_share:g} of the state in memory"
    )
    print(json.dumps({"median_of_simulation": ratio, "case": facts}))
    lines = [
        f"# A step beside its simulation, {datetime.date.today().isoformat()}",
        "",
        f"`python benchmarks/simulation.py`, {facts}; {os.cpu_count()} cores. Median {ratio} of the simulated time.",
        "",
        "| round | step s | simulated s | quotient | compute s (forward, backward, update) | disk GB/s | other cpu |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['round']} | {row['step_s']} | {row['simulated_s']} | {row['of_simulation']} | {row['compute_s']} "
        f"| {row['disk_GBps']} | {row['other_cpu']} |"
        for row in rows
    ]
    (Path(args.out) / f"{datetime.date.today().isoformat()}-simulation.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
