"""What does not fit is refused by name before a byte changes: never converted, copied or half done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from overspill import _native

N = 256
POOL = _native.ThreadPool(1)


def arguments() -> dict[str, Any]:
    """A good call of adamw_ with split weights, all from torch."""
    return {
        "weights": torch.zeros(N, dtype=torch.bfloat16),
        "grads": torch.ones(N, dtype=torch.bfloat16),
        "master": torch.zeros(N, dtype=torch.int16),
        "exp_avg": torch.zeros(N),
        "exp_avg_sq": torch.zeros(N),
        "segments": torch.tensor([[0, N, 0]]),
        "scalars": torch.tensor([[0.1, 0.9, 0.999, 1e-8, 0.0, 0.1, 0.0316, 1.0]], dtype=torch.float64),
        "pool": POOL,
    }


def test_torch_tensors_parameters_and_numpy_arrays_are_updated_in_place() -> None:
    call = arguments()
    _native.adamw_(**call)
    assert (call["weights"] < 0).all()
    parameter = torch.nn.Parameter(torch.zeros(N))
    _native.adamw_(**{**arguments(), "weights": parameter, "master": None})
    assert (parameter < 0).all()
    bits = np.zeros(N, np.uint16)
    _native.adamw_(**{**arguments(), "weights": bits})
    assert np.array_equal(bits, call["weights"].view(torch.uint16).numpy())


WRONG_DTYPES = {
    "weights": [torch.zeros(N, dtype=torch.float16), torch.zeros(N, dtype=torch.float64), torch.zeros(N)],
    "grads": [torch.zeros(N, dtype=torch.float16), torch.zeros(N, dtype=torch.int32)],
    "master": [torch.zeros(N, dtype=torch.bfloat16), torch.zeros(N, dtype=torch.float64), None],
    "exp_avg": [torch.zeros(N, dtype=torch.bfloat16), torch.zeros(N, dtype=torch.float64)],
    "exp_avg_sq": [torch.zeros(N, dtype=torch.float16)],
    "segments": [torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64)],
    "scalars": [torch.zeros(1, 8), torch.zeros(1, 7, dtype=torch.float64)],
    "pool": [None, 2],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG_DTYPES.items() for value in values]
)
def test_a_wrong_dtype_is_a_type_error(name: str, value: object) -> None:
    call = {**arguments(), name: value}
    with pytest.raises(TypeError):
        _native.adamw_(**call)
    assert (arguments()["weights"] == 0).all()


@pytest.mark.parametrize("name", ["weights", "grads", "master", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: torch.zeros(2 * N, dtype=x.dtype)[::2],
        lambda x: torch.zeros(1, N, dtype=x.dtype),
        lambda x: torch.zeros(N, dtype=x.dtype, device="meta"),
        lambda x: x.tolist(),
    ],
    ids=["strided", "two dimensions", "another device", "a list"],
)
def test_an_array_that_would_need_a_copy_is_a_type_error(name: str, spoil: Callable[[torch.Tensor], object]) -> None:
    call = arguments()
    with pytest.raises(TypeError):
        _native.adamw_(**{**call, name: spoil(call[name])})


@pytest.mark.parametrize("name", ["weights", "master", "exp_avg"])
def test_a_read_only_array_is_a_type_error_where_it_would_be_written(name: str) -> None:
    call = arguments()
    array = call[name].view(torch.uint16).numpy() if name == "weights" else call[name].numpy()
    array.flags.writeable = False
    with pytest.raises(TypeError):
        _native.adamw_(**{**call, name: array})
    grads = np.ones(N, np.float32)
    grads.flags.writeable = False
    _native.adamw_(**{**call, "grads": grads})
    assert (call["weights"] != 0).all()


@pytest.mark.parametrize("name", ["grads", "master", "exp_avg", "exp_avg_sq"])
def test_unequal_lengths_are_a_value_error_that_names_the_array(name: str) -> None:
    call = arguments()
    with pytest.raises(ValueError, match=rf"{name} has 255 elements, expected 256"):
        _native.adamw_(**{**call, name: call[name][:-1]})
    assert (call["weights"] == 0).all()


def test_overlapping_arrays_are_a_value_error() -> None:
    call = arguments()
    both = torch.zeros(2 * N - 1)
    with pytest.raises(ValueError, match="exp_avg_sq overlaps exp_avg"):
        _native.adamw_(**{**call, "exp_avg": both[:N], "exp_avg_sq": both[N - 1 :]})
    touching = torch.zeros(2 * N)
    _native.adamw_(**{**call, "exp_avg": touching[:N], "exp_avg_sq": touching[N:]})
    assert (call["weights"] != 0).all()


def test_an_array_off_its_elements_alignment_is_a_value_error() -> None:
    odd = np.frombuffer(bytearray(4 * N + 1), np.uint8)[1:].view(np.float32)
    if odd.ctypes.data % 4 == 0:
        odd = np.frombuffer(bytearray(4 * N + 2), np.uint8)[2:].view(np.float32)
    with pytest.raises((ValueError, TypeError)):
        _native.adamw_(**{**arguments(), "exp_avg": odd})


@pytest.mark.parametrize(
    "table",
    [
        [[-1, 10, 0]],
        [[0, N + 1, 0]],
        [[20, 10, 0]],
        [[0, 20, 0], [10, 30, 0]],
        [[20, 30, 0], [0, 10, 0]],
        [[0, 10, 4]],
        [[0, 10, -1]],
    ],
)
def test_a_segment_table_that_does_not_fit_is_a_value_error(table: list[list[int]]) -> None:
    segments = np.array(table, np.int64)
    call = {**arguments(), "segments": segments, "scalars": np.ones((len(table), 8))}
    with pytest.raises(ValueError, match="segment"):
        _native.adamw_(**call)
    assert (call["weights"] == 0).all()
    with pytest.raises(ValueError, match="segment"):
        _native.squared_norms(call["grads"], segments, POOL)


def test_every_segment_needs_its_row_of_scalars() -> None:
    with pytest.raises(ValueError, match="one row per segment"):
        _native.adamw_(**{**arguments(), "scalars": np.ones((2, 8))})


def test_bf16_weights_without_a_master_and_fp32_weights_with_one_are_refused() -> None:
    with pytest.raises(TypeError, match="need a master"):
        _native.adamw_(**{**arguments(), "master": None})
    with pytest.raises(TypeError, match="own master"):
        _native.adamw_(**{**arguments(), "weights": torch.zeros(N)})


def test_momentum_without_a_buffer_is_refused() -> None:
    scalars = np.array([[0.1, 0.9, 0, 0, 0, 0, 0, 1.0]])
    weights, grads = np.zeros(N, np.float32), np.ones(N, np.float32)
    with pytest.raises(ValueError, match="momentum_buffer"):
        _native.sgd_(weights, grads, None, None, np.array([[0, N, 0]]), scalars, POOL)
    assert (weights == 0).all()


def test_the_other_calls_refuse_wrong_dtypes_too() -> None:
    f32, bf16, i16 = torch.zeros(N), torch.zeros(N, dtype=torch.bfloat16), torch.zeros(N, dtype=torch.int16)
    bad: list[Callable[[], object]] = [
        lambda: _native.accumulate_(bf16, f32, POOL),
        lambda: _native.accumulate_(f32, i16, POOL),
        lambda: _native.accumulate_(f32, torch.zeros(2 * N)[::2], POOL),
        lambda: _native.join_(bf16, bf16, None, POOL),
        lambda: _native.join_(f32, torch.zeros(N), None, POOL),
        lambda: _native.join_(f32, bf16, torch.zeros(N, dtype=torch.bfloat16), POOL),
        lambda: _native.split_(f32, None, torch.zeros(N), POOL),
        lambda: _native.split_(bf16, bf16.clone(), f32, POOL),
        lambda: _native.split_(bf16, i16, i16.clone(), POOL),
        lambda: _native.squared_norms(torch.zeros(N, dtype=torch.float64), torch.zeros(0, 3, dtype=torch.int64), POOL),
        lambda: _native.stream_(f32, torch.zeros(N), torch.zeros(N), bf16, POOL),
    ]
    for call in bad:
        with pytest.raises(TypeError):
            call()
    with pytest.raises(ValueError, match="source overlaps target"):
        _native.accumulate_(f32, f32, POOL)


def test_an_empty_chunk_and_an_empty_table_are_fine() -> None:
    call = arguments()
    empty = {name: call[name][:0] for name in ("weights", "grads", "master", "exp_avg", "exp_avg_sq")}
    _native.adamw_(**{**call, **empty, "segments": torch.zeros(1, 3, dtype=torch.int64)})
    _native.adamw_(**{**call, "segments": torch.zeros(0, 3, dtype=torch.int64), "scalars": np.zeros((0, 8))})
    assert (call["weights"] == 0).all()
