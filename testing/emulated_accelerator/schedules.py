"""Schedules of delays for hypothesis, which shrinks them to the few that matter. In a file that only tests import."""

from __future__ import annotations

from hypothesis import strategies as st

from testing.emulated_accelerator._values import Delays

__all__ = ["delay_schedules"]


def delay_schedules(
    *, most_seconds: float, most_compute_seconds: float | None = None, length: int = 12
) -> st.SearchStrategy[Delays]:
    """Any schedule of up to ``length`` delays of each kind: none, a tenth, a half, or all of ``most_seconds``.

    ``most_compute_seconds`` is for computing, of whose operations a step has far more than of copies and events.
    """

    def up_to(most: float) -> st.SearchStrategy[tuple[float, ...]]:
        return st.lists(st.sampled_from([0.0, most / 10, most / 2, most]), max_size=length).map(tuple)

    other = up_to(most_seconds)
    compute = up_to(most_seconds if most_compute_seconds is None else most_compute_seconds)
    return st.builds(Delays, compute=compute, h2d=other, d2h=other, event=other)
