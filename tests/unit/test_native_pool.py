"""The thread pool: explicit size, used from several threads, refused in a forked child, gone without a trace."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from overspill import _native
from tests.unit.native_cases import make_chunk, update


def thread_ids() -> set[str]:
    return {entry.name for entry in Path("/proc/self/task").iterdir()}


def test_the_caller_counts_as_one_thread_and_the_others_end_with_the_pool() -> None:
    before = thread_ids()
    alone = _native.ThreadPool(1)
    assert alone.threads == 1 and thread_ids() <= before
    pool = _native.ThreadPool(3)
    ours = thread_ids() - before
    assert pool.threads == 3 and len(ours) == 2
    del pool
    # A joined thread stays listed until the kernel has cleaned up after it.
    for _ in range(1000):
        if not ours & thread_ids():
            break
        time.sleep(0.01)
    assert not ours & thread_ids()


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_an_impossible_number_of_threads_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="1 to 1024"):
        _native.ThreadPool(threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_forked_child_is_told_instead_of_hanging(threads: int) -> None:
    pool = _native.ThreadPool(threads)
    grads, segments = np.ones(200_000, np.float32), np.array([[0, 200_000, 0]])
    _native.squared_norms(grads, segments, pool)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _native.squared_norms(grads, segments, pool)
            os.write(write, b"no error")
        except RuntimeError as error:
            del pool  # must not wait for threads that do not exist here
            sums, _ = _native.squared_norms(grads, segments, _native.ThreadPool(2))
            os.write(write, f"{error} {sums[0]}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    assert "forked child" in said and said.endswith("200000.0")


def test_several_python_threads_may_share_one_pool() -> None:
    pool = _native.ThreadPool(2)
    start = make_chunk(1, kind="adamw", form="split", n=100_000)
    expected = start.copy()
    update(expected, "adamw", None)
    chunks = [start.copy() for _ in range(8)]
    threads = [threading.Thread(target=update, args=(chunk, "adamw", pool)) for chunk in chunks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert all(chunk.results() == expected.results() for chunk in chunks)


def test_a_job_of_many_tiny_segments_is_done_once_each() -> None:
    pool = _native.ThreadPool(3)
    n, width = 64 * 3000, 64
    starts = np.arange(0, n, width)
    segments = np.stack([starts, starts + 17, np.zeros_like(starts)], axis=1)
    scalars = np.zeros((len(starts), 8))
    scalars[:, 0], scalars[:, 7] = 1.0, 1.0
    weights, grads = np.zeros(n, np.float32), np.ones(n, np.float32)
    for done in range(1, 51):
        _native.sgd_(weights, grads, None, None, segments, scalars, pool)
        rows = weights.reshape(-1, width)
        assert (rows[:, :17] == -done).all() and (rows[:, 17:] == 0).all()


def test_the_levels_are_named_best_first_and_only_those_of_this_cpu_run() -> None:
    levels = _native.simd_levels()
    assert _native.simd_level() == levels[0]
    assert levels[-1] in ("baseline", "neon")
    grads, segments, pool = np.ones(3, np.float32), np.array([[0, 3, 0]]), _native.ThreadPool(1)
    with pytest.raises(ValueError, match=r"x86-64-v9.*auto, " + levels[0]):
        _native.squared_norms(grads, segments, pool, level="x86-64-v9")
