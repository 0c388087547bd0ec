"""The catalogue's script: what it takes from a directory of facts, what it leaves out, and what it says about that."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from overspill.model import ModelShape

TOOL = Path(__file__).parents[2] / "tools" / "make_model_catalog.py"
SIZES = {
    "vocab_size": 136, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "bos_token_id": 1,
}  # fmt: skip
COUNT = ModelShape.from_config(SIZES | {"model_type": "llama"}).total_numel


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location("make_model_catalog", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def facts(folder: Path, *rows: dict[str, str], config: dict[str, Any] | None = None) -> Path:
    columns = [
        "hf_id",
        "n_params_exact",
        "published_figure",
        "published_source",
        "match",
        "built_with",
        "source",
        "confidence",
        "notes",
        "tied_embeddings",
        "hidden_size",
        "intermediate_size",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "vocab_size",
        "max_positions",
    ]
    with (folder / "models.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    built = {"model_type": "llama", "built_as": "llama", "config": SIZES if config is None else config}
    (folder / "models_build_configs.json").write_text(json.dumps({row["hf_id"]: built for row in rows}))
    return folder


def row(name: str = "org/tiny", **changes: str) -> dict[str, str]:
    return {
        "hf_id": name, "n_params_exact": str(COUNT), "published_figure": str(COUNT), "published_source": "card",
        "match": "exact", "built_with": "LlamaForCausalLM", "source": "config", "confidence": "A", **changes,
    }  # fmt: skip


def made(tool: Any, folder: Path) -> tuple[list[dict[str, Any]], dict[str, list[str]]]:
    text, left_out = tool.catalogue(folder, "2026-01-02")
    header, *lines = (json.loads(line) for line in text.splitlines())
    assert header == {"catalogue": "models", "collected": "2026-01-02"}
    return [line for line in lines if line["id"].startswith("org/")], left_out


def test_a_model_is_taken_with_its_source_its_figure_and_the_keys_that_matter(tool: Any, tmp_path: Path) -> None:
    (line,), left_out = made(tool, facts(tmp_path, row()))
    assert (line["numel"], line["figure"], line["source"]) == (COUNT, "card", "config") and not left_out
    assert line["config"]["hidden_size"] == 64 and "bos_token_id" not in line["config"]
    assert "published" not in line and "note" not in line


def test_a_count_that_does_not_follow_from_the_config_is_left_out(tool: Any, tmp_path: Path) -> None:
    lines, left_out = made(tool, facts(tmp_path, row(n_params_exact=str(COUNT + 1))))
    assert lines == [] and list(left_out.values()) == [["org/tiny"]]
    assert str(COUNT) in next(iter(left_out))


def test_a_figure_that_differs_is_kept_with_the_reason(tool: Any, tmp_path: Path) -> None:
    changes = {"published_figure": "5", "match": "explained", "notes": "stored frequencies"}
    (line,), _ = made(tool, facts(tmp_path, row(**changes)))
    assert (line["published"], line["note"]) == (5, "stored frequencies") and "figure" not in line


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"match": "differs", "published_figure": "5"}, "two figures differ"),
        ({"match": "differs", "published_figure": "5", "confidence": "B"}, "recalled"),
        ({"match": "differs-mtp", "published_figure": "5"}, "multi-token"),
        ({"n_params_exact": ""}, "no exact count"),
        ({"hf_id": "org/tiny (part)"}, "no hub id"),
    ],
)
def test_what_is_not_resolved_is_left_out(tool: Any, tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    lines, left_out = made(tool, facts(tmp_path, row() | changes))
    assert lines == [] and reason in next(iter(left_out))


def test_sizes_that_a_row_leaves_out_are_its_classes_defaults(tool: Any, tmp_path: Path) -> None:
    short = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    count = ModelShape.from_config(SIZES | {"model_type": "llama", "intermediate_size": 11008}).total_numel
    (line,), _ = made(tool, facts(tmp_path, row(n_params_exact=str(count), published_figure=""), config=short))
    assert line["config"]["intermediate_size"] == 11008


def test_the_script_says_what_it_left_out_and_that_the_file_would_differ(tmp_path: Path) -> None:
    folder = facts(tmp_path, row(n_params_exact=str(COUNT + 1)))
    command = [sys.executable, str(TOOL), str(folder), "--collected", "2026-01-02", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "org/tiny" in done.stdout
