#!/usr/bin/env python3
"""How fast does the disk store move state, and how far is that from what the disk can do?

    python benchmarks/disk.py --system overspill --op mixed --gb 2 --dir /mnt/nvme --reps 7
    python benchmarks/disk.py --system overspill,python_odirect,fio --op write,read,mixed   # interleaved rounds
    python benchmarks/disk.py --system overspill --op mixed --sweep                         # threads and requests
    python benchmarks/disk.py --system overspill,fio --beside "python other_io.py --reps 1" # another script's rounds

One JSON line per result: GBps is the sum of both directions, ``write`` ends with
everything durable (overspill: a commit; python_odirect: fsync; fio: end_fsync), ``mixed`` reads one version while it
writes the next. The store is used as training uses it: chunks of ``--request`` bytes from ``--threads`` readers and as
many writers, checksums on. python_odirect is the same number of plain threads on two plain files, nothing else.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from beside import Beside
from overspill.tiers.disk import DiskStore, SlotSpec

MiB = 1024 * 1024
SLOT_NBYTES = 64 * MiB
REQUEST_LIMIT = 16 * MiB  # of the store; what is measured is the smaller size of the calls
Task = tuple[int, int, int]  # file or slot, offset, length


def other_cpu_seconds() -> float:
    """CPU time of the whole machine less our own: what the neighbours took."""
    busy = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    own = os.times()
    hertz = os.sysconf("SC_CLK_TCK")
    return (sum(busy) - busy[3] - busy[4]) / hertz - sum(own[:4])


def in_threads(
    tasks: Iterable[Task], count: int, work: Callable[[Task, memoryview], None], chunk: int
) -> list[threading.Thread]:
    """Threads that share ``tasks``, each with one touched, page-aligned buffer."""
    queue, lock = iter(list(tasks)), threading.Lock()

    def run() -> None:
        buffer = mmap.mmap(-1, chunk)
        for offset in range(0, chunk, 4096):
            buffer[offset] = 7
        while True:
            with lock:
                task = next(queue, None)
            if task is None:
                return
            work(task, memoryview(buffer)[: task[2]])

    return [threading.Thread(target=run) for _ in range(count)]


def run_all(*groups: list[threading.Thread]) -> None:
    threads = [thread for group in zip(*groups, strict=True) for thread in group] if len(groups) > 1 else groups[0]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Overspill:
    """The store, as training uses it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path = Path(options.dir) / "bench-store"
        shutil.rmtree(self.path, ignore_errors=True)
        count = max(round(options.gb * (1 << 30) / SLOT_NBYTES), 1)
        self.slots = [
            SlotSpec(f"b{index:04d}.exp_avg", "float32", (SLOT_NBYTES // 4,), SLOT_NBYTES, "moments")
            for index in range(count)
        ]
        self.store = DiskStore.create(self.path, self.slots, identity={}, pins=0, request_nbytes=REQUEST_LIMIT)
        self.options = options
        self.step = 0
        for _ in range(2):  # first writes to a preallocated file also write its extents; training does that once
            self.write()

    @property
    def nbytes(self) -> int:
        return len(self.slots) * SLOT_NBYTES

    def tasks(self) -> list[Task]:
        chunk = self.options.request
        starts = range(0, SLOT_NBYTES, chunk)
        return [(index, start, min(chunk, SLOT_NBYTES - start)) for index in range(len(self.slots)) for start in starts]

    def readers(self) -> list[threading.Thread]:
        def work(task: Task, buffer: memoryview) -> None:
            self.store.read_into(self.slots[task[0]].name, task[1], buffer)

        return in_threads(self.tasks(), self.options.threads, work, self.options.request)

    def writers(self) -> list[threading.Thread]:
        def work(task: Task, buffer: memoryview) -> None:
            self.store.write_from(self.slots[task[0]].name, task[1], buffer, checksum=True)

        return in_threads(self.tasks(), self.options.threads, work, self.options.request)

    def commit(self) -> None:
        self.step += 1
        self.store.commit(self.store.prepare(self.step, {}))

    def read(self) -> None:
        run_all(self.readers())

    def write(self) -> None:
        run_all(self.writers())
        self.commit()

    def mixed(self) -> None:
        # a reader of a range that is already written would read the working version; the disk does the same work
        run_all(self.readers(), self.writers())
        self.commit()

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.path)


class PlainThreads:
    """Threads of pread and pwrite with O_DIRECT on two preallocated files."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.paths = [Path(options.dir) / f"bench-plain.{index}" for index in range(2)]
        self.options = options
        self.nbytes = max(round(options.gb * (1 << 30) / SLOT_NBYTES), 1) * SLOT_NBYTES
        self.fds = []
        for path in self.paths:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            os.posix_fallocate(fd, 0, self.nbytes)
            self.fds.append(fd)
        for fd in self.fds:
            run_all(self.writers(fd))
            os.fsync(fd)

    def tasks(self) -> list[Task]:
        chunk = self.options.request
        return [(0, start, min(chunk, self.nbytes - start)) for start in range(0, self.nbytes, chunk)]

    def readers(self) -> list[threading.Thread]:
        def work(task: Task, buffer: memoryview) -> None:
            os.preadv(self.fds[0], [buffer], task[1])

        return in_threads(self.tasks(), self.options.threads, work, self.options.request)

    def writers(self, fd: int) -> list[threading.Thread]:
        def work(task: Task, buffer: memoryview) -> None:
            os.pwrite(fd, buffer, task[1])

        return in_threads(self.tasks(), self.options.threads, work, self.options.request)

    def read(self) -> None:
        run_all(self.readers())

    def write(self) -> None:
        run_all(self.writers(self.fds[1]))
        os.fsync(self.fds[1])

    def mixed(self) -> None:
        run_all(self.readers(), self.writers(self.fds[1]))
        os.fsync(self.fds[1])

    def close(self) -> None:
        for fd, path in zip(self.fds, self.paths, strict=True):
            os.close(fd)
            path.unlink()


class Fio:
    """fio with io_uring on two laid-out files: the yardstick that is not ours."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.nbytes = max(round(options.gb * (1 << 30) / SLOT_NBYTES), 1) * SLOT_NBYTES
        self.paths = [Path(options.dir) / f"bench-fio.{index}" for index in range(2)]
        self.seconds = 0.0
        for path in self.paths:
            self._run(("write", path))

    def _run(self, *jobs: tuple[str, Path]) -> None:
        command = ["fio", "--output-format=json", "--ioengine=io_uring", "--direct=1", f"--size={self.nbytes}"]
        command += [
            f"--bs={self.options.request}",
            f"--iodepth={self.options.threads}",
            "--fallocate=none",
            "--end_fsync=1",
        ]
        for number, (kind, path) in enumerate(jobs):
            command += [f"--name=j{number}", f"--rw={kind}", f"--filename={path}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        runtimes = [max(job["read"]["runtime"], job["job_runtime"] if job["write"]["io_bytes"] else 0) for job in found]
        self.seconds = max(runtimes) / 1000  # without fio's own start-up

    def read(self) -> None:
        self._run(("read", self.paths[0]))

    def write(self) -> None:
        self._run(("write", self.paths[1]))

    def mixed(self) -> None:
        self._run(("read", self.paths[0]), ("write", self.paths[1]))

    def close(self) -> None:
        for path in self.paths:
            path.unlink()


SYSTEMS = {"overspill": Overspill, "python_odirect": PlainThreads, "fio": Fio}


def measure(
    options: argparse.Namespace,
    names: list[str],
    operations: list[str],
    sweep: list[tuple[int, int]],
    others_beside: list[Beside],
) -> None:
    """Interleaved rounds: a disk whose speed drifts, or has bursts to spend, is unfair to none."""
    systems = {name: SYSTEMS[name](options) for name in names}
    seconds: dict[tuple[str, str, int, int], list[float]] = {}
    others: dict[tuple[str, str, int, int], list[float]] = {}
    cases = [(name, operation, *setting) for setting in sweep for operation in operations for name in names]
    try:
        for round_number in range(options.reps):
            shift = round_number % len(cases)  # no case always follows the same one
            for case in cases[shift:] + cases[:shift]:
                name, operation, options.threads, options.request = case
                system = systems[name]
                time.sleep(options.rest)
                other, start = other_cpu_seconds(), time.perf_counter()
                getattr(system, operation)()
                took = time.perf_counter() - start
                others.setdefault(case, []).append((other_cpu_seconds() - other) / took)
                seconds.setdefault(case, []).append(system.seconds if name == "fio" else took)
            for beside in others_beside:
                time.sleep(options.rest)
                beside.run()
    finally:
        for system in systems.values():
            system.close()
    for case in cases:
        name, operation, threads, request = case
        times = seconds[case]
        nbytes = systems[name].nbytes * (2 if operation == "mixed" else 1)
        median = statistics.median(times)
        result = {"bench": "io", "system": name, "op": operation, "GB": round(nbytes / 1e9, 3)}
        result |= {"median_s": round(median, 4), "min_s": round(min(times), 4), "max_s": round(max(times), 4)}
        result |= {"GBps": round(nbytes / median / 1e9, 3), "best_GBps": round(nbytes / min(times) / 1e9, 3)}
        result |= {"other_cpu": round(statistics.median(others[case]), 2)}
        print(json.dumps(result | {"threads": threads, "request_nbytes": request, "rounds": len(times)}), flush=True)
    for beside in others_beside:
        for row in beside.rows():
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", default="overspill", help=f"comma-separated: {', '.join(SYSTEMS)}")
    parser.add_argument("--op", default="write,read,mixed", help="comma-separated: write, read, mixed")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--dir", default="scratch")
    parser.add_argument("--reps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="readers, and as many writers")
    parser.add_argument(
        "--request", type=int, default=4 * MiB, help="bytes of one system call, and of one call to the store"
    )
    parser.add_argument(
        "--rest",
        type=float,
        default=2.0,
        help="seconds before each measurement, so that a disk that saves up bursts is fair to every system",
    )
    parser.add_argument("--sweep", action="store_true", help="threads 1 to 8, requests 512 KiB to 8 MiB")
    parser.add_argument("--beside", action="append", default=[], help="a command that prints such lines, once a round")
    options = parser.parse_args()
    names, operations = options.system.split(","), options.op.split(",")
    unknown = [*(set(names) - SYSTEMS.keys()), *(set(operations) - {"write", "read", "mixed"})]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}")
    Path(options.dir).mkdir(parents=True, exist_ok=True)
    settings = [(options.threads, options.request)]
    if options.sweep:
        settings = [(threads, request) for threads in (1, 2, 4, 8) for request in (MiB // 2, MiB, 4 * MiB, 8 * MiB)]
    measure(options, names, operations, settings, [Beside(command) for command in options.beside])


if __name__ == "__main__":
    main()
