"""Schedules of delays for hypothesis, which shrinks them to the few that matter. In a file that only tests import."""

from __future__ import annotations

from hypothesis import strategies as st

from testing.emulated_accelerator._values import Delays

__all__ = ["delay_schedules"]


def delay_schedules(*, most_seconds: float, length: int = 12) -> st.SearchStrategy[Delays]:
    """Any schedule of up to ``length`` delays of each kind: none, a tenth, a half, or all of ``most_seconds``."""
    delay = st.sampled_from([0.0, most_seconds / 10, most_seconds / 2, most_seconds])
    each = st.lists(delay, max_size=length).map(tuple)
    return st.builds(Delays, compute=each, h2d=each, d2h=each, event=each)
