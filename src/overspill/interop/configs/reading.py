"""read_config(): a configuration that people already have, as a Job. Which format it is, is seen from its keys.

Order: the file (and the files that it names), then those given beside it, then the framework's defaults where nobody
said anything, and the flags last.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from overspill.errors import OverspillError
from overspill.interop.configs import (
    accelerate,
    axolotl,
    deepspeed,
    hf_training_arguments,
    llamafactory,
    torchtune,
    trl,
)
from overspill.interop.configs.core import ConfigReading, Draft, Findings, refuse
from overspill.interop.configs.files import nested, read_table
from overspill.job import Job

__all__ = ["FORMATS", "find_format", "flag_fields", "read_config"]

_READERS: Final[dict[str, Callable[[Draft], None]]] = {
    "accelerate": accelerate.read,
    "axolotl": axolotl.read,
    "deepspeed": deepspeed.read,
    "hf": hf_training_arguments.read,
    "llamafactory": llamafactory.read,
    "torchtune": torchtune.read,
    "trl": trl.read,
}

#: What `--format` takes.
FORMATS: Final = tuple(_READERS)

#: Readers of files that stand beside a script's own configuration.
_BESIDE: Final[dict[str, Callable[[Draft], None]]] = {
    "accelerate": accelerate.read_inside,
    "deepspeed": deepspeed.read_inside,
}

#: Short names of flags.
_ALIASES: Final = {
    "model": "model.path",
    "gpu": "device.gpu",
    "gpus": "parallel.gpus",
    "micro_batch": "train.micro_batch",
    "accumulation": "train.accumulation",
    "seq_len": "data.seq_len",
    "packing": "data.packing",
    "framework": "framework.name",
    "optimizer": "optimizer.name",
    "task": "task.kind",
    "attention": "kernels.attention",
    "checkpointing": "model.gradient_checkpointing",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "dtype": "model.dtype",
    "autocast": "model.autocast",
}

#: Words in a model's name that say how its weights are stored.
_STORED: Final = (
    (re.compile(r"\bawq\b", re.I), "awq4"),
    (re.compile(r"\bgptq\b", re.I), "gptq4"),
    (re.compile(r"\baqlm\b.*2bit", re.I), "aqlm2"),
    (re.compile(r"\bhqq\b", re.I), "hqq4"),
    (re.compile(r"bnb-nf4|bnb-4bit", re.I), "nf4"),
    (re.compile(r"\bfp8\b", re.I), "fp8"),
)


def read_config(
    path: str | Path,
    flags: Mapping[str, Any] | None = None,
    *,
    format: str | None = None,
    beside: Sequence[str | Path] = (),
) -> ConfigReading:
    """A configuration of another framework, as a Job.

    Args:
        path: the file: JSON, YAML, or a command line (.sh, .txt, .args).
        flags: values given beside it: dotted fields of the Job, short names as ``model``, ``gpus``, ``method``, or
            ``deepspeed``, the path of the file that the configuration names. They win over the file.
        format: one of FORMATS; otherwise it is seen from the keys.
        beside: an Accelerate or a DeepSpeed file that goes with a script's configuration.

    Raises:
        OverspillError: OVS109 for a file that cannot be read, a value of the wrong kind or an unknown format; OVS101
            for a flag or a layout that no Job takes.
    """
    file = Path(path)
    data = read_table(file)
    findings = Findings(flag_fields(flags or {}))
    name = format or find_format(data, file)
    if name not in _READERS:
        refuse("This format is not known.", file, value=name, next_step=f"Give one of {', '.join(FORMATS)}.")
    _read_beside(findings, [Path(one) for one in beside])
    draft = Draft(data, file, findings)
    read = _READERS[name]
    if name == "llamafactory" and llamafactory.is_token_list(data):
        read = llamafactory.read_token_list
    read(draft)
    draft.close()
    return _finish(name, file, findings)


def _read_beside(findings: Findings, files: Sequence[Path]) -> None:
    for file in files:
        data = read_table(file)
        name = find_format(data, file)
        if name not in _BESIDE:
            refuse("Only an Accelerate or a DeepSpeed file goes beside another.", file, value=name)
        child = Draft(data, file, findings, prefix=f"{file.name}:")
        _BESIDE[name](child)
        child.close()


def find_format(data: Mapping[str, Any], source: Path | str = "") -> str:
    """The format whose own keys the table holds. Raises OverspillError OVS109 where there is none."""
    table = dict(data)
    if llamafactory.is_token_list(table):
        return "llamafactory"
    if torchtune.is_torchtune(table):
        return "torchtune"
    for name, marks in (
        ("deepspeed", deepspeed.MARKS),
        ("axolotl", axolotl.MARKS[:1]),
        ("accelerate", accelerate.MARKS[:2]),
        ("llamafactory", llamafactory.MARKS[:4]),
        ("axolotl", axolotl.MARKS),
        ("trl", trl.MARKS),
        ("accelerate", accelerate.MARKS),
        ("hf", hf_training_arguments.MARKS),
    ):
        if any(key in table for key in marks):
            return name
    refuse(
        "No key of this configuration belongs to a format that is known.",
        source,
        value=", ".join(list(table)[:5]) or "no key",
        next_step=f"Say which it is with --format, one of {', '.join(FORMATS)}.",
    )
    return ""


def flag_fields(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags as dotted fields: short names spelled out, ``method = "qlora"`` as LoRA on an nf4 base."""
    fields: dict[str, Any] = {}
    for key, value in flags.items():
        name = key.replace("-", "_")
        if value is None:
            continue
        if name == "method":
            fields["method.kind"] = "lora" if value == "qlora" else value
            if value == "qlora":
                fields["method.base"] = "nf4"
        elif name in _ALIASES or "." in name or name == "deepspeed":
            fields[_ALIASES.get(name, name)] = value
        else:
            near = difflib.get_close_matches(name, [*_ALIASES, "method", "deepspeed"], n=1)
            hint = f"Did you mean {near[0]}?" if near else "Give a field of the job file, as train.micro_batch."
            raise OverspillError("OVS101", "This flag is not known.", field=key, value=value, next_step=hint)
    return fields


def _finish(name: str, file: Path, findings: Findings) -> ConfigReading:
    _assume_stored(findings)
    _cast_by_the_engine(findings)
    flags = {key: value for key, value in findings.flags.items() if "." in key and key not in findings.spent}
    missing = tuple(field for field in findings.missing if field not in flags)
    assumed = {
        field: one for field, one in findings.assumed.items() if field not in flags and field not in findings.fields
    }
    job = None
    if findings.trains and not missing:
        values = {field: one.value for field, one in assumed.items()} | findings.fields | flags
        job = _job(values, file)
    return ConfigReading(
        format=name,
        source=str(file),
        job=job,
        trains=findings.trains,
        used={key: ", ".join(fields) for key, fields in findings.used.items()},
        assumed=assumed,
        ignored=dict(findings.ignored),
        unknown=tuple(findings.unknown),
        missing=missing if findings.trains else (),
        notes=tuple(findings.notes),
    )


def _job(values: dict[str, Any], file: Path) -> Job:
    """The Job of dotted fields; a length in steps wins over one in epochs."""
    if values.get("train.steps") is not None:
        values.pop("train.epochs", None)
    return Job.read(nested({field: _plain(value) for field, value in values.items()}), source=str(file))


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _cast_by_the_engine(findings: Findings) -> None:
    """DeepSpeed's engine casts the model to mixed precision's dtype, without autocast, and keeps an fp32 master."""
    draft = Draft({}, Path(), findings)
    assumed = findings.assumed.get("model.autocast")
    dtype = draft.known("model.autocast") or (assumed.value if assumed else None)
    if not str(draft.known("parallel.data")).startswith("zero") or dtype not in ("bf16", "fp16"):
        return
    draft.set("model.dtype", dtype)
    draft.set("model.autocast", None)
    findings.spent.add("model.autocast")
    if draft.known("optimizer.master_dtype") is None:
        draft.set("optimizer.master_dtype", "fp32")


def _assume_stored(findings: Findings) -> None:
    """A model whose name says that it is stored in few bits."""
    model = str(findings.flags.get("model.path") or findings.fields.get("model.path") or "")
    if findings.fields.get("method.base") or findings.flags.get("method.base"):
        return
    draft = Draft({}, Path(), findings)
    for pattern, base in _STORED:
        if pattern.search(model):
            draft.assume("method.base", base, f"the name {model} says how its weights are stored")
            return
