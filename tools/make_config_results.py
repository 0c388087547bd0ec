"""Reads the configurations in tests/assets/configs and writes what became of each key: results and a reference page.

The results (tests/assets/config_results/FORMAT.json) are reviewed key by key when they change; the page
(docs/reference/configs.md) holds the counts. `make docs` writes both; `--check` fails and names the first that differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "src"))

from overspill.interop.configs import FORMATS, ConfigReading, read_config  # noqa: E402
from overspill.interop.configs import reasons as groups  # noqa: E402

ASSETS = REPOSITORY / "tests" / "assets" / "configs"
RESULTS = REPOSITORY / "tests" / "assets" / "config_results"
PAGE = REPOSITORY / "docs" / "reference" / "configs.md"
MARK = "<!-- Made by tools/make_config_results.py; do not edit. -->"


def files() -> list[Path]:
    return sorted(path for path in ASSETS.glob("*/*") if path.is_file())


def flags() -> dict[str, dict[str, Any]]:
    return tomllib.loads((ASSETS / "flags.toml").read_text(encoding="utf-8"))


def name_of(file: Path) -> str:
    return str(file.relative_to(ASSETS))


def readings() -> dict[str, ConfigReading]:
    given = flags()
    return {name_of(file): read_config(file, given.get(name_of(file), {})) for file in files()}


def results(read: dict[str, ConfigReading]) -> dict[Path, str]:
    by_format: dict[str, dict[str, Any]] = {}
    for name, reading in read.items():
        row = reading.as_json() | {
            "flags": flags().get(name, {}),
            "job": None if reading.job is None else reading.job.model_dump(mode="json", exclude_defaults=True),
        }
        del row["format"]
        by_format.setdefault(reading.format, {})[name] = row
    return {
        RESULTS / f"{kind}.json": json.dumps(rows, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        for kind, rows in by_format.items()
    }


def _counts(name: str, reading: ConfigReading) -> list[str]:
    verdict = "no training" if not reading.trains else "job" if reading.job else "incomplete"
    given = ", ".join(flags().get(name, {})) or "none"
    numbers = (len(reading.used), len(reading.assumed), len(reading.ignored), len(reading.unknown))
    return [name, verdict, given, *map(str, numbers)]


def page(read: dict[str, ConfigReading]) -> str:
    jobs = sum(one.job is not None for one in read.values())
    idle = sum(not one.trains for one in read.values())
    unknown = {key for one in read.values() for key in one.unknown}
    lines = [
        MARK,
        "",
        "# Configurations of other frameworks",
        "",
        f"`read_config` (overspill.interop.configs) reads {', '.join(FORMATS)} files as a job.",
        "Each key of a file is used, ignored for a reason, or named as unknown; each default that the framework takes",
        "by itself is marked as assumed. Flags win over the file. The format is seen from the keys, or given with",
        "`--format`.",
        "",
        f"The tests read {len(read)} files of public repositories; {jobs} give a job, by themselves or with the flags",
        f"listed, and {idle} describe no training.",
        f"Keys that are not understood: {', '.join(f'`{key}`' for key in sorted(unknown)) or 'none'}.",
        "",
        "## By format",
        "",
        "| format | files | jobs | used | assumed | ignored | unknown |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in FORMATS:
        rows = [one for one in read.values() if one.format == kind]
        if rows:
            numbers = (
                len(rows),
                sum(one.job is not None for one in rows),
                sum(len(one.used) for one in rows),
                sum(len(one.assumed) for one in rows),
                sum(len(one.ignored) for one in rows),
                sum(len(one.unknown) for one in rows),
            )
            lines.append(f"| {kind} | {' | '.join(map(str, numbers))} |")
    lines += ["", "## Why a key is ignored", "", "| keys | reason |", "|---:|---|"]
    counts: dict[str, int] = {}
    for one in read.values():
        for reason in one.ignored.values():
            counts[reason] = counts.get(reason, 0) + 1
    known = {getattr(groups, name) for name in groups.__all__ if name.isupper()}
    assert set(counts) <= known, set(counts) - known
    lines += [f"| {count} | {reason} |" for reason, count in sorted(counts.items(), key=lambda row: -row[1])]
    lines += ["", "## By file", "", "| file | gives | flags | used | assumed | ignored | unknown |"]
    lines += ["|---|---|---|---:|---:|---:|---:|"]
    lines += [f"| {' | '.join(_counts(name, reading))} |" for name, reading in read.items()]
    return "\n".join(lines) + "\n"


def stale() -> list[Path]:
    read = readings()
    wanted = results(read) | {PAGE: page(read)}
    return [file for file, text in wanted.items() if not file.exists() or file.read_text(encoding="utf-8") != text]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file differs")
    if parser.parse_args().check:
        differ = stale()
        for file in differ:
            print(f"stale: {file.relative_to(REPOSITORY)}; run make docs", file=sys.stderr)
        return 1 if differ else 0
    read = readings()
    wanted = results(read) | {PAGE: page(read)}
    RESULTS.mkdir(parents=True, exist_ok=True)
    for file, text in wanted.items():
        file.write_text(text, encoding="utf-8")
    print(f"wrote {len(wanted)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
