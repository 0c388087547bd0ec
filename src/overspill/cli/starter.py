"""The starter job file, and the walk over the Job schema that it shares with the reference page.

Keys, defaults and descriptions come from job.py alone, so a new key appears in `overspill new`, in
docs/reference/job.md and in the error hints without being written down twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from overspill.job import Job
from overspill.job.runs import forecast_only
from overspill.schema import Nbytes, Seconds

__all__ = ["JobKey", "JobTable", "job_tables", "starter_text", "toml_value"]


@dataclass(frozen=True)
class JobKey:
    """One key of the job file."""

    name: str
    kind: str  # its type in words: "whole number", "text", '"bf16" or "fp32"'
    default: Any
    required: bool
    description: str


@dataclass(frozen=True)
class JobTable:
    """One table of the job file, with its keys in the order of the schema."""

    name: str
    description: str
    keys: tuple[JobKey, ...]


_EXAMPLE_BY_PATH: Mapping[str, Any] = {
    "model.path": "path/to/model",
    "model.tokenizer": "path/to/tokenizer",
    "data.path": "path/to/text.txt",
    "train.steps": 100,
    "train.epochs": 1.0,
    "train.threads": 8,
    "plan.memory": "8GiB",
    "plan.disk_fraction": 0.5,
}
# What a starter sets although the schema has another default or none: the smallest useful job.
_SET_IN_STARTER = ("model.path", "data.path", "train.steps", "plan.memory")


_QUANTITY_WORDS = {id(get_args(Nbytes)[1]): 'size, as in "8GiB"', id(get_args(Seconds)[1]): 'duration, as in "10min"'}


def _kind(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        _, *extras = get_args(annotation)
        return next((_QUANTITY_WORDS[id(e)] for e in extras if id(e) in _QUANTITY_WORDS), "value")
    if origin is Literal:
        return " or ".join(toml_value(choice) for choice in get_args(annotation))
    if origin is tuple:
        inner = dict.fromkeys(_kind(a) for a in get_args(annotation) if a is not Ellipsis)
        return "list of " + " and ".join(f"{kind}s" for kind in inner)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_kind(a) for a in get_args(annotation) if a is not type(None)))
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(annotation, str(annotation))


def _kind_of(info: FieldInfo) -> str:
    words = (_QUANTITY_WORDS.get(id(extra)) for extra in info.metadata)
    return next((word for word in words if word), None) or _kind(info.annotation)


def job_tables() -> Iterator[JobTable]:
    """The tables of the job file, in the order of the schema."""
    for table_name, table_info in Job.model_fields.items():
        model = table_info.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        keys = []
        for name, info in model.model_fields.items():
            required = info.is_required()
            default = None if info.default is PydanticUndefined else info.default
            keys.append(JobKey(name, _kind_of(info), default, required, info.description or ""))
        yield JobTable(table_name, (model.__doc__ or "").strip(), tuple(keys))


def toml_value(value: Any) -> str:
    """A Python value as TOML text. Texts are JSON-quoted, which TOML reads alike."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return toml_value(value.value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return repr(value)


def starter_text(*, overrides: Mapping[str, Any] | None = None) -> str:
    """A job file with every key that a run reads: the few that must be chosen are
    set, the others stand as comments at their default.

    Args:
        overrides: values by path (``model.path``) that are set instead of the example.
    """
    chosen = dict(overrides or {})
    lines = [
        "# An Overspill job. A key behind a # stands at its default: remove the # to change it.",
        "# `overspill forecast FILE` says what it needs, `overspill train FILE` runs it.",
        '# Sizes carry a unit, "8GiB" or "8GB"; paths are relative to this file.',
    ]
    unused = forecast_only()
    for table in job_tables():
        keys = [key for key in table.keys if f"{table.name}.{key.name}" not in unused]
        if not keys:
            continue
        lines += ["", f"# {table.description}", f"[{table.name}]"]
        for key in keys:
            path = f"{table.name}.{key.name}"
            if key.description:
                lines.append(f"# {key.description}")
            if path in chosen:
                lines.append(f"{key.name} = {toml_value(chosen[path])}")
            elif path in _SET_IN_STARTER:
                lines.append(f"{key.name} = {toml_value(_EXAMPLE_BY_PATH[path])}")
            elif key.default is None:
                lines.append(f"#{key.name} = {toml_value(_EXAMPLE_BY_PATH.get(path, ''))}  # not set")
            else:
                lines.append(f"#{key.name} = {toml_value(key.default)}")
    lines += ["", "# More tables, for the forecast of a job on GPUs: docs/reference/job.md."]
    return "\n".join(lines) + "\n"
