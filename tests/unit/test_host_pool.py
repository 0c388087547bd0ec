"""The host pool: a budget that holds, memory that a forked child neither shares nor tears down."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.errors import OverspillError
from overspill.plan import StateClass
from overspill.tiers.host import PAGE_NBYTES, Allocation, HostPool
from overspill.units import MiB

CLASSES = tuple(StateClass)


@given(st.lists(st.tuples(st.integers(1, 3 * MiB), st.sampled_from(CLASSES), st.booleans()), max_size=20))
def test_what_is_held_is_the_sum_of_what_was_given_and_never_above_the_limit(
    requests: list[tuple[int, StateClass, bool]],
) -> None:
    pool = HostPool(8 * MiB)
    held: list[Allocation] = []
    for nbytes, state_class, give_back in requests:
        rounded = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        before = pool.held_nbytes
        try:
            held.append(pool.allocate(nbytes, state_class, "test"))
        except OverspillError as error:
            assert error.code == "OVS301"
            assert before + rounded > pool.limit_nbytes
            assert pool.held_nbytes == before
        else:
            assert held[-1].nbytes == len(memoryview(held[-1].buffer)) == rounded
        if give_back and held:
            pool.free(held.pop())
        assert pool.held_nbytes == sum(allocation.nbytes for allocation in held) <= pool.limit_nbytes
        assert pool.free_nbytes == pool.limit_nbytes - pool.held_nbytes
        by_class = pool.held_nbytes_by_class()
        assert sum(by_class.values()) == pool.held_nbytes
    for allocation in held:
        pool.free(allocation)
    assert pool.held_nbytes_by_class() == {}


def in_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)


def test_a_child_that_collects_the_parents_garbage_keeps_its_own_memory() -> None:
    """What the parent left in a cycle is unmapped in the child, where other memory must not stand by then."""
    done = in_python(
        """
        import ctypes, gc, mmap, os
        from overspill.tiers.host import map_anonymous

        gc.disable()
        cycle = [map_anonymous(2**20) for _ in range(8)]
        cycle.append(cycle)
        del cycle
        child = os.fork()
        if child == 0:
            own = [mmap.mmap(-1, 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(64)]
            gc.collect()
            for region in own:
                region[:] = b"1" * len(region)
            os._exit(0)
        print(os.waitpid(child, 0)[1])
        """
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize("access", ["region[0]", "region.write(b'1')"])
def test_a_child_cannot_touch_the_pool_and_the_parents_memory_stays(access: str) -> None:
    done = in_python(
        f"""
        import os, signal
        from overspill.plan import StateClass
        from overspill.tiers.host import HostPool

        pool = HostPool(2**20)
        region = pool.allocate(2**16, StateClass.WEIGHTS, "weights").buffer
        region[:4] = b"mine"
        child = os.fork()
        if child == 0:
            {access}
            os._exit(0)
        print(os.waitpid(child, 0)[1] == signal.SIGSEGV, region[:4])
        """
    )
    assert (done.stdout, done.stderr) == ("True b'mine'\n", "")


def test_a_pool_is_refused_in_a_child() -> None:
    pool = HostPool(MiB)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pool.allocate(1, StateClass.WEIGHTS, "weights")
        except OverspillError as error:
            os.write(write, error.code.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"OVS503"
    os.close(read)
    os.close(write)
