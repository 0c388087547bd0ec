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


def _source(file: Path) -> str:
    return file.read_text() if file.exists() else ""
