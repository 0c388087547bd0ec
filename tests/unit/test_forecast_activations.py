"""The activation formulas against real memory: never less than measured, and at most a fifth more."""

from __future__ import annotations

import pytest

from benchmarks.activations import CASES, HELD_OUT, measure

pytest.importorskip("torch")
pytest.importorskip("transformers")

QUICK = ("qwen2-512", "qwen2-512-checkpointing", "qwen2-512-fp32", "smol-128")
# Where the heap's holes are most of the peak the bound is looser than wanted; docs/theory/memory.md, `fitted`.
# Scores at the threshold count as the heap's, and score scratch is a bound (`score scratch`).
LIMIT = {"qwen3-small-vocabulary-fp32": 1.35, "dropout-512": 1.45, "dropout-1024-checkpointing": 1.3}


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in (*CASES, *HELD_OUT)],
)
def test_the_forecast_covers_the_measured_peak_and_overstates_it_by_at_most_a_fifth(case: str) -> None:
    result = measure(case)
    limit = LIMIT.get(case, 1.2) * result["measured_nbytes"]
    assert result["measured_nbytes"] <= result["forecast_nbytes"] <= limit, result
