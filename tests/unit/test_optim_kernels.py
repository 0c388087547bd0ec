"""What the train layer asks of an optimizer: state names, scalars, and a refusal of what has no exact kernel."""

from __future__ import annotations

import typing

import pytest
import torch

from overspill import _native
from overspill.errors import OverspillError
from overspill.job import OptimizerConfig
from overspill.job.runs import RUNNING_OPTIMIZERS
from overspill.optim import reference
from overspill.optim.kernels import GRAD_SCALE_COLUMN, KERNELS, SCALARS_PER_ROW, kernel_name_of


def test_every_optimizer_of_a_job_file_has_a_kernel() -> None:
    names = typing.get_args(OptimizerConfig.model_fields["name"].annotation)
    assert set(RUNNING_OPTIMIZERS) == set(KERNELS) <= set(names)
    assert all(kernel.name == name for name, kernel in KERNELS.items())


@pytest.mark.parametrize("name", KERNELS)
def test_the_gradient_scale_has_the_same_column_everywhere(name: str) -> None:
    kernel = KERNELS[name]
    row = kernel.scalars_row(kernel.defaults, 3, grad_scale=0.25)
    assert len(row) == SCALARS_PER_ROW and row[GRAD_SCALE_COLUMN] == 0.25
    assert row[0] == kernel.defaults["lr"]
    up = kernel.scalars_row({**kernel.defaults, "maximize": True}, 3, grad_scale=0.25)
    assert up == (*row[:GRAD_SCALE_COLUMN], -0.25)


def test_defaults_are_those_of_torch() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        optimizer = kind(parameters)
        kernel = KERNELS[kernel_name_of(optimizer)]
        assert {key: optimizer.defaults[key] for key in kernel.defaults} == dict(kernel.defaults)
        kernel.check_group(optimizer.param_groups[0])


def test_bias_corrections_are_those_of_torch_to_the_bit() -> None:
    group = {**KERNELS["adamw"].defaults, "betas": (0.9, 0.95), "lr": torch.tensor(0.5)}
    row = KERNELS["adamw"].scalars_row(group, 7)
    assert row == (0.5, 0.9, 0.95, 1e-8, 0.01, 1 - 0.9**7.0, (1 - 0.95**7.0) ** 0.5, 1.0)


def test_only_the_first_update_of_sgd_takes_the_gradient_whole() -> None:
    group = {**KERNELS["sgd"].defaults, "momentum": 0.9, "dampening": 0.5, "nesterov": True, "weight_decay": 0.1}
    assert KERNELS["sgd"].scalars_row(group, 1) == (1e-3, 0.9, 0.5, 0.1, 1.0, 1.0, 0.0, 1.0)
    assert KERNELS["sgd"].scalars_row(group, 2) == (1e-3, 0.9, 0.5, 0.1, 1.0, 0.0, 0.0, 1.0)


def test_sgd_keeps_a_buffer_only_where_a_group_has_momentum() -> None:
    kernel = KERNELS["sgd"]
    plain, heavy = dict(kernel.defaults), {**kernel.defaults, "momentum": 0.9}
    assert kernel.state_names([plain, plain]) == ()
    assert kernel.state_names([plain, heavy]) == ("momentum_buffer",)
    assert KERNELS["adamw"].state_names([plain]) == ("exp_avg", "exp_avg_sq")
    assert KERNELS["lion"].state_names([plain]) == ("exp_avg",)


def test_options_and_optimizers_without_an_exact_kernel_are_refused_by_name() -> None:
    with pytest.raises(OverspillError, match="amsgrad") as caught:
        KERNELS["adamw"].check_group({**KERNELS["adamw"].defaults, "amsgrad": True}, "optimizer.groups[1]")
    assert caught.value.code == "OVS207" and caught.value.field == "optimizer.groups[1].amsgrad"
    parameter = torch.nn.Parameter(torch.zeros(1))

    class Mine(torch.optim.AdamW):
        pass

    for optimizer in (torch.optim.Adagrad([parameter]), Mine([parameter])):
        with pytest.raises(OverspillError, match=type(optimizer).__name__):
            kernel_name_of(optimizer)
    mixed = torch.optim.Adam([{"params": [parameter], "decoupled_weight_decay": True}])
    mixed.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(OverspillError, match="some param groups only"):
        kernel_name_of(mixed)


def test_constants_of_the_reference_are_those_of_the_native_core() -> None:
    assert (reference.RESYNC, reference.SKIP, reference.NORM_CHUNK) == (
        _native.RESYNC,
        _native.SKIP,
        _native.NORM_CHUNK,
    )
