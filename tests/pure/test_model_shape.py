"""ModelShape without torch: errors, freezing, ties, reading config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overspill.errors import OverspillError
from overspill.model import ModelShape, read_config

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 128, "tie_word_embeddings": True, "max_position_embeddings": 256,
}  # fmt: skip


def test_a_tied_head_takes_no_memory_and_lies_in_its_owners_block() -> None:
    shape = ModelShape.from_config(LLAMA)
    head = shape.parameters[-1]
    assert (head.name, head.tied_to, head.block) == ("lm_head.weight", "model.embed_tokens.weight", 0)
    assert shape.total_numel == sum(p.numel for p in shape.parameters[:-1])
    assert "lm_head.weight" not in {p.name for block in shape.blocks() for p in block.parameters}


def test_an_unknown_family_is_refused_with_the_known_ones_and_the_way_out() -> None:
    with pytest.raises(OverspillError) as caught:
        ModelShape.from_config({"model_type": "rwkv"})
    assert caught.value.code == "OVS201"
    assert "rwkv" in str(caught.value) and "qwen2" in str(caught.value) and "attach" in str(caught.value)


def test_a_missing_size_is_named() -> None:
    with pytest.raises(OverspillError, match="hidden_size") as caught:
        ModelShape.from_config({key: value for key, value in LLAMA.items() if key != "hidden_size"})
    assert caught.value.code == "OVS201"


def test_frozen_parameters_are_no_longer_trained_and_their_blocks_hold_no_state() -> None:
    shape = ModelShape.from_config(LLAMA).freeze(["model.embed*", "model.layers.0.*"])
    assert [block.name for block in shape.blocks()] == ["model.layers.1", "head"]
    frozen = shape.blocks(trainable=False)
    assert [block.name for block in frozen] == ["embeddings", "model.layers.0"]
    assert shape.trainable_numel + sum(block.parameter_numel for block in frozen) == shape.total_numel


def test_a_freeze_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(OverspillError, match="matches no parameter"):
        ModelShape.from_config(LLAMA).freeze(["model.layer.0.*"])


def test_config_json_is_read_from_a_directory_or_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(str(tmp_path)) == LLAMA

    model = tmp_path / "hub" / "models--org--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "snapshots" / "abc" / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert read_config("org/tiny") == LLAMA


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_broken_config_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(OverspillError, match=r"config\.json") as caught:
        read_config(str(tmp_path))
    assert caught.value.code == "OVS201"


def test_a_model_that_is_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OverspillError, match="org/absent"):
        read_config("org/absent")
