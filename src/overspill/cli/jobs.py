"""From the command line to a Job: read the file, apply ``--set``, make its paths absolute.

A job file's paths are relative to the file; a copied job must still mean the same, so they are made absolute here
once; so are those of a run's job.toml, where a user has edited it. A model path that is no directory beside the file
stays as it is: it is a hub id.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overspill.errors import OverspillError
from overspill.files import encodes
from overspill.job import Job, read_job

__all__ = ["load_job", "refuse_missing_data", "with_settings"]


def load_job(file: Path, settings: Sequence[str] = ()) -> Job:
    """The job in ``file`` with ``settings`` (``key=value``) applied and absolute paths.

    Raises OverspillError: OVS101, OVS102, OVS103; OVS107 for a path that is not UTF-8, since no job file can hold it.
    """
    job = with_settings(read_job(file), settings)
    base = file.resolve().parent
    if not encodes(str(base)):
        raise OverspillError(
            "OVS107",
            "The job file lies in a directory whose path is not UTF-8, so a run's job file could not name it.",
            field=ascii(str(base)),
            next_step="Rename the directory, or move the job elsewhere.",
        )
    return _with_absolute_paths(job, base)


def refuse_missing_data(job: Job) -> None:
    """Raises OverspillError OVS204 where a data file is not there: known before the seconds that a forecast takes."""
    names = (job.data.path,) if isinstance(job.data.path, str) else job.data.path
    for name in names:
        if not Path(name).exists():
            raise OverspillError(
                "OVS204",
                "The data file does not exist.",
                field="data.path",
                value=name,
                next_step="Correct data.path; it is relative to the job file.",
            )


def with_settings(job: Job, settings: Sequence[str]) -> Job:
    """``plan.memory=2GiB`` and the like; the value is TOML, or a text where it is none."""
    if not settings:
        return job
    data = job.model_dump(mode="json", exclude_none=True)
    if job.optimizer.max_grad_norm is None:
        data["optimizer"]["max_grad_norm"] = 0
    for setting in settings:
        path, equals, text = setting.partition("=")
        table, dot, key = path.strip().partition(".")
        if not equals or not dot or not key:
            raise OverspillError(
                "OVS101", "A setting is written table.key=value.", field="--set", value=setting, next_step=_EXAMPLE
            )
        if table not in data:
            near = difflib.get_close_matches(table, list(data), n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}?" if near else f"Known tables: {', '.join(data)}."
            raise OverspillError("OVS101", "Unknown table in a setting.", field=f"--set {path}", next_step=hint)
        data[table][key] = _toml(text.strip())
        if table == "train" and key in ("steps", "epochs"):  # the newer wish replaces the other one
            data["train"].pop({"steps": "epochs", "epochs": "steps"}[key], None)
    return Job.read(data, source="the job with --set")


_EXAMPLE = "As in --set train.steps=20 --set plan.memory=2GiB."


def _toml(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _with_absolute_paths(job: Job, base: Path) -> Job:
    def absolute(path: str) -> str:
        return str(base / Path(path).expanduser())

    def where_it_is(path: str) -> str:
        # "./m" and "/m" are meant as directories even when they are missing; "org/name" may be a hub id, but not where
        # the working directory has one of that name: a path is never relative to that.
        explicit = path.startswith((".", "/", "~")) or path.count("/") > 1
        return absolute(path) if explicit or (base / path).is_dir() or Path(path).is_dir() else path

    data = (job.data.path,) if isinstance(job.data.path, str) else job.data.path
    tokenizer = job.model.tokenizer
    return job.model_copy(
        update={
            "model": job.model.model_copy(
                update={
                    "path": where_it_is(job.model.path),
                    "tokenizer": None if tokenizer is None else where_it_is(tokenizer),
                }
            ),
            "data": job.data.model_copy(update={"path": tuple(absolute(path) for path in data)}),
            "plan": job.plan.model_copy(update={"directories": tuple(absolute(d) for d in job.plan.directories)}),
        }
    )
