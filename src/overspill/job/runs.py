"""What of a job `overspill train` runs today: the rest is refused by name, never ignored.

A forecast reads every table; a run that left out a LoRA table or a second GPU without a word would train something
else than what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

from overspill.errors import OverspillError
from overspill.job.core import Job

__all__ = ["FORECAST_TABLES", "RUNNING_OPTIMIZERS", "forecast_only", "refuse_what_does_not_run"]

#: Tables that change nothing in a run on one machine without a GPU: they must stand at their defaults.
FORECAST_TABLES = ("method", "task", "parallel", "offload", "kernels", "evaluation", "framework", "device")
RUNNING_OPTIMIZERS = ("adamw", "adam", "sgd", "lion")
_FORECAST_OPTIMIZER_KEYS = ("implementation", "paged", "in_backward", "state_dtype", "master_dtype", "rank", "ema")


def forecast_only() -> set[str]:
    """The keys, as table.key, that a run leaves at their defaults, or of which it takes only what changes nothing."""
    keys = {"model.autocast", "data.lengths", *(f"optimizer.{key}" for key in _FORECAST_OPTIMIZER_KEYS)}
    for table in FORECAST_TABLES:
        kind = Job.model_fields[table].annotation
        assert isinstance(kind, type) and issubclass(kind, BaseModel)
        keys |= {f"{table}.{key}" for key in kind.model_fields}
    return keys


def refuse_what_does_not_run(job: Job) -> None:
    """Raises OverspillError OVS108 for the first value that only a forecast understands, OVS101 without a length."""
    if job.train.steps is None and job.train.epochs is None:
        raise OverspillError(
            "OVS101", "A run needs its length.", field="train", next_step="Give either train.steps or train.epochs."
        )
    if job.optimizer.name not in RUNNING_OPTIMIZERS:
        _refuse("optimizer.name", job.optimizer.name, "one of " + ", ".join(RUNNING_OPTIMIZERS))
    if job.model.dtype == "fp16":
        _refuse("model.dtype", job.model.dtype, "bf16 or fp32")
    if job.model.autocast is not None:
        _refuse("model.autocast", job.model.autocast, "none")
    if job.data.lengths:
        _refuse("data.lengths", job.data.lengths, "none: a run reads its data")
    if job.task.kind not in ("sft", "pretrain") or job.task.neftune or job.task.vision_tokens:
        _refuse("task", job.task.kind, "sft or pretrain, on text")
    if job.framework.name not in ("torch", "overspill"):
        _refuse("framework.name", job.framework.name, "overspill")
    _refuse_changed(job.optimizer, "optimizer", _FORECAST_OPTIMIZER_KEYS)
    for table in FORECAST_TABLES:
        if table in ("task", "framework"):  # a few of their values do run
            continue
        _refuse_changed(getattr(job, table), table, type(getattr(job, table)).model_fields)


def _refuse_changed(table: BaseModel, name: str, keys: Iterable[str]) -> None:
    fields = type(table).model_fields
    for key in keys:
        value, default = getattr(table, key), fields[key].get_default(call_default_factory=True)
        if value != default:
            _refuse(f"{name}.{key}", value, f"{default!r}")


def _refuse(field: str, value: object, limit: str) -> None:
    raise OverspillError("OVS108", "This can be forecast, but not run yet.", field=field, value=value, limit=limit)
