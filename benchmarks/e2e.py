#!/usr/bin/env python3
"""One training run of Overspill for comparison with other systems: same shapes, seed, batches and output keys.

    python benchmarks/e2e.py --model 150m --dtype bf16 --placement disk --memory 1200MiB --dir DIR

``--memory`` is the limit of a memory cgroup that the whole process lives in (interpreter, libraries, page cache and
all), not only what Overspill calls its budget; without one, the run is not limited. One JSON line on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # it is run as a file

from testing.cgroup import MemoryGroup, limit_here, missing  # noqa: E402

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
    },
    "150m": {
        "hidden_size": 768,
        "num_hidden_layers": 14,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 3072,
    },
    "400m": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    "1.5b": {
        "hidden_size": 2048,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
    },
}
VOCAB = 32000


def status_nbytes() -> dict[str, int]:
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row and row[0].startswith(("Vm", "Rss"))}


def io_nbytes() -> dict[str, int]:
    rows = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {key: int(value) for key, value in rows}


def cpu_seconds() -> tuple[float, float]:
    """CPU time of the whole machine but idle and iowait, and of this process with its children."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    own = os.times()
    busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
    return busy, own.user + own.system + own.children_user + own.children_system


class AnonSampler(threading.Thread):
    """Highest anonymous memory since the last reset, sampled every 20 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_nbytes = 0
        self.start()

    def run(self) -> None:
        while True:
            now = status_nbytes()
            self.peak_nbytes = max(self.peak_nbytes, now["RssAnon"] + now["RssShmem"])
            time.sleep(0.02)

    def reset(self) -> int:
        value, self.peak_nbytes = self.peak_nbytes, 0
        return value


def worker(args: argparse.Namespace) -> None:
    """Train, and print the result. Runs inside the cgroup."""
    import torch

    torch.set_num_threads(args.threads)
    from transformers import AutoModelForCausalLM, Qwen2Config

    from overspill import attach
    from overspill.plan import Durability, Placement, Plan, StateFormat

    base_nbytes = status_nbytes()["RssAnon"]
    io_start, sampler, begun = io_nbytes(), AnonSampler(), time.perf_counter()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    config = Qwen2Config(
        vocab_size=VOCAB, max_position_embeddings=2048, tie_word_embeddings=True, use_cache=False, **SHAPES[args.model]
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    params = sum(p.numel() for p in model.parameters())
    model_shape, activations_nbytes = forecast_activations(args, config)
    room = args.activations_mib << 20 if args.activations_mib is not None else activations_nbytes * 6 // 5
    share = resident_share(args, params, base_nbytes, room)
    plan = Plan(
        memory_nbytes=budget_nbytes(args, base_nbytes),
        optimizer_state=Placement(host=share, disk=1 - share),
        state_format=StateFormat(master="fp32" if args.state_format == "fp32-master" else "split"),
        overlap=args.overlap,
        durability=Durability(every_steps=0 if args.durability == "checkpoint" else int(args.durability)),
        staging_nbytes=args.staging_mib << 20,
        chunk_numel=args.chunk_numel,
        read_threads=args.read_threads,
        write_threads=args.write_threads,
        kernel_threads=args.kernel_threads,
        keep_last=0,
    )
    directory = Path(args.dir) / f"overspill-{os.getpid()}"
    session = attach(model, optimizer=optimizer, plan=plan, directory=directory)
    init_seconds = time.perf_counter() - begun
    init_anon, init_rss, io_init = sampler.reset(), status_nbytes()["VmHWM"], io_nbytes()
    Path("/proc/self/clear_refs").write_text("5")
    generator = torch.Generator().manual_seed(1)
    shape = (args.micro_batch, args.seq_len)
    batches = [torch.randint(0, VOCAB, shape, generator=generator).to(args.device) for _ in range(2)]
    busy, own = cpu_seconds()
    measured = time.perf_counter()
    losses, times, stalls = [], [], []
    # On a device the phases' times need its queue to be empty; a step's total is right either way.
    settle = torch.accelerator.synchronize if args.device != "cpu" else lambda: None
    for i in range(args.steps):
        ids = batches[i % 2]
        t0 = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        settle()
        t1 = time.perf_counter()
        loss.backward()
        settle()
        t2 = time.perf_counter()
        session.optimizer.step()
        session.optimizer.zero_grad()
        session.step_boundary()
        t3 = time.perf_counter()
        losses.append(round(float(loss.detach()), 5))
        times.append((t1 - t0, t2 - t1, t3 - t2))
        stalls.append(session.step_facts()["stall_seconds"])
    seconds = time.perf_counter() - measured
    busy, own = cpu_seconds()[0] - busy, cpu_seconds()[1] - own
    io_end = io_nbytes()
    warm = 2 if args.steps > 4 else 0
    kept = times[warm:]
    causes = {cause for row in stalls[warm:] for cause in row}
    result: dict[str, Any] = {
        "bench": "e2e",
        "system": "overspill",
        "model": args.model,
        "dtype": args.dtype,
        "params": params,
        "micro_batch": args.micro_batch,
        "seq": args.seq_len,
        "steps": args.steps,
        "cap_mib": args.memory_mib,
        "init_s": round(init_seconds, 2),
        "step_s": round(statistics.median(sum(t) for t in kept), 4),
        "fwd_s": round(statistics.median(t[0] for t in kept), 4),
        "bwd_s": round(statistics.median(t[1] for t in kept), 4),
        "opt_s": round(statistics.median(t[2] for t in kept), 4),
        "first_step_s": round(sum(times[0]), 3),
        "init_peak_rss_MiB": init_rss >> 20,
        "train_peak_rss_MiB": status_nbytes()["VmHWM"] >> 20,
        "init_peak_anon_MiB": init_anon >> 20,
        "train_peak_anon_MiB": sampler.peak_nbytes >> 20,
        "disk_write_GB_per_step": round((io_end["write_bytes"] - io_init["write_bytes"]) / 1e9 / args.steps, 3),
        "disk_read_GB_per_step": round((io_end["read_bytes"] - io_init["read_bytes"]) / 1e9 / args.steps, 3),
        "init_disk_write_GB": round((io_init["write_bytes"] - io_start["write_bytes"]) / 1e9, 3),
        "other_cpu": round(max(0.0, busy - own) / seconds, 3),
        "losses": losses,
        "device": args.device,
        "placement": args.placement,
        "resident_share": round(share, 4),
        "state_format": args.state_format,
        "overlap": args.overlap,
        "durability": args.durability,
        "staging_MiB": args.staging_mib,
        "base_anon_MiB": base_nbytes >> 20,
        "block_numels": [block.layout.numel for block in session.blocks],
        "resident_numel": sum(chunk.numel for block in session.blocks for chunk in block.chunks if chunk.resident),
        "buffers": len(session.staging),
        "chunk_numel": args.chunk_numel,
        "held_MiB": {k: v >> 20 for k, v in session.pool.held_nbytes_by_class().items()},
        "stall_s": {c: round(statistics.median(row.get(c, 0.0) for row in stalls[warm:]), 4) for c in sorted(causes)},
    }
    result["forecast"] = forecast_of(args, model_shape, plan, activations_nbytes, base_nbytes)
    session.close()
    shutil.rmtree(directory, ignore_errors=True)
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


def budget_nbytes(args: argparse.Namespace, base_nbytes: int) -> int:
    """What Overspill may use of the limit: interpreter and libraries (and their files) come off. 64 GiB without one."""
    if not args.memory_mib:
        return 64 << 30
    return (args.memory_mib << 20) - base_nbytes - (args.files_mib << 20)


def forecast_activations(args: argparse.Namespace, config: Any) -> tuple[Any, int]:
    """The model's shape, and what Overspill forecasts beside the state for this batch; the loop holds the logits.

    The room left for it is a fifth more: torch's matmuls keep buffers of theirs.
    """
    from overspill.forecast.activations import Batch, activation_phases
    from overspill.model import read_model

    with tempfile.TemporaryDirectory() as directory:
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(directory)
        shape = read_model(directory).shape
    batch = Batch(args.micro_batch, args.seq_len, 4 if args.dtype == "fp32" else 2, logits_held=True)
    return shape, max(phase.nbytes for phase in activation_phases(shape, batch))


def forecast_of(
    args: argparse.Namespace, shape: Any, plan: Any, activations_nbytes: int, base_nbytes: int
) -> dict[str, Any]:
    """What Overspill forecasts of this run, in the units of the measurements beside it."""
    from overspill.forecast.core import forecast
    from overspill.job import Job
    from overspill.machine import Machine

    job = Job.model_validate(
        {
            "model": {"path": "benchmark", "dtype": args.dtype},
            "data": {"path": "benchmark", "seq_len": args.seq_len},
            "train": {"micro_batch": args.micro_batch},
            "plan": {"master": plan.state_format.master},
        }
    )
    plan = plan.model_copy(update={"activations_nbytes": activations_nbytes})
    made = forecast(job, Machine(), shape, plan=plan, base_nbytes=base_nbytes)
    return {"train_peak_anon_MiB": (base_nbytes + made.peak_nbytes) >> 20}


def resident_share(args: argparse.Namespace, params: int, base_nbytes: int, activations_nbytes: int) -> float:
    """Which share of the optimizer state stays in memory: all, none, or what the limit leaves room for."""
    if args.resident_share is not None:
        return float(args.resident_share)
    if args.placement != "mixed":
        return 1.0 if args.placement == "host" else 0.0
    if not args.memory_mib:
        raise SystemExit("--placement mixed needs --memory or --resident-share")
    weight = 2 if args.dtype == "bf16" else 4
    state = 8 if args.dtype == "fp32" else 12 if args.state_format == "fp32-master" else 10
    fixed = base_nbytes + (args.files_mib << 20) + 2 * weight * params + (args.staging_mib << 20) + activations_nbytes
    return max(0.0, min(1.0, ((args.memory_mib << 20) - fixed) / (state * params)))


def launch(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """Run the worker as a child, inside a memory cgroup if a limit is given."""
    group = None
    if args.memory_mib:
        if (reason := missing()) is not None:
            raise SystemExit(f"--memory needs a memory control group: {reason}")
        group = MemoryGroup()
        limit_here(group.path, args.memory_mib << 20)

    def enter() -> None:
        if group is not None:
            (group.path / "cgroup.procs").write_text(str(os.getpid()))

    child = subprocess.Popen(
        [sys.executable, __file__, "--worker", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=enter,
    )
    try:
        out, err = child.communicate(timeout=args.timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        err += "\ntimeout"
    lines = [line[7:] for line in out.splitlines() if line.startswith("RESULT ")]
    if lines:
        result: dict[str, Any] = json.loads(lines[-1])
    else:
        tail = " | ".join(line for line in err.splitlines()[-3:] if line.strip())
        result = {"bench": "e2e", "system": "overspill", "error": f"exit {child.returncode}", "tail": tail[-600:]}
    if group is not None:
        result["cg_max_usage_MiB"] = group.peak_nbytes >> 20
        result["cg_failcnt"] = group.limit_hits
        group.close()
    return result


def mebibytes(text: str) -> int:
    from overspill.units import parse_nbytes

    return parse_nbytes(text, "--memory") >> 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="150m")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--placement", choices=["host", "disk", "mixed"], default="disk")
    parser.add_argument("--resident-share", type=float, help="share of the state that stays in memory")
    parser.add_argument("--memory", dest="memory_mib", type=mebibytes, default=0, help='cgroup limit, as "1200MiB"')
    parser.add_argument(
        "--activations-mib", type=int, help="room for activations, with --placement mixed; else what is forecast"
    )
    parser.add_argument("--files-mib", type=int, default=80, help="pages of libraries that stay in use")
    parser.add_argument("--durability", default="checkpoint", help='"checkpoint", or a number of steps')
    parser.add_argument("--state-format", choices=["exact", "fp32-master"], default="exact")
    parser.add_argument("--overlap", choices=["step", "forward"], default="forward")
    parser.add_argument("--staging-mib", type=int, default=96)
    parser.add_argument("--chunk-numel", type=int, default=1 << 20)
    parser.add_argument("--read-threads", type=int, default=2)
    parser.add_argument("--write-threads", type=int, default=2)
    parser.add_argument("--kernel-threads", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where the model computes: cpu, cuda, …")
    parser.add_argument("--dir", default="scratch")
    parser.add_argument("--timeout", type=int, default=600)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    Path(args.dir).mkdir(parents=True, exist_ok=True)
    if args.worker:
        worker(args)
    result = launch(args, sys.argv[1:])
    print(json.dumps(result), flush=True)
    sys.exit("error" in result)


if __name__ == "__main__":
    main()
