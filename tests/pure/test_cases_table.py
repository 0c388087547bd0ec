"""tests/CASES.md names tests that exist; a renamed test is a stale row."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_test_named_in_the_table_of_cases_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "tests" / "CASES.md").read_text())
    assert len(named) > 60
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in _source(ROOT / file)]
    assert missing == []


def test_every_report_of_a_wrong_forecast_has_a_row_and_each_open_one_is_marked() -> None:
    table = (ROOT / "tests" / "CASES.md").read_text()
    rows = [int(number) for number in re.findall(r"^\| K(\d+) \|", table, re.MULTILINE)]
    assert rows == list(range(1, 27))
    file = "tests/unit/test_forecast_cases.py"
    source = _source(ROOT / file)
    assert set(re.findall(rf"`{file}::(\w+)`", table)) == set(re.findall(r"^def (test_k\w+)\(", source, re.MULTILINE))
    open_rows = set(re.findall(rf"`{file}::(\w+)` \(open\)", table))
    assert open_rows == set(re.findall(r"xfail\(.*\)\ndef (test_k\w+)\(", source))


def _source(file: Path) -> str:
    return file.read_text() if file.exists() else ""
