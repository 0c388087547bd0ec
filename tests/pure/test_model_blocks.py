"""Blocks from names and shapes: the cut, the order, and the flat element layout that every state class shares."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.model import find_blocks
from overspill.model.blocks import BLOCK_ALIGN_NUMEL, PARAMETER_ALIGN_NUMEL


def names_by_block(names: list[str]) -> list[tuple[str, list[str]]]:
    return [(block.name, [p.name for p in block.parameters]) for block in find_blocks([(n, (3,)) for n in names])]


def test_a_decoder_is_cut_into_embeddings_layers_and_head() -> None:
    names = ["model.embed.weight", "model.layers.0.q.weight", "model.layers.0.k.weight", "model.layers.1.q.weight"]
    assert names_by_block([*names, "model.norm.weight", "lm_head.weight"]) == [
        ("embeddings", ["model.embed.weight"]),
        ("model.layers.0", ["model.layers.0.q.weight", "model.layers.0.k.weight"]),
        ("model.layers.1", ["model.layers.1.q.weight"]),
        ("head", ["model.norm.weight", "lm_head.weight"]),
    ]


def test_layers_follow_the_modules_order_and_not_the_alphabet() -> None:
    names = [f"h.{n}.w" for n in range(12)]
    assert [name for name, _ in names_by_block(names)] == [f"h.{n}" for n in range(12)]


def test_experts_inside_a_layer_do_not_split_it() -> None:
    names = ["m.layers.0.mlp.experts.0.w", "m.layers.0.mlp.experts.1.w", "m.layers.1.mlp.experts.0.w"]
    assert [name for name, _ in names_by_block(names)] == ["m.layers.0", "m.layers.1"]


def test_a_final_norm_defined_before_the_layers_still_runs_after_them() -> None:
    names = ["d.embed_tokens.weight", "d.final_layer_norm.weight", "d.layers.0.w", "d.layers.1.w"]
    assert names_by_block(names)[-1] == ("head", ["d.final_layer_norm.weight"])


def test_a_norm_of_the_embeddings_stays_with_them() -> None:
    names = ["t.word_embeddings.weight", "t.word_embeddings_layernorm.weight", "t.h.0.w", "t.ln_f.weight"]
    assert names_by_block(names)[0][1] == names[:2]


def test_an_encoder_and_a_decoder_keep_what_stands_between_them() -> None:
    names = ["shared.weight", "e.block.0.w", "e.block.1.w", "e.norm.w", "d.block.0.w", "d.norm.w", "lm_head.weight"]
    cut = [members for _, members in names_by_block(names)]
    assert cut == [["shared.weight"], ["e.block.0.w"], ["e.block.1.w"], ["e.norm.w"], ["d.block.0.w"], names[5:]]


def test_frozen_layers_leave_gaps_and_no_empty_blocks() -> None:
    assert [name for name, _ in names_by_block(["m.layers.7.w", "m.layers.30.w"])] == ["m.layers.7", "m.layers.30"]


def test_a_parameter_list_of_many_small_ones_is_one_block() -> None:
    assert len(find_blocks([(f"scales.{n}", (1,)) for n in range(5000)])) == 1


def test_a_module_without_layers_is_one_block() -> None:
    assert names_by_block(["weight", "bias"]) == [("embeddings", ["weight", "bias"])]


def test_no_parameters_are_no_blocks() -> None:
    assert find_blocks([]) == ()


def test_a_parameter_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        find_blocks([("w", (2,)), ("w", (2,))])


def test_given_groups_are_followed_and_must_be_complete() -> None:
    parameters = [("a", (2,)), ("b", (3,)), ("c", (4,))]
    blocks = find_blocks(parameters, [("second", ["c"]), ("none", ["frozen"]), ("first", ["b", "a"])])
    assert [(b.index, b.name, [p.name for p in b.parameters]) for b in blocks] == [
        (0, "second", ["c"]),
        (1, "first", ["b", "a"]),
    ]
    with pytest.raises(ValueError, match="exactly once"):
        find_blocks(parameters, [("first", ["a", "b"])])


name_part = st.sampled_from(["model", "layers", "h", "0", "1", "12", "mlp", "weight", "norm", "lm_head", "final"])
parameter_lists = st.lists(
    st.tuples(
        st.lists(name_part, min_size=1, max_size=5).map(".".join),
        st.lists(st.integers(0, 70), max_size=3).map(tuple),
    ),
    max_size=30,
    unique_by=lambda parameter: parameter[0],
)


@given(parameter_lists)
def test_every_parameter_lies_in_one_block_aligned_and_without_overlap(
    parameters: list[tuple[str, tuple[int, ...]]],
) -> None:
    blocks = find_blocks(parameters)
    assert sorted(p.name for b in blocks for p in b.parameters) == sorted(name for name, _ in parameters)
    shape_by_name = dict(parameters)
    for index, block in enumerate(blocks):
        assert block.index == index
        assert block.numel > 0 and block.numel % BLOCK_ALIGN_NUMEL == 0
        end = 0
        for parameter in block.parameters:
            assert parameter.shape == shape_by_name[parameter.name]
            assert parameter.numel == math.prod(parameter.shape)
            assert parameter.offset % PARAMETER_ALIGN_NUMEL == 0 and parameter.offset >= end
            end = parameter.offset + parameter.numel
        assert end <= block.numel
        assert len({block.name for block in blocks}) == len(blocks)
