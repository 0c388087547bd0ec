"""The probe and the doctor: limits of cgroups as files say them, disks as they are, findings for what is wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from overspill.files import SCRATCH_PREFIX
from overspill.machine import Accelerator, Disk, Machine
from overspill.probe import Finding, OthersLoad, doctor, findings_of, probe
from overspill.probe.disk import nearest_existing, probe_disk
from overspill.probe.memory import read_memory
from overspill.units import GiB, MiB


def machine_root(tmp_path: Path, files: dict[str, str]) -> Path:
    """A directory that looks like / of a machine with 8 GiB, 6 GiB of it free."""
    meminfo = "MemTotal: 8388608 kB\nMemFree: 1048576 kB\nMemAvailable: 6291456 kB\nSwapTotal: 0 kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_without_a_cgroup_limit_the_machines_memory_counts(tmp_path: Path) -> None:
    memory = read_memory(machine_root(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}))
    assert (memory.total_nbytes, memory.available_nbytes, memory.limited_by) == (8 * GiB, 6 * GiB, None)


def test_a_cgroup_v2_limit_above_in_the_tree_counts_and_page_cache_does_not_count_as_used(tmp_path: Path) -> None:
    root = machine_root(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job\n",
            "sys/fs/cgroup/user/job/memory.max": "max\n",
            "sys/fs/cgroup/user/memory.max": f"{2 * GiB}\n",
            "sys/fs/cgroup/user/memory.current": f"{1536 * MiB}\n",
            "sys/fs/cgroup/user/memory.stat": f"anon 1\ninactive_file {1024 * MiB}\n",
        },
    )
    memory = read_memory(root)
    assert memory.total_nbytes == 2 * GiB
    assert memory.available_nbytes == 2 * GiB - 512 * MiB
    assert memory.limited_by is not None and memory.limited_by.endswith("user/memory.max")


def test_a_cgroup_v1_limit_counts_and_its_number_for_no_limit_does_not(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GiB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 * GiB}\n",
    }
    assert read_memory(machine_root(tmp_path, files)).available_nbytes == 2 * GiB
    files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert read_memory(machine_root(tmp_path, files)).available_nbytes == 6 * GiB


def test_this_machine_has_threads_memory_and_a_disk_whose_test_leaves_nothing_behind(tmp_path: Path) -> None:
    machine = probe([tmp_path / "not" / "yet"], speed_test_nbytes=16 * MiB)
    assert machine.threads >= machine.physical_cores >= 1
    assert 0 < machine.available_nbytes <= machine.memory_nbytes
    assert machine.memory_bytes_per_s > 0 and machine.matmul_flops_per_s > 0
    (disk,) = machine.disks
    assert disk.free_nbytes > 0 and disk.filesystem
    assert (disk.mixed_bytes_per_s > 0) == disk.odirect
    assert list(tmp_path.iterdir()) == []
    assert Machine.model_validate_json(machine.model_dump_json()) == machine


def test_what_a_killed_probe_left_behind_goes_with_the_next_and_a_running_ones_stays(tmp_path: Path) -> None:
    print_pid = [sys.executable, "-c", "import os; print(os.getpid())"]
    gone = subprocess.run(print_pid, capture_output=True, text=True, check=True)
    host = socket.gethostname()
    left, running = (tmp_path / f"{SCRATCH_PREFIX}{host}-{pid}-x" for pid in (gone.stdout.strip(), os.getpid()))
    elsewhere = tmp_path / f"{SCRATCH_PREFIX}another-host-1-x"
    for directory in (left, running, elsewhere):
        directory.mkdir()
        (directory / "speed").write_bytes(b"x")
    probe_disk(tmp_path, measure=False)
    assert not left.exists()
    assert running.exists()
    assert elsewhere.exists()


def test_a_directory_that_is_not_there_yet_is_judged_by_its_nearest_parent(tmp_path: Path) -> None:
    assert nearest_existing(tmp_path / "a" / "b") == tmp_path
    assert probe_disk(tmp_path / "a", measure=False).hard_links == probe_disk(tmp_path, measure=False).hard_links


def test_probing_imports_no_torch() -> None:
    code = "import sys; from overspill.probe import probe; probe(['.'], measure=False); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


GOOD_DISK = Disk(
    directory=".",
    filesystem="ext4",
    free_nbytes=500 * GiB,
    odirect=True,
    hard_links=True,
    read_bytes_per_s=3e9,
    write_bytes_per_s=2e9,
    mixed_bytes_per_s=2.5e9,
)
GOOD = Machine(
    memory_nbytes=32 * GiB, available_nbytes=24 * GiB, physical_cores=4, threads=8, disks=(GOOD_DISK,)
)  # fmt: skip


def finding(machine: Machine, name: str) -> Finding:
    return next(one for one in findings_of(machine) if one.name == name)


def test_a_good_disk_has_nothing_to_do() -> None:
    for one in findings_of(GOOD):
        assert (one.status == "ok") == (one.what_to_do == "")
    for name in ("O_DIRECT .", "speed .", "hard links .", "space .", "disk ."):
        assert finding(GOOD, name).status == "ok"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("O_DIRECT .", {"odirect": False}),
        ("speed .", {"mixed_bytes_per_s": 90e6}),
        ("hard links .", {"hard_links": False}),
        ("space .", {"free_nbytes": 1 * GiB}),
        ("disk .", {"filesystem": "tmpfs"}),
    ],
)
def test_what_is_wrong_with_a_disk_is_a_warning_with_something_to_do(name: str, change: dict[str, object]) -> None:
    bad = GOOD.model_copy(update={"disks": (GOOD_DISK.model_copy(update=change),)})
    found = finding(bad, name)
    assert found.status == "warn" and found.what_to_do


def test_little_memory_one_thread_and_a_small_pinned_limit_beside_a_gpu_are_warnings() -> None:
    poor = GOOD.model_copy(
        update={
            "available_nbytes": 1 * GiB,
            "physical_cores": 1,
            "threads": 1,
            "pinned_limit_nbytes": 64 * 1024,
            "accelerators": (Accelerator(name="card", memory_nbytes=8 * GiB),),
        }
    )
    assert [finding(poor, name).status for name in ("memory", "threads", "pinned memory")] == ["warn"] * 3
    assert "card" in finding(poor, "gpu").what


def test_fewer_threads_for_torch_than_cores_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert finding(GOOD, "threads").status == "warn"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_fails(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    closed = GOOD.model_copy(update={"disks": (GOOD_DISK.model_copy(update={"directory": str(tmp_path)}),)})
    assert finding(closed, f"disk {tmp_path}").status == "fail"


def test_the_doctor_looks_at_this_machine() -> None:
    names = [one.name for one in doctor(["."], measure=False)]
    assert {"python", "kernels", "threads", "memory", "gpu", "torch", "disk .", "O_DIRECT ."} <= set(names)


def test_the_doctor_says_that_a_directory_is_not_there_and_looks_at_its_nearest_parent(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "yet"
    found = next(one for one in doctor([missing], measure=False) if one.name == f"disk {missing}")
    assert found.status == "warn" and "does not exist" in found.what and str(tmp_path) in found.what
    (tmp_path / "file").write_text("x")
    found = next(one for one in doctor([tmp_path / "file"], measure=False) if one.name == f"disk {tmp_path / 'file'}")
    assert found.status == "fail" and "no directory" in found.what


def test_what_other_processes_take_is_counted_without_this_one(tmp_path: Path) -> None:
    def stat(user: int, idle: int) -> None:
        (tmp_path / "proc").mkdir(exist_ok=True)
        (tmp_path / "proc/stat").write_text(f"cpu  {user} 0 0 {idle} 900 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n")

    ticks = os.sysconf("SC_CLK_TCK")
    stat(1000, 50)
    load = OthersLoad(tmp_path)
    began, own = time.monotonic(), time.process_time()
    while time.process_time() - own < 0.2:  # what this process takes is not others'
        pass
    stat(1000 + 10 * ticks, 5000)
    cores = load.cores()
    seconds = time.monotonic() - began
    assert cores is not None and cores == pytest.approx((10 - 0.2) / seconds, rel=0.2)
    assert OthersLoad(tmp_path / "none").cores() is None
    own_alone = OthersLoad(tmp_path)
    stat(1000 + 10 * ticks, 9000)
    assert own_alone.cores() == 0


def test_a_busy_machine_is_noticed_while_speeds_are_measured(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert probe([tmp_path], speed_test_nbytes=16 * MiB).busy_cores > 0.1
    finally:
        other.kill()
        other.wait()
