#!/usr/bin/env python3
"""Overspill beside DeepSpeed ZeRO-3 with NVMe and plain torch, interleaved in one run, with ratios.

    python benchmarks/peers.py --peer-script PATH/peer_e2e.py --peer-python VENV/bin/python --dir DIR

The peers' script prints one JSON line per run with the keys of benchmarks/e2e.py. Each round runs every system once;
a ratio is the median over rounds of one round's quotient, so that a slow hour of a shared machine touches both sides.
Our memory is a cgroup limit on the whole process; theirs is the peak that they reach without one. That peak differs
by up to a third from run to run, and a machine for them must hold the highest: the limit of a round is the highest
peak so far, of --peak-runs runs before the first round and of the rounds themselves. Writes results/DATE-peers.json
and .md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def run_json(command: list[str], env: dict[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"error": f"exit {done.returncode}", "tail": done.stderr[-400:]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def ours(args: argparse.Namespace, model: str, memory_mib: int, *extra: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "e2e.py"), "--model", model, "--steps", str(args.steps)]
    command += ["--dtype", args.dtype]
    command += ["--memory", f"{memory_mib}MiB", "--placement", "mixed", "--dir", args.dir, *extra]
    return run_json(command)


def peer(args: argparse.Namespace, model: str, system: str, *extra: str) -> dict[str, Any]:
    python = Path(args.peer_python)
    env = dict(os.environ, PATH=f"{python.parent}:{os.environ['PATH']}", PYTHONPATH="")
    command = [str(python), args.peer_script, "--system", system, "--model", model, "--dtype", args.dtype]
    command += ["--steps", str(args.steps), "--dir", str(Path(args.dir) / "peer"), "--timeout", "1200", *extra]
    result = run_json(command, env)
    subprocess.run(["rm", "-rf", str(Path(args.dir) / "peer")], check=False)
    return result


CASES: dict[str, dict[str, Any]] = {
    "150m": {"model": "150m", "shares": (1.0, 0.5), "extra": ()},
    "150m-4x512": {"model": "150m", "shares": (1.0,), "extra": ("--micro-batch", "4", "--seq-len", "512")},
    "400m": {"model": "400m", "shares": (1.0,), "extra": ()},
}


def one_round(args: argparse.Namespace, name: str, peaks: list[int]) -> list[dict[str, Any]]:
    """Every system once on one case, theirs first. ``peaks``, MiB: theirs so far; this round's is added."""
    case = CASES[name]
    model, extra = case["model"], case["extra"]
    rows = []
    theirs = peer(args, model, "ds_z3_nvme", *extra)
    rows.append({"case": name, "who": "deepspeed_z3_nvme", **theirs})
    peaks += [theirs["train_peak_rss_MiB"]] if "train_peak_rss_MiB" in theirs else []
    if not peaks:
        return rows
    peak = max(peaks)
    for share in case["shares"]:
        limit = int(peak * share)
        who = "overspill" if share == 1 else f"overspill at {share:g} of its memory"
        rows.append({"case": name, "who": who, **ours(args, model, limit, *extra)})
    durable = ours(args, model, peak, *extra, "--durability", "1")
    rows.append({"case": name, "who": "overspill, durable every step", **durable})
    if args.torch:
        rows.append({"case": name, "who": "torch in memory", **peer(args, model, "torch", *extra)})
    return rows


def matmul_units() -> str:
    """What the processor multiplies bf16 with: it decides how much of a step is compute, for every system alike."""
    flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split("\n\n", 1)[0].split()
    for flag, words in (("amx_bf16", "AMX bf16"), ("avx512_bf16", "AVX-512 bf16")):
        if flag in flags:
            return words
    return "no bf16 instructions"


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over rounds, and of each round's quotient to DeepSpeed's step time in the same round."""
    table = []
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        base = {row["round"]: row.get("step_s") for row in mine if row["who"] == "deepspeed_z3_nvme"}
        torch = {row["round"]: row.get("step_s") for row in mine if row["who"] == "torch in memory"}
        for who in dict.fromkeys(row["who"] for row in mine):
            good = [row for row in mine if row["who"] == who and "step_s" in row]
            quotients = [row["step_s"] / base[row["round"]] for row in good if base.get(row["round"])]
            entry: dict[str, Any] = {"case": case, "who": who, "runs": len(good), "errors": 0}
            entry["errors"] = sum(1 for row in mine if row["who"] == who and "step_s" not in row)
            if good:
                entry["step_s"] = round(statistics.median(row["step_s"] for row in good), 3)
                entry["spread_s"] = [round(f(row["step_s"] for row in good), 3) for f in (min, max)]
                entry["peak_rss_MiB"] = int(statistics.median(row["train_peak_rss_MiB"] for row in good))
                entry["limit_MiB"] = int(statistics.median(row.get("cap_mib") or 0 for row in good)) or None
                entry["written_GB"] = statistics.median(row["disk_write_GB_per_step"] for row in good)
                entry["read_GB"] = statistics.median(row["disk_read_GB_per_step"] for row in good)
                entry["other_cpu"] = statistics.median(row["other_cpu"] for row in good)
            if quotients:
                entry["of_deepspeed"] = round(statistics.median(quotients), 3)
            quotients = [row["step_s"] / torch[row["round"]] for row in good if torch.get(row["round"])]
            if quotients:
                entry["of_torch"] = round(statistics.median(quotients), 3)
            table.append(entry)
    return table


def markdown(table: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    lines = [
        f"# Overspill beside DeepSpeed ZeRO-3 with NVMe, {facts['date']}",
        "",
        f"`python benchmarks/peers.py`, {facts['dtype']}, {facts['rounds']} interleaved rounds, "
        f"{facts['steps']} steps a run; "
        f"{facts['cores']} cores, {facts['memory_GiB']} GiB, {facts['machine']}, {facts['matmul']}. "
        "Ratios are medians of one round's quotient. `other`: cores that other processes took meanwhile.",
        "",
        "| case | system | step s (min to max) | of DeepSpeed's | of torch's | limit MiB | peak MiB "
        "| read + written GB | other |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        if "step_s" not in row:
            lines.append(f"| {row['case']} | {row['who']} | failed {row['errors']} times | | | | | | |")
            continue
        low, high = row["spread_s"]
        who = row["who"] + (f" ({row['errors']} of {row['runs'] + row['errors']} failed)" if row["errors"] else "")
        lines.append(
            f"| {row['case']} | {who} | {row['step_s']} ({low} to {high}) | {row.get('of_deepspeed', '')} "
            f"| {row.get('of_torch', '')} | {row['limit_MiB'] or ''} | {row['peak_rss_MiB']} "
            f"| {row['read_GB']} + {row['written_GB']} | {row['other_cpu']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-script", required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--dir", default="scratch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak-runs", type=int, default=3, help="runs of DeepSpeed before the rounds, for its peak")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cases", default="150m,400m,150m-4x512")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--torch", action="store_true", help="run plain torch in memory too")
    parser.add_argument("--out", default=str(HERE / "results"))
    args = parser.parse_args()
    Path(args.dir).mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    peaks: dict[str, list[int]] = {name: [] for name in args.cases.split(",")}
    for name in list(peaks) * args.peak_runs:
        case = CASES[name]
        peak = peer(args, case["model"], "ds_z3_nvme", *case["extra"]).get("train_peak_rss_MiB")
        print(json.dumps({"case": name, "who": "deepspeed_z3_nvme", "peak_rss_MiB": peak}), flush=True)
        peaks[name] += [peak] if peak is not None else []
    for round_ in range(args.rounds):
        for name in peaks:
            fresh = [{"round": round_, **row} for row in one_round(args, name, peaks[name])]
            for row in fresh:
                print(json.dumps({k: row.get(k) for k in ("round", "case", "who", "step_s", "error")}), flush=True)
            rows += fresh
    table = summarise(rows)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    facts = {
        "date": datetime.date.today().isoformat(),
        "rounds": args.rounds,
        "steps": args.steps,
        "cores": os.cpu_count(),
        "memory_GiB": memory,
        "machine": platform.machine(),
        "dtype": args.dtype,
        "matmul": matmul_units(),
    }
    out = Path(args.out)
    name = f"{facts['date']}-peers-{args.cases.replace(',', '-')}-{args.dtype}"
    (out / f"{name}.json").write_text(json.dumps({"facts": facts, "summary": table, "rows": rows}, indent=1) + "\n")
    (out / f"{name}.md").write_text(markdown(table, facts))
    print(markdown(table, facts))


if __name__ == "__main__":
    main()
