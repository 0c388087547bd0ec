"""One row of a table of published measurements becomes a Job. What a row does not say is the framework's default.

Columns: see docs/reference/truth-format.md. A row that names no model, batch or length that can be known raises
`Unmapped` with the reason; the scorer counts and names it. Nothing here depends on a row's measured value.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from overspill.errors import OverspillError
from overspill.job import Job
from overspill.model import ModelShape, read_model

__all__ = ["Unmapped", "config_of", "job_of", "shape_of"]

HERE = Path(__file__).resolve().parent


class Unmapped(Exception):
    """Why a row is no Job."""


@cache
def _models() -> dict[str, Any]:
    return tomllib.loads((HERE / "truth_models.toml").read_text(encoding="utf-8"))


@cache
def shape_of(name: str) -> ModelShape:
    """The model of a row. Raises Unmapped."""
    table = _models()
    if name in table["config"]:
        return ModelShape.from_config(table["config"][name])
    if match := re.fullmatch(r"MPT-(\d+[mb])", name):
        width, heads, layers = table["mpt"][match[1]]
        return ModelShape.from_config(
            {"model_type": "mpt", "d_model": width, "n_heads": heads, "n_layers": layers, "max_seq_len": 2**17,
             "vocab_size": table["mpt"]["vocab_size"], "expansion_ratio": 4, "no_bias": True}
        )  # fmt: skip
    if match := re.fullmatch(r"(.+) (?:truncated|reduced) to (\d+) layers", name):
        if match[1] not in table["truncated"]:
            raise Unmapped(f"the model {match[1]!r} is not known, of which {match[2]} layers are said to have run")
        config = dict(read_model(table["truncated"][match[1]]).config)
        config = dict(config.get("text_config", config))
        config.update(table["changes"].get(match[1], {}), num_hidden_layers=int(match[2]))
        return ModelShape.from_config(config)
    try:
        return read_model(table["alias"].get(name, name)).shape
    except OverspillError as error:
        raise Unmapped(f"the model {name!r} is not in the catalogue: {error.message}") from None


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a row's model, as the catalogue or the table has it. Raises Unmapped where there is none."""
    table = _models()
    if name in table["config"]:
        return dict(table["config"][name])
    try:
        return dict(read_model(table["alias"].get(name, name)).config)
    except OverspillError as error:
        raise Unmapped(f"the model {name!r} has no config.json in the catalogue: {error.message}") from None


def job_of(row: dict[str, str]) -> Job:
    """Raises Unmapped with the reason."""
    framework = row["framework"]
    for start, mapped in _FRAMEWORKS:
        if framework.startswith(start):
            return Job.read(_cleaned(mapped(row)), source=row["id"])
    raise Unmapped(f"the framework {framework!r} is not known")


def _cleaned(data: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {table: {key: value for key, value in keys.items() if value is not None} for table, keys in data.items()}


def _number(row: dict[str, str], key: str) -> int:
    text = row[key].strip()
    if not text:
        raise Unmapped(f"{key} is not published")
    return int(float(text))


def _versions(row: dict[str, str]) -> dict[str, str]:
    found = re.findall(r"([\w-]+) v?(\d+(?:\.\d+)+)", row["versions"])
    return dict(found)


def _base(row: dict[str, str], framework: str) -> dict[str, dict[str, Any]]:
    gpu = row["gpu"] or None
    return {
        "model": {"path": row["model"], "dtype": "bf16"},
        "data": {"seq_len": _number(row, "seq_len"), "packing": True},
        "train": {"micro_batch": _number(row, "micro_batch")},
        "method": {},
        "optimizer": {},
        "parallel": {"gpus": _number(row, "n_gpus")},
        "kernels": {},
        "framework": {"name": framework, "versions": _versions(row)},
        "device": {"gpu": gpu},
    }


def _lora(row: dict[str, str], data: dict[str, dict[str, Any]], **more: Any) -> None:
    """Targets by Llama's names, which the sources print for every model, are this model's own projections."""
    own = _models()["targets"].get(shape_of(row["model"]).family, {})
    named = [name for one in row["lora_targets"].split() for name in own.get(one, [one])]
    data["method"].update(kind="lora", rank=_number(row, "lora_rank"), targets=tuple(dict.fromkeys(named)), **more)


def _fms(row: dict[str, str]) -> dict[str, dict[str, Any]]:
    """HF Trainer with TRL on packed text; adapters with peft; fused kernels by the plug-ins that the notes name."""
    data = _base(row, "trl")
    notes, method = row["notes"], row["method"]
    facts = shape_of(row["model"]).facts
    if facts is not None and facts.positions == "learned" and facts.max_positions:
        # fms-hf-tuning: the smaller of max_seq_length and tokenizer.model_max_length
        data["data"]["seq_len"] = min(data["data"]["seq_len"], facts.max_positions)
    amp = re.search(r"amp=(\w+) autocast", notes)
    config = re.search(r"framework_config=([\w-]+)", notes)
    plugins = config[1] if config else "none"
    if "float16" in row["weight_dtype"] and "bfloat16" not in row["weight_dtype"]:
        data["model"]["dtype"] = "fp16"
    if amp:
        data["model"]["autocast"] = amp[1]
    data["model"]["gradient_checkpointing"] = row["grad_ckpt"] == "yes"
    data["kernels"]["attention"] = "flash"
    foak = "foak" in plugins
    if foak:
        data["kernels"].update(loss="fused", fused_norm=True, fused_rope=True)
    if "liger" in plugins:
        data["kernels"]["loss"] = "fused_linear"
    if method != "full":
        # fms-hf-tuning's default is a dropout of 0.05 on adapters.
        _lora(row, data, dropout=0.05)
    if method.startswith("qlora"):
        data["method"].update(base="nf4", double_quant=True)
    if method.startswith("gptq"):
        data["method"].update(base="gptq4", group_size=_models()["gptq_group_size"].get(row["model"], 128))
    if method != "full" and "baseline" not in plugins and foak and data["method"].get("base"):
        data["kernels"]["fused_adapters"] = True
    if "baseline" in plugins:
        data["method"]["upcast"] = "norms"
    if _number(row, "n_gpus") > 1:
        data["parallel"]["data"] = "fsdp1"
    return data


def _litgpt(row: dict[str, str]) -> dict[str, dict[str, Any]]:
    """LitGPT's finetune scripts in bf16-true: adapters in bf16 too, dropout of 0.05 on them, SDPA."""
    data = _base(row, "litgpt")
    method = row["method"]
    data["kernels"]["attention"] = "sdpa"
    # lit-gpt at the commit that the source names, of 2023; "litgpt (fabric)" is of 0.4 and 0.5
    data["framework"]["versions"] = {"litgpt": "0.1.0" if row["framework"] == "litgpt" else "0.4.13"}
    if match := re.search(r"global batch (\d+)", row["notes"]):
        data["train"]["accumulation"] = int(match[1]) // (_number(row, "micro_batch") * _number(row, "n_gpus"))
    data["model"]["gradient_checkpointing"] = row["grad_ckpt"] == "yes"
    if "lora" in method:
        _lora(row, data, dropout=0.05)
    elif "adapter" in method:
        data["method"]["kind"] = method.partition("+")[0]
    if "nf4" in method:
        data["method"].update(base="nf4", double_quant="dq" in method)
    if "FSDP" in row["parallelism"]:
        data["parallel"]["data"] = "fsdp1"
    return data


def _megatron(row: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Megatron-Core's pretraining on mock data with TransformerEngine and the distributed optimizer."""
    data = _base(row, "megatron")
    sizes = dict(re.findall(r"(TP|PP|DP|CP|EP) (\d+)", row["parallelism"]))
    data["parallel"].update(
        data="distributed_optimizer", tensor=int(sizes["TP"]), pipeline=int(sizes["PP"]), context=int(sizes["CP"]),
        expert=int(sizes["EP"]),
    )  # fmt: skip
    data["kernels"].update(attention="flash", loss="fused" if "fused CE" in row["notes"] else "plain")
    if match := re.search(r"micro-batches per step (\d+)", row["notes"]):
        data["train"]["accumulation"] = int(match[1])
    data["task"] = {"kind": "pretrain"}
    return data


def _torchtune(row: dict[str, str]) -> dict[str, dict[str, Any]]:
    """torchtune's recipes in full bf16; each row of its table adds one option to the one before."""
    data = _base(row, "torchtune")
    notes, optimizer = row["notes"], row["optimizer"]
    step = re.search(r"cumulative step: \+?([\w .-]+)", notes)
    order = ("baseline", "packed 4096", "compile", "chunked CE", "act ckpt", "optimizer in bwd", "activation offload",
             "8-bit AdamW")  # fmt: skip
    reached = next((place for place, name in enumerate(order) if step and step[1].strip().startswith(name)), len(order))
    data["framework"]["versions"] = {"torchtune": "0.4.0", "torch": "2.5.1"}
    data["model"]["gradient_checkpointing"] = row["grad_ckpt"] == "yes"
    data["kernels"].update(attention="sdpa", compile=reached >= 2, loss="chunked" if reached >= 3 else "plain")
    data["optimizer"]["in_backward"] = reached >= 5 and "lora" not in row["method"]
    if "8bit" in optimizer or reached >= order.index("8-bit AdamW"):
        data["optimizer"]["name"] = "adamw_8bit"
    if "CPU" in row["offload"]:
        data["offload"] = {"activations": "host"}
    if "lora" in row["method"]:
        targets = {"q_proj": ["q_proj"], "v_proj": ["v_proj"], "k_proj": ["k_proj"], "output_proj": ["o_proj"],
                   "mlp": ["gate_proj", "up_proj", "down_proj"]}  # fmt: skip
        names = [one for name in row["lora_targets"].split() for one in targets.get(name, [])]
        data["method"].update(kind="lora", rank=_number(row, "lora_rank"), targets=tuple(names))
    if "nf4" in row["method"]:
        data["method"].update(base="nf4", double_quant=True)
    if "FSDP2" in row["parallelism"]:
        data["parallel"]["data"] = "fsdp2"
    return data


def _torchtitan(row: dict[str, str]) -> dict[str, dict[str, Any]]:
    """torchtitan: fp32 parameters, bf16 under FSDP; compile and float8 as the notes say."""
    data = _base(row, "torchtitan")
    notes, parallel, checkpointing = row["notes"], row["parallelism"], row["grad_ckpt"]
    data["model"]["dtype"] = "fp32"
    data["model"]["autocast"] = "bf16"
    kind = {"no": "none", "full": "full", "yes": "full"}.get(checkpointing, "selective")
    if "per-op" in checkpointing:
        kind = "selective_op"
    if checkpointing == "selective":
        kind = "selective_op"
    data["kernels"].update(
        attention="sdpa", checkpointing=kind, compile="compile" in notes and "eager" not in notes,
        loss="chunked" if "chunked" in notes else "plain",
    )  # fmt: skip
    data["parallel"]["data"] = "fsdp1" if "FSDP1" in parallel else "fsdp2"
    data["framework"]["versions"] = _titan_versions(row)
    if re.search(r"\bstep 1\b", notes):
        data["train"]["steps"] = 1  # read before the optimizer's state is there
    if match := re.search(r"x TP (\d+)", parallel):
        data["parallel"]["tensor"] = int(match[1])
    if match := re.search(r"x CP (\d+)", parallel):
        data["parallel"]["context"] = int(match[1])
    if match := re.search(r"\bEP (\d+)", parallel):
        data["parallel"]["expert"] = int(match[1])
    data["task"] = {"kind": "pretrain"}
    return data


#: Year and month from which a published run of torchtitan is of these versions: its releases on PyPI and torch's.
_TITAN_RELEASES = (
    ((2024, 1), "0.0.1", "2.4.0"), ((2024, 10), "0.0.2", "2.6.0"), ((2025, 3), "0.0.2", "2.7.0"),
    ((2025, 6), "0.1.0", "2.8.0"), ((2025, 10), "0.2.0", "2.9.0"),
)  # fmt: skip


#: Pull requests of torchtitan from this number on were opened in or after this month (its GitHub history).
_TITAN_PULLS = ((1, "2024-01"), (735, "2024-12"), (996, "2025-03"))


def _titan_versions(row: dict[str, str]) -> dict[str, str]:
    """What a row names, or the releases of the month that it or its source's title names; else the newest."""
    text = f"{row['source_title']} {row['framework']} {row['notes']}"
    if pull := re.search(r"pytorch/torchtitan#(\d+)", row["source_ref"]):
        opened = [month for number, month in _TITAN_PULLS if number <= int(pull[1])][-1]
        text += f" {opened}"
    named = dict(re.findall(r"(torch|titan) ?(\d+(?:\.\d+)+)", text))
    if dates := [(int(year), int(month)) for year, month in re.findall(r"(20\d\d)-(\d\d)", text)]:
        titan, torch = [one[1:] for one in _TITAN_RELEASES if one[0] <= max(dates)][-1]
        return {"torchtitan": named.get("titan", titan), "torch": named.get("torch", torch)}
    if "torch" in named and "titan" not in named:
        release = [one for one in _TITAN_RELEASES if _tuple(one[2]) <= _tuple(named["torch"])]
        named["titan"] = release[-1][1]
    return {name: named[key] for name, key in (("torchtitan", "titan"), ("torch", "torch")) if key in named}


def _tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _llm_foundry(row: dict[str, str]) -> dict[str, dict[str, Any]]:
    """llm-foundry's pretraining: FSDP of fp32 parameters, bf16 compute, flash attention."""
    data = _base(row, "llm_foundry")
    data["model"].update(dtype="fp32", autocast="bf16", gradient_checkpointing=row["grad_ckpt"] == "yes")
    data["kernels"]["attention"] = "flash"
    data["parallel"].update(data="fsdp1", reduce_dtype="bf16" if "PURE" in row["parallelism"] else "fp32")
    data["task"] = {"kind": "pretrain"}
    return data


_FRAMEWORKS: tuple[tuple[str, Any], ...] = (
    ("HF Trainer/TRL SFT", _fms),
    ("litgpt", _litgpt),
    ("Megatron-LM", _megatron),
    ("torchtune", _torchtune),
    ("torchtitan", _torchtitan),
    ("llm-foundry", _llm_foundry),
)
