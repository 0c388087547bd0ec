#!/usr/bin/env python3
"""How right the forecast is, on a CSV of published measurements.

    python benchmarks/scoreboard.py PATH [--json OUT] [--markdown OUT] [--components PATH] [--competitors JSON]

Each row becomes a job (truth.py), each job a forecast, each forecast an error; rows that cannot be mapped are counted
and named. The columns and every rule: docs/reference/truth-format.md. Prints the targets; exit status 2 for a file that
is no such table, else 0: a missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import components  # noqa: E402
import score_output  # noqa: E402
import score_tables  # noqa: E402
from score_rows import BadTable, read_rows, score_rows, without_empirical  # noqa: E402
from score_summary import summarise  # noqa: E402


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("path", help="the CSV of measurements")
    made.add_argument("--json", metavar="OUT", help="every row's forecast, measurement and error, and the summary")
    made.add_argument("--compact", metavar="OUT", help="the same in little space: rows as lists")
    made.add_argument("--markdown", metavar="OUT", help="the scoreboard as a page")
    made.add_argument("--components", metavar="CSV", help="kernel-level measurements to score as well")
    made.add_argument("--competitors", metavar="JSON", help="what benchmarks/competitors.py wrote")
    made.add_argument("--workers", type=int, metavar="N", help="processes; default: one a processor")
    return made


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        table = read_rows(args.path)
        kernels = components.score(args.components) if args.components else None
        others = _competitors(args.competitors)
    except BadTable as error:
        print(f"scoreboard: {error}", file=sys.stderr)
        return 2
    rows = score_rows(table, workers=args.workers)
    summary, without = summarise(rows), summarise(without_empirical(table, rows))
    report = score_output.report(rows, summary, without, kernels=kernels, others=others)
    print(score_tables.terminal(rows, summary))
    for path, text in (
        (args.json, json.dumps(report, indent=1)),
        (args.compact, score_output.compact(report)),
        (args.markdown, score_tables.page(rows, summary, without, report, kernels=kernels, others=others)),
    ):
        if path:
            Path(path).write_text(text + ("" if text.endswith("\n") else "\n"), encoding="utf-8")
    return 0


def _competitors(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadTable(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(data, dict) or "tools" not in data:
        raise BadTable(f"{path} is not what benchmarks/competitors.py writes: it has no tools.")
    return data


if __name__ == "__main__":
    sys.exit(main())
