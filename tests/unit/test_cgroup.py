"""Memory groups as tests use them: both versions' files, and a reason where there are none.

A kernel mounts the memory controller in one version only; the other's files are laid out in a folder as it would.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from overspill.units import MiB
from testing.cgroup import MemoryGroup, limit_here, missing, reset_peak_here, use_here

V1 = {
    "memory.limit_in_bytes": "9223372036854771712\n",
    "memory.memsw.limit_in_bytes": "9223372036854771712\n",
    "memory.max_usage_in_bytes": "4096\n",
    "memory.failcnt": "5\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "memory.stat": "cache 30\nrss 40\nshmem 1\nmapped_file 20\n",
}
V2 = {
    "memory.max": "max\n",
    "memory.swap.max": "max\n",
    "memory.peak": "4096\n",
    "memory.events": "low 0\nhigh 0\nmax 5\noom 3\noom_kill 2\n",
    "memory.stat": "anon 40\nfile 30\nshmem 1\nfile_mapped 20\n",
}
NO_SWAP, SWAP = "Filename Type Size Used Priority\n", "Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n"


def write(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def mount(folder: Path, version: int) -> Path:
    if version == 1:
        write(folder / "memory", V1)
    else:
        write(folder, {"cgroup.controllers": "cpu io memory pids\n"})
    return folder


@pytest.mark.parametrize(("version", "files"), [(1, V1), (2, V2)])
def test_a_group_of_either_version_is_limited_without_swap_and_read(
    tmp_path: Path, version: int, files: dict[str, str]
) -> None:
    group = MemoryGroup(mount(tmp_path, version))
    assert group.path.parent == (tmp_path / "memory" if version == 1 else tmp_path)
    write(group.path, files)
    limit_here(group.path, 64 * MiB)
    swap = {1: ("memory.memsw.limit_in_bytes", 64 * MiB), 2: ("memory.swap.max", 0)}[version]
    limit = {1: "memory.limit_in_bytes", 2: "memory.max"}[version]
    assert int((group.path / limit).read_text()) == 64 * MiB
    assert int((group.path / swap[0]).read_text()) == swap[1]
    assert (group.peak_nbytes, group.kills, group.limit_hits) == (4096, 2, 5)
    assert use_here(group.path)["mapped"] == 20
    reset_peak_here(group.path)
    assert group.peak_nbytes == (0 if version == 1 else 4096)


def test_without_a_memory_controller_the_reason_names_the_place(tmp_path: Path) -> None:
    assert f"at {tmp_path}" in (missing(tmp_path) or "")
    write(tmp_path, {"cgroup.controllers": "cpu io\n"})
    assert f"at {tmp_path}" in (missing(tmp_path) or "")


def test_a_version_two_parent_that_does_not_hand_memory_down_is_a_reason(tmp_path: Path) -> None:
    assert "subtree_control" in (missing(mount(tmp_path, 2)) or "")
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.controllers"]


def test_swap_that_the_kernel_does_not_count_is_a_reason(tmp_path: Path) -> None:
    swaps = tmp_path / "swaps"
    folder = mount(tmp_path / "cgroup", 1)
    swaps.write_text(NO_SWAP)
    assert missing(folder, swaps) is None
    swaps.write_text(SWAP)
    assert "swap is on" in (missing(folder, swaps) or "")


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_kernel_ends_a_process_that_needs_more_than_its_group_may_have(tmp_path: Path) -> None:
    take = "import sys; held = bytearray(int(sys.argv[1])); held[::4096] = b'x' * len(held[::4096]); print(len(held))"
    for nbytes, code in ((8 * MiB, 0), (256 * MiB, -9)):
        with MemoryGroup() as group:
            limit_here(group.path, 96 * MiB)
            command = [sys.executable, "-c", take, str(nbytes)]
            done = group.run(command, env=dict(os.environ), cwd=tmp_path, timeout_seconds=60)
            assert (done.returncode, group.kills) == (code, 0 if code == 0 else 1)
            assert 8 * MiB < group.peak_nbytes <= 96 * MiB
            assert use_here(group.path)["mapped"] >= 0
