"""The kernels beside torch.optim: one step within 2 ulp, twenty within 1e-5, through the same param groups.

torch is a reference within tolerance and not bitwise: its vector code contracts multiply and add, and takes its
square root from a library that does not round correctly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from overspill import _native
from overspill.optim.kernels import KERNELS, OptimizerKernel, kernel_name_of

N = 50_000
POOL = _native.ThreadPool(2)
SEGMENTS = np.array([[0, N, 0]])

CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.01}),
    (torch.optim.AdamW, {"lr": 1e-3, "betas": (0.3, 0.95), "weight_decay": 0.1, "eps": 1e-6}),
    (torch.optim.AdamW, {"lr": 1e-3, "betas": (0.0, 0.9), "maximize": True}),
    (torch.optim.Adam, {"lr": 1e-3}),
    (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
]


def ours_beside(optimizer: torch.optim.Optimizer, weights: torch.Tensor, steps: int, first: int = 1) -> torch.Tensor:
    """Takes `steps` steps of both from equal state, with the same gradients; returns our weights."""
    kernel: OptimizerKernel = KERNELS[kernel_name_of(optimizer)]
    (group,) = optimizer.param_groups
    (parameter,) = group["params"]
    kernel.check_group(group)
    ours = weights.clone()
    states = {name: torch.zeros(N) for name in kernel.state_names(optimizer.param_groups)}
    for step in range(first, first + steps):
        grads = torch.randn(N) * 0.01
        parameter.grad = grads.clone()
        optimizer.step()
        scalars = np.array([kernel.scalars_row(group, step)])
        kernel.apply(
            weights=ours, grads=grads, master=None, states=states, segments=SEGMENTS, scalars=scalars, pool=POOL
        )
    for name, state in states.items():
        theirs = optimizer.state[parameter][name]
        assert (state - theirs).norm() <= 1e-6 * theirs.norm()
    return ours


def ulps(ours: torch.Tensor, theirs: torch.Tensor, before: torch.Tensor) -> float:
    """The largest difference, in units in the last place of the larger of the weight before and after."""
    size = torch.maximum(before.abs(), theirs.abs()).numpy()
    return float(((ours - theirs).abs().numpy() / np.spacing(size)).max())


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_one_step_from_equal_state_is_within_two_ulp_of_torch(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    # Away from zero: where weight and update cancel, or weight decay and gradient do, the last place means nothing.
    weights = torch.randn(N) * 0.02
    weights += 0.005 * weights.sign()
    optimizer = kind([torch.nn.Parameter(weights.clone())], foreach=False, **options)
    ours = ours_beside(optimizer, weights, 1)
    theirs = optimizer.param_groups[0]["params"][0].detach()
    assert not torch.equal(weights, theirs)
    assert ulps(ours, theirs, weights) <= 2


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_twenty_steps_stay_within_a_hundred_thousandth_of_torch(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    weights = torch.randn(N) * 0.02
    optimizer = kind([torch.nn.Parameter(weights.clone())], foreach=False, **options)
    ours = ours_beside(optimizer, weights, 20)
    theirs = optimizer.param_groups[0]["params"][0].detach()
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert (ours - theirs).norm() <= 1e-4 * (theirs - weights).norm(), "the difference is small beside the update"


def test_lion_follows_its_paper() -> None:
    torch.manual_seed(2)
    kernel = KERNELS["lion"]
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    ours = torch.randn(N) * 0.02
    x, m = ours.clone(), torch.zeros(N)
    states = {"exp_avg": torch.zeros(N)}
    for step in range(1, 21):
        g = torch.randn(N) * 0.01
        x = x * (1 - 1e-3 * 0.1) - 1e-3 * torch.sign(0.9 * m + (1 - 0.9) * g)
        m = 0.99 * m + (1 - 0.99) * g
        row = np.array([kernel.scalars_row(group, step)])
        kernel.apply(weights=ours, grads=g, master=None, states=states, segments=SEGMENTS, scalars=row, pool=POOL)
    assert (ours - x).norm() <= 1e-5 * x.norm()


def test_the_scale_of_gradients_is_applied_in_the_pass() -> None:
    torch.manual_seed(3)
    kernel = KERNELS["adamw"]
    group = {**kernel.defaults, "lr": 1e-3}
    weights, grads = torch.randn(N) * 0.02, torch.randn(N)
    results = []
    for scale, given in ((1 / 1024, grads * 1024), (1.0, grads)):
        ours = weights.clone()
        states = {name: torch.zeros(N) for name in kernel.state_names([group])}
        row = np.array([kernel.scalars_row(group, 1, grad_scale=scale)])
        kernel.apply(weights=ours, grads=given, master=None, states=states, segments=SEGMENTS, scalars=row, pool=POOL)
        results.append(ours)
    assert torch.equal(*results)


def test_bf16_weights_with_a_split_master_learn_what_fp32_weights_learn() -> None:
    torch.manual_seed(4)
    kernel = KERNELS["adamw"]
    group = {**kernel.defaults, "lr": 1e-4}
    whole = torch.randn(N) * 0.02
    bits, residual = torch.empty(N, dtype=torch.bfloat16), torch.empty(N, dtype=torch.int16)
    _native.split_(bits, residual, whole, POOL)
    states = [{name: torch.zeros(N) for name in kernel.state_names([group])} for _ in range(2)]
    for step in range(1, 21):
        grads = (torch.randn(N) * 0.01).to(torch.bfloat16)
        row = np.array([kernel.scalars_row(group, step)])
        tables = {"segments": SEGMENTS, "scalars": row, "pool": POOL}
        kernel.apply(weights=bits, grads=grads, master=residual, states=states[0], **tables)
        kernel.apply(weights=whole, grads=grads, master=None, states=states[1], **tables)
    joined = torch.empty(N)
    _native.join_(joined, bits, residual, POOL)
    assert torch.equal(joined, whole)
    assert (bits.float() - whole).abs().max() <= whole.abs().max() / 256
