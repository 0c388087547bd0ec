"""Squared norms: the defined order of addition, the count of what is not finite, and the size of the error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill import _native
from overspill.optim import reference
from tests.unit.native_cases import floats, segments_over

POOLS = [_native.ThreadPool(threads) for threads in (1, 2, 3)]
SEEDS = st.integers(0, 2**32 - 1)


def whole(n: int) -> np.ndarray:
    return np.array([[0, n, 0]], np.int64)


@settings(max_examples=30, deadline=None)
@given(
    seed=SEEDS,
    n=st.one_of(st.integers(0, 200), st.integers(131_000, 200_000)),
    count=st.integers(0, 4),
    bf16=st.booleans(),
    awkward=st.sampled_from([0.0, 1e-4, 0.1]),
)
def test_every_clone_and_thread_count_adds_in_the_defined_order(
    seed: int, n: int, count: int, bf16: bool, awkward: float
) -> None:
    rng = np.random.default_rng(seed)
    grads = floats(rng, n, 1.0, awkward, np.uint16 if bf16 else np.float32)
    segments = segments_over(rng, n, count)
    sums, nonfinite = reference.squared_norms(grads, segments)
    for level in _native.simd_levels():
        for pool in POOLS:
            got_sums, got_nonfinite = _native.squared_norms(grads, segments, pool, level=level)
            np.testing.assert_array_equal(
                got_sums.view(np.int64)[~np.isnan(sums)], sums.view(np.int64)[~np.isnan(sums)]
            )
            assert np.array_equal(np.isnan(got_sums), np.isnan(sums))
            assert np.array_equal(got_nonfinite, nonfinite)


def test_another_number_of_lanes_or_another_chunk_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = floats(np.random.default_rng(0), 150_001, 1.0, 0.0, np.float32)
    for level in _native.simd_levels():
        assert (
            _native.squared_norms(grads, whole(150_001), POOLS[1], level=level)[0]
            == (reference.squared_norms(grads, whole(150_001))[0])
        )
    ours = reference.squared_norms(grads, whole(150_001))[0]
    for name, other in (("LANES", 8), ("LANES", 32), ("NORM_CHUNK", 32768), ("NORM_CHUNK", 131072)):
        with monkeypatch.context() as patch:
            patch.setattr(reference, name, other)
            assert reference.squared_norms(grads, whole(150_001))[0] != ours, "this gradient tells the orders apart"


def test_the_batching_of_segments_changes_no_bit() -> None:
    rng = np.random.default_rng(1)
    grads = floats(rng, 300_000, 1.0, 0.0, np.float32)
    segments = np.array([[0, 70_000, 0], [70_016, 200_000, 0], [200_000, 300_000, 0]], np.int64)
    together, _ = _native.squared_norms(grads, segments, POOLS[1])
    for k, (start, stop, _) in enumerate(segments.tolist()):
        alone, _ = _native.squared_norms(grads[start:stop].copy(), whole(stop - start), POOLS[2])
        assert alone[0] == together[k]


def test_the_order_is_the_documented_one_and_not_just_any() -> None:
    # 2**54 followed by ones: in rising order within a lane the ones are lost, in another order they are not.
    grads = np.zeros(_native.NORM_CHUNK + 32, np.float32)
    grads[0] = 2.0**27
    grads[16] = 1.0  # lane 0, lost beside 2**54
    grads[_native.NORM_CHUNK + 0] = 1.0  # the next partial sum, also lost
    grads[1] = grads[17] = 1.0  # lane 1 holds 2, half a unit in the last place of 2**54, lost as well
    sums, _ = _native.squared_norms(grads, whole(grads.size), POOLS[0])
    assert sums[0] == 2.0**54
    grads[[1, 17, 33, 49]] = 1.0  # lane 1 holds 4, one unit in the last place of 2**54
    sums, _ = _native.squared_norms(grads, whole(grads.size), POOLS[0])
    assert sums[0] == 2.0**54 + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_the_fp64_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grads = (torch.randn(500_000) * 0.01).to(dtype)
    sums, nonfinite = _native.squared_norms(grads, whole(500_000), POOLS[1])
    exact = math.fsum(x * x for x in grads.double().tolist())
    assert math.isclose(sums[0], exact, rel_tol=1e-14)
    assert math.isclose(math.sqrt(sums[0]), grads.double().norm().item(), rel_tol=1e-12)
    assert nonfinite[0] == 0
    if dtype is torch.float32:
        parameter = torch.nn.Parameter(torch.zeros(500_000))
        parameter.grad = grads.clone()
        assert math.isclose(math.sqrt(sums[0]), torch.nn.utils.clip_grad_norm_([parameter], 1.0).item(), rel_tol=1e-5)


def test_the_largest_finite_gradients_neither_overflow_nor_count_as_infinite() -> None:
    grads = np.full(200_000, np.finfo(np.float32).max)
    sums, nonfinite = _native.squared_norms(grads, whole(200_000), POOLS[0])
    assert math.isfinite(sums[0]) and nonfinite[0] == 0
    grads[[3, 199_999]] = np.inf, np.nan
    sums, nonfinite = _native.squared_norms(grads, whole(200_000), POOLS[0])
    assert not math.isfinite(sums[0]) and nonfinite[0] == 2


def test_a_skipped_segment_counts_as_nothing() -> None:
    grads = np.full(100, np.nan, np.float32)
    sums, nonfinite = _native.squared_norms(grads, np.array([[0, 100, _native.SKIP]]), POOLS[0])
    assert sums.tolist() == [0.0] and nonfinite.tolist() == [0]
