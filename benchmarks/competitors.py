#!/usr/bin/env python3
"""Other estimators on the rows that they can take: fitcheck-llm, accelerate's and DeepSpeed's.

    python benchmarks/competitors.py TRUTH --out JSON [--fitcheck PYTHON] [--accelerate PYTHON] [--deepspeed PYTHON]

Each PYTHON is an interpreter in which that tool is installed; nothing of them is ours to install. A tool without one is
in the result with the note that it was not run. The tools get what they ask for (a config.json, numbers of parameters,
batch and length) through competitor_worker.py, and their own functions answer; scoreboard.py reads the result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from score_rows import FIGURES, BadTable, read_rows  # noqa: E402
from truth import Unmapped, config_of, job_of, shape_of  # noqa: E402

from overspill.errors import OverspillError  # noqa: E402
from overspill.job import Job  # noqa: E402
from overspill.model import ModelShape  # noqa: E402

__all__ = ["TOOLS", "main", "requests_of"]

Request = dict[str, Any]
#: LitGPT's names of the modules that fitcheck knows by transformers' names.
_LITGPT = {
    "query": ("q_proj",), "key": ("k_proj",), "value": ("v_proj",), "projection": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}  # fmt: skip


def _fitcheck(row: dict[str, str], job: Job, shape: ModelShape) -> Request | None:
    """One GPU, a dense decoder, AdamW; full or LoRA, nf4 at most. Its total without the overhead it adds stands for
    allocated, the total for what nvidia-smi shows."""
    method = job.method
    if job.parallel.gpus > 1 or method.kind not in ("full", "lora") or method.base not in (None, "nf4"):
        return None
    if row["measure_kind"] not in ("allocated", "smi") or job.optimizer.name != "adamw":
        return None
    weights = job.model.dtype
    bf16_states = method.kind == "full" and weights != "fp32"
    return {
        "config": config_of(row["model"]),
        "parameters": shape.total_numel,
        "whole": row["measure_kind"] == "smi",
        "training": {
            "precision": weights if job.model.autocast is None else job.model.autocast,
            "quantization": method.base or "none", "double_quant": method.double_quant, "optimizer": "adamw",
            "optimizer_dtype": "bf16" if bf16_states else "fp32", "batch_size": job.train.micro_batch,
            "seq_len": job.data.seq_len, "lora_rank": method.rank if method.kind == "lora" else None,
            "lora_targets": [name for one in method.targets for name in _LITGPT.get(one, (one,))],
            "grad_checkpoint": job.model.gradient_checkpointing,
            "flash_attn": True,
        },
    }  # fmt: skip


def _accelerate(row: dict[str, str], job: Job, shape: ModelShape) -> Request | None:
    """Full fine-tuning with Adam on one GPU: weights, gradients and states; it takes no batch and no length."""
    if row["measure_kind"] != "allocated" or job.method.kind != "full" or job.parallel.gpus > 1:
        return None
    mixed = job.model.autocast or job.model.dtype
    return {
        "parameters": shape.total_numel,
        "precision": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(mixed, "bfloat16"),
    }


def _deepspeed(row: dict[str, str], job: Job, shape: ModelShape) -> Request | None:
    """Full fine-tuning with every state split over data-parallel ranks, as ZeRO-3 does and FSDP's FULL_SHARD; it takes
    no batch and no length."""
    parallel = job.parallel
    alone = parallel.tensor * parallel.pipeline * parallel.context * parallel.expert == 1
    if row["measure_kind"] != "allocated" or job.method.kind != "full" or not alone:
        return None
    if parallel.data not in ("fsdp1", "fsdp2", "zero3") or parallel.gpus < 2:
        return None
    largest = max(one.numel for one in shape.parameters)  # as its own estimator counts: modules without children
    return {"parameters": shape.total_numel, "largest": largest, "gpus": parallel.gpus}


TOOLS: dict[str, Callable[[dict[str, str], Job, ModelShape], Request | None]] = {
    "fitcheck": _fitcheck,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
}
_SAYS = {
    "fitcheck": "one GPU, dense models, full or LoRA, nf4",
    "accelerate": "full fine-tuning on one GPU; weights, gradients and states only",
    "deepspeed": "ZeRO-3 on full-shard rows; weights, gradients and states only",
}


def requests_of(table: list[dict[str, str]], tool: str) -> dict[str, Request]:
    """What a tool is asked, by row id: rows that it can take."""
    found = {}
    for row in table:
        if row["measure_kind"] not in FIGURES or not row["measured_gib"] or row["unpredictable"]:
            continue
        try:
            request = TOOLS[tool](row, job_of(row), shape_of(row["model"]))
        except (Unmapped, OverspillError, KeyError, ValueError):
            continue  # the scoreboard names it
        if request is not None:
            found[row["id"]] = request
    return found


def _ask(tool: str, python: str | None, requests: dict[str, Request]) -> dict[str, Any]:
    says = _SAYS[tool]
    if python is None:
        return {"note": f"not run (not installed here); takes {says}", "rows": {}}
    command = [python, str(HERE / "competitor_worker.py"), tool]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        return {"note": f"did not run: {last}", "rows": {}}
    answer: dict[str, Any] = json.loads(lines[-1])
    refused = len(requests) - len(answer["rows"])
    note = says + (f"; it refused {refused} of {len(requests)} rows" if refused else "")
    return {"version": answer["version"], "note": note, "rows": answer["rows"], "refused": answer["refused"]}


def main(argv: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    made.add_argument("path", help="the CSV of measurements")
    made.add_argument("--out", required=True, metavar="JSON")
    for tool in TOOLS:
        made.add_argument(f"--{tool}", metavar="PYTHON", help=f"an interpreter that has {tool}")
    args = made.parse_args(argv)
    try:
        table = read_rows(args.path)
    except BadTable as error:
        print(f"competitors: {error}", file=sys.stderr)
        return 2
    result = {name: _ask(name, getattr(args, name), requests_of(table, name)) for name in TOOLS}
    Path(args.out).write_text(json.dumps({"tools": result}, indent=1) + "\n", encoding="utf-8")
    for name, said in result.items():
        print(f"{name} {said.get('version', '')}: {len(said['rows'])} rows; {said['note']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
