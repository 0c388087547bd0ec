"""The learning rate: the shape of each schedule, and that a resume gives the same lr as no interruption."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overspill.job import ScheduleConfig
from overspill.train.lr import lr_factor, lr_scheduler

KINDS = ("cosine", "linear", "constant")


@given(st.sampled_from(KINDS), st.integers(0, 20), st.floats(0, 1), st.integers(1, 60))
def test_the_factor_stays_between_zero_and_one_and_never_rises_after_the_warm_up(
    kind: str, warmup: int, floor: float, total: int
) -> None:
    schedule = ScheduleConfig.read({"kind": kind, "warmup_steps": warmup, "min_lr_ratio": floor})
    factors = [lr_factor(schedule, step=step, total_steps=total) for step in range(total + 5)]
    assert all(0 <= f <= 1 for f in factors)
    rise, fall = factors[: min(warmup, total)], factors[min(warmup, total) :]
    assert rise == sorted(rise)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(fall))


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_a_decay_ends_at_the_lowest_rate_and_the_first_step_learns(kind: str) -> None:
    schedule = ScheduleConfig.read({"kind": kind, "warmup_steps": 4, "min_lr_ratio": 0.1})
    assert lr_factor(schedule, step=0, total_steps=20) == 0.25
    assert lr_factor(schedule, step=3, total_steps=20) == 1.0
    assert lr_factor(schedule, step=19, total_steps=20) == pytest.approx(0.1)


def test_half_way_down_the_cosine_stands_at_the_middle() -> None:
    schedule = ScheduleConfig(kind="cosine", min_lr_ratio=0.0)
    assert lr_factor(schedule, step=50, total_steps=101) == pytest.approx(0.5)


def test_a_restored_scheduler_goes_on_with_the_same_bits() -> None:
    schedule = ScheduleConfig(kind="cosine", warmup_steps=3)

    def fresh() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (1e-3, 3e-4)]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        return optimizer, lr_scheduler(optimizer, schedule, total_steps=12)

    def rates(optimizer: torch.optim.Optimizer) -> list[float]:
        return [group["lr"] for group in optimizer.param_groups]

    optimizer, scheduler = fresh()
    seen = []
    for step in range(12):
        if step == 5:
            saved = (optimizer.state_dict(), scheduler.state_dict())
        seen.append(rates(optimizer))
        optimizer.step()
        scheduler.step()
    optimizer, scheduler = fresh()
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    for step in range(5, 12):
        assert rates(optimizer) == seen[step]
        optimizer.step()
        scheduler.step()
