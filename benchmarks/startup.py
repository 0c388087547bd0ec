#!/usr/bin/env python3
"""How long until something happens: `import overspill`, `overspill --help`, and the demo's first training step.

    python benchmarks/startup.py --reps 5           # needs `make assets`
    python benchmarks/startup.py --no-demo

Each is a fresh process, timed from outside (the import from inside, without the interpreter's own start); the three
take turns. The demo's clock runs from the command to its first step's row on stdout. Prints one JSON line per figure;
run_all.py writes them down with the date.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-m", "overspill"]
IMPORT = "import time; t = time.perf_counter(); import overspill; print(time.perf_counter() - t)"


def import_seconds() -> float:
    return float(subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout)


def help_seconds() -> float:
    start = time.perf_counter()
    subprocess.run([*COMMAND, "--help"], capture_output=True, check=True)
    return time.perf_counter() - start


def first_step_seconds(scratch: Path) -> float:
    run = scratch / "bench-startup"
    shutil.rmtree(run, ignore_errors=True)
    start = time.perf_counter()
    command = [*COMMAND, "train", str(ROOT / "examples/demo.toml"), "--run", str(run), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if json.loads(line).get("event") == "step":
                took = time.perf_counter() - start
                break
        else:
            raise SystemExit(f"{' '.join(command)} ended without a step: {process.stderr.read()[-800:]}")
        process.send_signal(signal.SIGKILL)
    shutil.rmtree(run, ignore_errors=True)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--dir", default="scratch", help="on the disk that is to be measured")
    parser.add_argument("--no-demo", action="store_true")
    options = parser.parse_args()
    scratch = Path(options.dir)
    scratch.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Callable[[], float]] = {"import": import_seconds, "help": help_seconds}
    if not options.no_demo:
        figures["first step of the demo"] = lambda: first_step_seconds(scratch)
    for measure in (import_seconds, help_seconds):
        measure()  # what the page cache and __pycache__ hold from then on
    seconds: dict[str, list[float]] = {name: [] for name in figures}
    for _ in range(options.reps):
        for name, measure in figures.items():
            seconds[name].append(measure())
    for name, times in seconds.items():
        row = {"bench": "startup", "what": name, "median_s": round(statistics.median(times), 4)}
        print(json.dumps(row | {"min_s": round(min(times), 4), "max_s": round(max(times), 4), "reps": len(times)}))


if __name__ == "__main__":
    main()
