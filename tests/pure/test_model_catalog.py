"""The bundled catalogue of models: counts, lookup by name, and a shape of a given size."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.catalog import models as catalog
from overspill.catalog.models import every_model, find_model, model_names, nearest_names
from overspill.errors import OverspillError
from overspill.model import ModelShape, read_model, shape_of_size

ROWS = tuple(every_model())


def test_there_are_at_least_three_hundred_models_and_no_name_twice() -> None:
    names = [name.lower() for row in ROWS for name in (row.name, *row.also)]
    assert len(ROWS) >= 300 and len(names) == len(set(names)) and len(model_names()) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_the_computed_count_of_a_model_is_the_stated_one(row: catalog.CatalogModel) -> None:
    assert ModelShape.from_config(row.config).total_numel == row.numel


def test_every_row_names_its_source_and_says_why_another_figure_differs() -> None:
    for row in ROWS:
        assert row.source and row.confidence in ("A", "B", "A/B"), row.name
        assert row.published is None or row.note, row.name


def test_most_counts_are_confirmed_by_a_published_figure() -> None:
    assert sum(bool(row.figure) for row in ROWS) >= 280


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("qwen/qwen2.5-7b", "Qwen/Qwen2.5-7B"),
        ("qwen2.5-7b", "Qwen/Qwen2.5-7B"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B"),
        ("Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B"),
        ("gpt2", "openai-community/gpt2"),
    ],
)
def test_a_model_is_found_in_any_case_and_without_its_organisation(written: str, found: str) -> None:
    model = find_model(written)
    assert model is not None and model.name == found
    assert read_model(written).source == "catalogue"


def test_a_name_that_two_organisations_use_is_refused_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"id": f"{owner}/same", "config": {}, "source": "s", "confidence": "A", "numel": 1} for owner in "ab"]
    file = tmp_path / "models.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(catalog, "_FILE", file)
    catalog._index.cache_clear()
    try:
        with pytest.raises(OverspillError, match="a/same, b/same") as caught:
            find_model("same")
        assert caught.value.code == "OVS201"
    finally:
        monkeypatch.undo()
        catalog._index.cache_clear()


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Meta-Llama-3.1-8B"),
        ("TheBloke/Mistral-7B-v0.1-GPTQ", "mistralai/Mistral-7B-v0.1"),
        ("NousResearch/Llama-2-70b-hf", "meta-llama/Llama-2-70b-hf"),
        ("google/gemma-2-9b-it", "google/gemma-2-9b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B"),
    ],
)
def test_a_copy_or_a_tuned_release_is_taken_for_its_model_and_the_note_says_so(
    written: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = read_model(written)
    assert found.name == name and found.source == "catalogue" and written in found.note


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OverspillError, match=r"Meta-Llama-3\.1-8B") as caught:
        read_model("meta-llama/Lama-3.1-8B")
    assert caught.value.code == "OVS201"
    assert nearest_names("mistral-7b")[0].startswith("mistral")


def test_a_file_comes_before_a_directory_the_catalogue_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dict(ROWS[0].config) | {"num_hidden_layers": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert read_model(file).source == "file" and read_model(file).config == config
    assert read_model(str(tmp_path)).source == "directory"
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    found = read_model("org/tiny")
    assert found.source == "hub cache" and found.shape.facts is not None and found.shape.facts.text.layers == 2


def test_loading_a_model_takes_less_than_20_ms() -> None:
    read_model("gpt2").shape.total_numel  # noqa: B018 - what is read once a process: the file, the defaults, a family's code
    for name in (
        "meta-llama/Llama-2-70b-hf",
        "deepseek-ai/DeepSeek-V3",
        "bigscience/bloom",
        "Qwen/Qwen2.5-VL-72B-Instruct",
    ):
        seconds = []
        for _ in range(5):
            catalog._index.cache_clear()
            start = time.perf_counter()
            assert read_model(name).shape.total_numel > 68e9
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.020, (name, seconds)


@settings(deadline=None)
@given(st.integers(50 * 10**6, 2 * 10**12))
def test_a_shape_of_a_size_has_that_size_within_one_percent(numel: int) -> None:
    made = shape_of_size(numel)
    assert made.shape.total_numel == pytest.approx(numel, rel=0.01 if numel >= 200 * 10**6 else 0.015)
    heads, kv_heads = made.config["num_attention_heads"], made.config["num_key_value_heads"]
    assert heads % kv_heads == 0 and made.config["hidden_size"] == heads * made.config["head_dim"]


def test_a_shape_of_a_size_says_what_it_assumed() -> None:
    made = shape_of_size(8 * 10**9)
    assert len(made.assumptions) == 6 and all(sentence.endswith(".") for sentence in made.assumptions)
    text = " ".join(made.assumptions)
    assert str(made.config["vocab_size"]) in text and "Llama" in text
    # The real 8B models are this deep and wide.
    assert (made.config["num_hidden_layers"], made.config["hidden_size"]) == (32, 4096)


@pytest.mark.parametrize("numel", [0, -1, 10**6, 10**14])
def test_a_size_that_is_no_models_is_refused(numel: int) -> None:
    with pytest.raises(OverspillError) as caught:
        shape_of_size(numel)
    assert caught.value.code == "OVS201"
