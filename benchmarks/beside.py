"""Another system's own benchmark script, run once in each of our rounds.

Such a script prints one JSON line per result with the keys of ours. Lines that differ only in what was measured are the
same case; its figure is the median over the rounds, as for our own systems.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
from typing import Any

MEASURED = ("median_s", "min_s", "max_s", "GBps", "other_cpu", "init_s", "first_step_s", "params_per_s")


class Beside:
    """The rounds of one command."""

    def __init__(self, command: str) -> None:
        self.command = shlex.split(command)
        self.rounds: dict[str, list[dict[str, Any]]] = {}

    def run(self) -> None:
        """One round. Raises SystemExit with the end of the command's output if it printed no result."""
        done = subprocess.run(self.command, capture_output=True, text=True, check=False)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if not rows:
            raise SystemExit(f"{shlex.join(self.command)}: exit status {done.returncode}\n{done.stderr[-800:]}")
        for row in rows:
            case = {key: value for key, value in row.items() if key not in MEASURED}
            self.rounds.setdefault(json.dumps(case, sort_keys=True), []).append(row)

    def rows(self) -> list[dict[str, Any]]:
        """One row per case, with the medians over the rounds."""
        result = []
        for case, rounds in self.rounds.items():
            row = dict(json.loads(case), rounds=len(rounds))
            for key in ("median_s", "GBps", "other_cpu"):
                values = [one[key] for one in rounds if one.get(key) is not None]
                if values:
                    row[key] = round(statistics.median(values), 5)
            result.append(row)
        return result
