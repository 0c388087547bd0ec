"""The fused updates are bitwise what reference.py says, whatever clone, chunking or thread count runs them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill import _native
from overspill.optim import reference
from tests.unit.native_cases import FORMATS, KINDS, make_chunk, update

POOLS = [_native.ThreadPool(threads) for threads in (1, 2, 3)]
SEEDS = st.integers(0, 2**32 - 1)
# Short chunks exercise the vector loops' tails; long ones hold several work items (32,768 elements each).
LENGTHS = st.one_of(st.integers(1, 300), st.integers(60_000, 100_000))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, n=LENGTHS, segments=st.integers(0, 5), bf16_grads=st.booleans(), bf16_state=st.booleans())
def test_every_clone_and_thread_count_gives_the_bits_of_the_reference(
    kind: str, form: str, seed: int, n: int, segments: int, bf16_grads: bool, bf16_state: bool
) -> None:
    start = make_chunk(seed, kind=kind, form=form, n=n, segments=segments, bf16_grads=bf16_grads, bf16_state=bf16_state)
    expected = start.copy()
    update(expected, kind, None)
    for level in _native.simd_levels():
        for pool in POOLS:
            chunk = start.copy()
            update(chunk, kind, pool, level)
            assert chunk.results() == expected.results(), (level, pool.threads)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, form=st.sampled_from(FORMATS), blocks=st.integers(2, 40), data=st.data())
def test_cutting_a_chunk_into_chunks_changes_no_bit(
    kind: str, form: str, seed: int, blocks: int, data: st.DataObject
) -> None:
    whole = make_chunk(seed, kind=kind, form=form, n=2048 * blocks, segments=4)
    parts = whole.copy()
    update(whole, kind, POOLS[1])
    cuts = sorted(data.draw(st.sets(st.integers(1, blocks - 1))))
    for a, b in zip([0, *cuts], [*cuts, blocks], strict=True):
        update(parts.part(2048 * a, 2048 * b), kind, POOLS[2])
    assert parts.results() == whole.results()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, n=st.integers(1, 3000), steps=st.integers(1, 4))
def test_split_and_fp32_master_publish_the_same_weights_and_hold_the_same_master(
    kind: str, seed: int, n: int, steps: int
) -> None:
    split = make_chunk(seed, kind=kind, form="split", n=n)
    whole = make_chunk(seed, kind=kind, form="fp32 master", n=n)
    for _ in range(steps):
        update(split, kind, POOLS[0])
        update(whole, kind, POOLS[0])
    assert whole.master is not None
    joined = np.empty(n, np.float32)
    _native.join_(joined, split.weights, split.master, POOLS[0])
    assert split.weights.tobytes() == whole.weights.tobytes()
    assert joined.tobytes() == whole.master.tobytes()


@pytest.mark.parametrize("form", ["split", "fp32 master"])
@pytest.mark.parametrize("kind", KINDS)
def test_resync_forgets_the_master_and_starts_from_the_published_weights(kind: str, form: str) -> None:
    stale = make_chunk(7, kind=kind, form=form, n=4000, segments=1, awkward=0.0)
    assert stale.master is not None
    stale.segments[:] = [0, 4000, _native.RESYNC]
    fresh = stale.copy()
    assert fresh.master is not None
    fresh.segments[:] = [0, 4000, 0]
    fresh.master[:] = 0 if form == "split" else reference.widen(fresh.weights)
    ignored = stale.copy()
    ignored.segments[:] = [0, 4000, 0]
    for chunk in (stale, fresh, ignored):
        update(chunk, kind, POOLS[1])
    assert stale.results() == fresh.results()
    assert stale.results() != ignored.results(), "the master held more than the weights"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_skipped_parameters_and_padding_are_left_alone(kind: str, form: str) -> None:
    before = make_chunk(11, kind=kind, form=form, n=3000, segments=2, awkward=0.0)
    before.segments[:] = [[100, 1000, _native.SKIP | _native.RESYNC], [1064, 2000, 0]]
    before.scalars[:, 0] = 0.1
    after = before.copy()
    update(after, kind, POOLS[0])
    for name in ("weights", "master", "state1", "state2"):
        old, new = getattr(before, name), getattr(after, name)
        if old is not None:
            assert np.array_equal(old[:1064], new[:1064]) and np.array_equal(old[2000:], new[2000:])
    assert not np.array_equal(before.weights[1064:2000], after.weights[1064:2000])


def test_a_gradient_that_is_not_finite_leaves_one_nan_and_not_a_lost_one() -> None:
    for kind in KINDS:
        chunk = make_chunk(3, kind=kind, form="split", n=64, segments=1, bf16_grads=False, awkward=0.0)
        chunk.segments[:] = [0, 64, 0]
        chunk.scalars[:, 0] = 0.1
        chunk.grads[5] = np.array(0xFFC12345, np.uint32).view(np.float32)
        update(chunk, kind, POOLS[0])
        master = np.empty(64, np.float32)
        _native.join_(master, chunk.weights, chunk.master, POOLS[0])
        assert chunk.weights[5] == 0x7FC0 and master.view(np.uint32)[5] == 0x7FC00000
        assert np.isfinite(np.delete(master, 5)).all()


def test_denormals_are_kept_even_where_the_caller_flushes_them() -> None:
    import torch

    chunk = make_chunk(5, kind="sgd plain", form="fp32", n=70_000, segments=1, bf16_grads=False, awkward=0.0)
    chunk.segments[:] = [0, 70_000, 0]
    chunk.scalars[:] = [1.0, 0, 0, 0, 0, 0, 0, 1.0]
    chunk.weights[:], chunk.grads[:] = 3e-39, 1e-39
    expected = chunk.copy()
    update(expected, "sgd plain", None)
    assert (expected.weights != 0).all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        inherits = _native.ThreadPool(3)  # threads inherit the mode of the one that starts them
        update(chunk, "sgd plain", inherits)
        assert torch.tensor([1e-39]).mul(1.0).item() == 0.0, "the caller's own mode is left as it was"
    finally:
        torch.set_flush_denormal(False)
    assert chunk.results() == expected.results()


@settings(max_examples=60, deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64), level=st.sampled_from(_native.simd_levels()))
def test_splitting_and_joining_gives_every_float_back(bits: list[int], level: str) -> None:
    patterns = np.array(bits, np.uint32)
    master = patterns.view(np.float32)
    weights, residual = np.empty(len(bits), np.uint16), np.empty(len(bits), np.int16)
    _native.split_(weights, residual, master, POOLS[0], level=level)
    joined = np.empty(len(bits), np.float32)
    _native.join_(joined, weights, residual, POOLS[0], level=level)
    nan = np.isnan(master)
    assert np.array_equal(joined.view(np.uint32)[~nan], patterns[~nan])
    assert (joined.view(np.uint32)[nan] == 0x7FC00000).all()
    expected_weights, expected_residual = weights.copy(), residual.copy()
    reference.split_(expected_weights, expected_residual, master)
    assert np.array_equal(weights, expected_weights) and np.array_equal(residual, expected_residual)


def test_every_float_around_every_bf16_number_survives_the_split() -> None:
    # All 65,536 bf16 numbers, each with the lowest, the tie, its neighbours and the highest low half.
    high = np.arange(65536, dtype=np.uint32)[:, None] << 16
    bits = (high | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel()
    master = bits.view(np.float32)
    weights, residual = np.empty(bits.size, np.uint16), np.empty(bits.size, np.int16)
    _native.split_(weights, residual, master, POOLS[1])
    joined = np.empty(bits.size, np.float32)
    _native.join_(joined, weights, residual, POOLS[1])
    nan = np.isnan(master)
    assert np.array_equal(joined.view(np.uint32)[~nan], bits[~nan])
    published = reference.widen(weights).view(np.uint32)
    distance = np.abs(published.astype(np.int64) - bits.astype(np.int64))
    assert distance[~nan].max() == 0x8000, "to the nearest, ties away from zero"
    tie = (bits & 0xFFFF) == 0x8000
    assert (published[tie & ~nan] > bits[tie & ~nan]).all()


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, n=st.one_of(st.integers(1, 200), st.just(140_001)), bf16=st.booleans())
def test_accumulating_gives_the_bits_of_the_reference(seed: int, n: int, bf16: bool) -> None:
    chunk = make_chunk(seed, kind="sgd", form="fp32", n=n, bf16_grads=bf16)
    expected = chunk.weights.copy()
    reference.accumulate_(expected, chunk.grads)
    for level in _native.simd_levels():
        target = chunk.weights.copy()
        _native.accumulate_(target, chunk.grads, POOLS[2], level=level)
        assert target.tobytes() == expected.tobytes()
    widened = np.empty(n, np.float32)
    if bf16:
        _native.join_(widened, chunk.grads, None, POOLS[0])
        assert widened.tobytes() == reference.widen(chunk.grads).tobytes()
