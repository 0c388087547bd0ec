"""`overspill forecast` for a card, as a user types it: the first minute, each flag and output, what is refused."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from overspill.catalog.optimizers import optimizers_of
from overspill.cli.main import app
from overspill.forecast.device.result import DeviceForecast

LLAMA = "meta-llama/Llama-3.2-1B"
CONFIGS = Path(__file__).parents[1] / "assets" / "configs"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["forecast", *arguments], catch_exceptions=False, env={"COLUMNS": "200"})


def printed(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed(*arguments, "--json"))
    return found


def refused(*arguments: str) -> str:
    """As from a shell: one line on stderr, exit status 2 or 1, no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "overspill", "forecast", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


def test_the_first_minute_is_a_sentence_a_table_and_a_command_to_copy() -> None:
    lines = printed(LLAMA).splitlines()
    assert LLAMA in lines[0]
    assert "fits at micro-batch 1" in lines[0]
    assert [line.split("  ")[1].strip() for line in lines if line.startswith("  ") and "checkpointing" in line][:2] == [
        "full, no checkpointing",
        "full, checkpointing",
    ]
    command = lines[-1].strip()
    assert command.startswith("overspill forecast ")
    again = printed(*[part.strip("'") for part in re.findall(r"'[^']*'|\S+", command)[2:]])
    assert again.splitlines()[0].startswith(("FITS", "TIGHT"))


def test_the_verdict_is_the_first_line_and_the_figures_follow() -> None:
    text = printed(LLAMA, "--method", "lora", "--gpu", "rtx4090")
    assert text.startswith("FITS: It needs")
    for words in ("Probability of running out", "allocated", "reserved", "nvidia-smi", "what just fits", "assumed:"):
        assert words in text


FLAGS: list[tuple[list[str], str, Any]] = [
    (["--method", "qlora"], "method.base", "nf4"),
    (["--method", "lora", "--rank", "32"], "method.rank", 32),
    (["--method", "lora", "--targets", "q_proj,v_proj"], "method.targets", ["q_proj", "v_proj"]),
    (["--gpu", "rtx4090"], "device.gpu", "rtx4090"),
    (["--gpus", "4"], "parallel.gpus", 4),
    (["--gpus", "4", "--shard", "fsdp2"], "parallel.data", "fsdp2"),
    (["--gpus", "2", "--tensor", "2"], "parallel.tensor", 2),
    (["--gpus", "2", "--pipeline", "2"], "parallel.pipeline", 2),
    (["--micro-batch", "3"], "train.micro_batch", 3),
    (["--seq-len", "777"], "data.seq_len", 777),
    (["--optimizer", "adafactor"], "optimizer.name", "adafactor"),
    (["--dtype", "fp32"], "model.dtype", "fp32"),
    (["--autocast", "fp16"], "model.autocast", "fp16"),
    (["--no-checkpointing"], "model.gradient_checkpointing", False),
    (["--attention", "eager"], "kernels.attention", "eager"),
    (["--loss", "fused_linear"], "kernels.loss", "fused_linear"),
    (["--framework", "torchtune"], "framework.name", "torchtune"),
    (["--headroom", "0.3"], "device.headroom", 0.3),
    (["--held", "1GiB"], "device.held_nbytes", 2**30),
    (["--alloc-conf", "expandable_segments:True"], "device.alloc_conf", "expandable_segments:True"),
    (["--set", "train.accumulation=8"], "train.accumulation", 8),
]


@pytest.mark.parametrize(("flags", "field", "value"), FLAGS, ids=[" ".join(flags) for flags, _, _ in FLAGS])
def test_every_flag_reaches_the_job(flags: list[str], field: str, value: Any) -> None:
    table, _, key = field.partition(".")
    assert document(LLAMA, *flags)["job"][table][key] == value


def test_the_json_holds_every_field_of_a_forecast_and_more_to_read_it_by() -> None:
    found = document(LLAMA, "--gpu", "rtx4090", "--method", "full")
    assert set(found) == {*DeviceForecast.model_fields, "reserved", "smi", "job"}
    assert {name: found[name] for name in DeviceForecast.model_fields}
    assert found["verdict"] in ("fits", "tight", "does not fit")
    for name in ("allocated", "reserved", "smi", "needed"):
        one = found[name]
        assert one["low_nbytes"] <= one["likely_nbytes"] <= one["high_nbytes"]
    assert {one["phase"] for one in found["phases"]} >= {"load", "forward", "backward of a layer", "optimizer step"}


def test_a_size_alone_is_forecast_with_its_assumptions() -> None:
    found = document("--params", "7B")
    assert found["parameters"] == pytest.approx(7e9, rel=0.1)
    assert found["notes"] or found["assumed"]


def test_csv_has_one_line_a_phase_that_sums_up() -> None:
    rows = list(csv.DictReader(io.StringIO(printed(LLAMA, "--csv"))))
    assert len(rows) >= 5
    for row in rows:
        parts = [int(value) for name, value in row.items() if name not in ("phase", "total_nbytes")]
        assert sum(parts) == int(row["total_nbytes"])


def test_a_difference_of_two_jobs_says_where_it_lies() -> None:
    text = printed(LLAMA, "--diff", "Qwen/Qwen3-8B", "--method", "lora", "--gpu", "a100-80gb")
    assert "difference" in text
    assert "at the peak: weights" in text


def test_explain_prints_every_term_with_numbers() -> None:
    text = printed(LLAMA, "--explain", "--method", "lora")
    for words in ("weights = (", "optimizer = ", "tokens of a micro-batch", "backward of a layer = "):
        assert words in text


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "memory.svg"
    printed(LLAMA, "--plot", str(file), "--gpu", "rtx4090", "--method", "full")
    root = ElementTree.parse(file).getroot()
    assert root.tag.endswith("svg")
    assert len([one for one in root.iter() if one.tag.endswith("rect")]) > 10


FILES = sorted({path.parent for path in CONFIGS.rglob("*") if path.is_file()}) if CONFIGS.is_dir() else []


@pytest.mark.parametrize("directory", FILES, ids=[path.name for path in FILES])
def test_a_configuration_of_each_format_is_forecast_or_what_it_leaves_out_is_named(directory: Path) -> None:
    file = next(path for path in sorted(directory.iterdir()) if path.suffix in (".json", ".yaml", ".yml", ".toml"))
    done = CliRunner().invoke(app, ["forecast", str(file), "--model", LLAMA, "--json"])
    if done.exit_code == 0:
        assert json.loads(done.stdout)["allocated"]["likely_nbytes"] > 0
    else:
        assert getattr(done.exception, "code", "").startswith("OVS"), done.exception


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((LLAMA, "--gpus", "3", "--tensor", "2"), "parallel.gpus = 3 is no multiple of"),
        (("meta-llama/Llama-3.1-9B",), "Did you mean meta-llama/"),
        ((LLAMA, "--gpu", "rtx9999"), "Nearest: RTX"),
        ((LLAMA, "--method", "lora", "--targets", "nothing"), "limit one of down_proj, gate_proj"),
        ((LLAMA, "--method", "everything"), "full, lora, qlora"),
        (("openai-community/gpt2", "--seq-len", "2048"), "OVS205"),
        (("openai-community/gpt2", "--seq-len", "2048", "--method", "full"), "limit 1024"),
        ((LLAMA, "--framework", "torchtitan", "--optimizer", "adamw_8bit"), "torchtitan has no such optimizer"),
        ((LLAMA, "--framework", "deepspeed", "--optimizer", "adamw_8bit"), "limit adamw, adam, lion"),
        ((LLAMA, "--optimizer", "adamm"), "optimizer.name"),
        ((), "overspill forecast meta-llama/Llama-3.1-8B"),
        (("no-such-job.toml",), "No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_forecast_is_refused_in_one_sentence(arguments: tuple[str, ...], said: str) -> None:
    text = refused(*arguments)
    assert said in text
    assert len(text) < 700


def test_a_length_that_nobody_asked_for_is_cut_to_the_positions_that_a_model_has_learned() -> None:
    found = document("openai-community/gpt2")
    assert found["job"]["data"]["seq_len"] == 1024
    assert any(one["field"] == "data.seq_len" and "learned" in one["why"] for one in found["assumed"])


def test_the_lengths_of_a_data_file_set_the_batch(tmp_path: Path) -> None:
    rows, text, empty, rubbish = (
        tmp_path / name for name in ("rows.jsonl", "text.txt", "empty.jsonl", "rubbish.jsonl")
    )
    rows.write_text("\n".join(json.dumps({"prompt": "x" * 40, "completion": "y" * n}) for n in (10, 400, 1999)))
    text.write_text("word " * 100)
    empty.write_text("\n\n")
    rubbish.write_bytes(b"\xff\xfe\x00\x9d" * 40)
    found = document(LLAMA, "--method", "lora", "--data", str(rows))
    assert found["job"]["data"]["lengths"][-1] == (40 + 1 + 1999 + 3) // 4
    assert document(LLAMA, "--data", str(text))["job"]["data"]["lengths"] == [125]
    assert "OVS204" in refused(LLAMA, "--data", str(empty))
    assert "OVS204" in refused(LLAMA, "--data", str(rubbish))
    assert "OVS204" in refused(LLAMA, "--data", str(tmp_path / "missing.jsonl"))


def test_every_optimizer_of_the_table_is_a_jobs_and_has_a_source() -> None:
    names = set(json.loads(json.dumps(_optimizer_names())))
    for framework in ("trl", "axolotl", "deepspeed", "torchtitan", "megatron", "llm_foundry", "overspill"):
        known = optimizers_of(framework)
        assert known is not None
        assert set(known.names) <= names
        assert known.source
    assert optimizers_of("torch") is None


def _optimizer_names() -> list[str]:
    from typing import get_args

    from overspill.job.core import OptimizerName

    return list(get_args(OptimizerName))


def test_a_forecast_starts_without_torch_numpy_or_yaml() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from overspill.cli.main import app;"
        f"CliRunner().invoke(app, ['forecast', '{LLAMA}', '--method', 'lora', '--gpu', 'rtx4090']);"
        "print([m for m in ('torch', 'numpy', 'yaml', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
