"""Runs inside another estimator's environment: requests as JSON in, the tool's own functions called, GiB by row out.

Imports nothing of Overspill, and of the tools only the one that is asked. What a tool refuses is in ``refused``.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

MIB_PER_GIB = 1024
GIB = 2**30


def fitcheck(request: dict[str, Any]) -> float:
    """estimator.estimate, with the model's configuration read by its own parser from a file."""
    from fitcheck import config_parser, estimator, gpu_db

    config_parser._reported_param_count = lambda *args: request["parameters"]  # it would ask the hub
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(request["config"]))
        config_parser.hf_hub_download = lambda **what: str(file)
        model = config_parser.fetch_model_config("local/model")
    report = estimator.estimate(model, estimator.TrainingConfig(**request["training"]), gpu_db.get_gpu("a100-80"))
    mib = report.total_mib if request["whole"] else report.total_mib - report.overhead_mib
    return mib / MIB_PER_GIB


def accelerate(request: dict[str, Any]) -> float:
    """commands.estimate's "Training using Adam": the largest of its stages, from the model's bytes in fp32."""
    from accelerate.commands.estimate import estimate_training_usage

    return max(estimate_training_usage(request["parameters"] * 4, request["precision"]).values()) / GIB


def deepspeed(request: dict[str, Any]) -> float:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    _, gpu, _ = estimate_zero3_model_states_mem_needs(
        total_params=request["parameters"], largest_layer_params=request["largest"],
        num_gpus_per_node=min(8, request["gpus"]), num_nodes=max(1, request["gpus"] // 8), cpu_offload=False,
        cpu_offload_params=False,
    )  # fmt: skip
    return gpu / GIB


TOOLS = {
    "fitcheck": (fitcheck, "fitcheck-llm"),
    "accelerate": (accelerate, "accelerate"),
    "deepspeed": (deepspeed, "deepspeed"),
}


def main() -> None:
    run, package = TOOLS[sys.argv[1]]
    rows, refused = {}, {}
    for name, request in json.load(sys.stdin).items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                rows[name] = round(run(request), 4)
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            refused[name] = f"{type(error).__name__}: {error}"[:200]
    print(json.dumps({"version": version(package), "rows": rows, "refused": refused}))


if __name__ == "__main__":
    main()
