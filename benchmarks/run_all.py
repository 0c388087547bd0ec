#!/usr/bin/env python3
"""Every benchmark of this project, one after the other; results in benchmarks/results with the date.

    python benchmarks/run_all.py                                       # what needs nothing else
    python benchmarks/run_all.py --peer-script S --peer-python P       # with the comparison beside other systems
    python benchmarks/run_all.py --gpu                                 # training with the model on the accelerator

Nothing is measured here; each script says what it measures and how. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

CPU_RUNS: tuple[tuple[str, ...], ...] = (
    ("startup.py", "--reps", "5"),
    ("optimizer_kernel.py", "--n", "100000000", "--threads", "2", "--reps", "7"),
    ("disk.py", "--system", "overspill,python_odirect,fio", "--op", "write,read,mixed", "--gb", "1", "--reps", "7"),
    ("simulation.py", "--rounds", "5"),
)
GPU_RUNS: tuple[tuple[str, ...], ...] = tuple(
    ("e2e.py", "--device", "cuda", "--model", model, "--steps", "10", "--placement", placement, "--overlap", overlap)
    for model in ("150m", "400m")
    for placement in ("host", "disk")
    for overlap in ("step", "forward")
)


def run(command: tuple[str, ...], scratch: str) -> list[str]:
    """Run one script; its JSON lines. Scripts that take a directory get ``scratch``."""
    script, *options = command
    where = [] if script == "optimizer_kernel.py" else ["--dir", scratch]
    print("$ python benchmarks/" + " ".join(command), flush=True)
    process = subprocess.run([sys.executable, str(HERE / script), *options, *where], capture_output=True, text=True)
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        print("  " + line, flush=True)
    if process.returncode:
        print(process.stderr[-1500:], file=sys.stderr)
        raise SystemExit(f"benchmarks/{script} failed with exit status {process.returncode}.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--peer-script", help="a script that runs the other systems, see benchmarks/peers.py")
    parser.add_argument("--peer-python", help="the Python of the environment in which they are installed")
    parser.add_argument("--dir", default="scratch", help="on the disk that is to be measured")
    args = parser.parse_args()
    lines = [line for command in (GPU_RUNS if args.gpu else CPU_RUNS) for line in run(command, args.dir)]
    facts = {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
    }
    name = f"{facts['date']}-{'gpu' if args.gpu else 'cpu'}.jsonl"
    (HERE / "results" / name).write_text("\n".join([json.dumps(facts), *lines]) + "\n")
    print(f"written: benchmarks/results/{name}")
    if args.peer_script and args.peer_python:
        peers = ["--peer-script", args.peer_script, "--peer-python", args.peer_python, "--dir", args.dir]
        subprocess.run([sys.executable, str(HERE / "peers.py"), *peers], check=True)
    elif not args.gpu:
        print("other systems: not run; see benchmarks/peers.py for what it needs")


if __name__ == "__main__":
    main()
