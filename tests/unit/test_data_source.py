"""From any position the same micro-batches follow, with any number of workers, and torch's generator stays put."""

from __future__ import annotations

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from overspill.errors import OverspillError
from overspill.job import DataConfig
from overspill.train.data import BatchSource, PreparedData, eval_batches, prepare_data, steps_in
from testing.tiny import TINY_ASSETS, TINY_PLAY


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> PreparedData:
    text = tmp_path_factory.mktemp("source") / "part.txt"
    text.write_text(TINY_PLAY.read_text()[:6000])
    config = DataConfig(path=str(text), seq_len=32, eval_fraction=0.1)
    return prepare_data(config, AutoTokenizer.from_pretrained(TINY_ASSETS), text.parent / "data")


def _source(prepared: PreparedData, **options) -> BatchSource:
    return BatchSource(prepared.train, **{"micro_batch": 3, "seed": 4, **options})


def _take(source: BatchSource, count: int) -> list[list[int]]:
    return [next(source)["input_ids"].flatten().tolist() for _ in range(count)]


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    micro_batch=st.integers(1, 9),
    shuffle=st.booleans(),
)
def test_a_run_cut_anywhere_sees_the_batches_of_an_uncut_one(prepared, cuts, micro_batch, shuffle):
    options = {"micro_batch": micro_batch, "shuffle": shuffle}
    uncut = _take(_source(prepared, **options), sum(cuts))
    pieces: list[list[int]] = []
    state = None
    for cut in cuts:
        source = _source(prepared, **options)
        if state is not None:
            source.load_state_dict(json.loads(json.dumps(state)))
        pieces += _take(source, cut)
        state = source.state_dict()
    assert pieces == uncut
    assert state is not None and state["consumed"] == sum(cuts)


@pytest.mark.parametrize("cut", [1, 7, 26])
def test_what_workers_have_read_ahead_does_not_count(prepared, cut):
    expected = _take(_source(prepared), 40)
    before = _source(prepared, num_workers=2)
    got = _take(before, cut)
    state = before.state_dict()
    assert state["consumed"] == cut
    before.close()
    after = _source(prepared, num_workers=0 if cut == 7 else 2)
    after.load_state_dict(state)
    got += _take(after, 40 - cut)
    after.close()
    assert got == expected


def test_closing_ends_the_workers_and_the_next_batch_goes_on(prepared):
    expected = _take(_source(prepared), 8)
    source = _source(prepared, num_workers=2)
    got = _take(source, 4)
    workers = [worker.pid for worker in source._batches._workers]
    assert len(workers) == 2
    source.close()
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert got + _take(source, 4) == expected
    source.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_drawing_batches_leaves_torchs_generator_alone(prepared, num_workers):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    source = _source(prepared, num_workers=num_workers)
    _take(source, 3)
    source.close()
    assert torch.equal(torch.get_rng_state(), state)


def test_every_sequence_comes_once_an_epoch_and_each_epoch_in_another_order(prepared):
    n = len(prepared.train)
    source = _source(prepared, micro_batch=1)
    epochs = [_take(source, n) for _ in range(2)]
    everything = sorted(prepared.train[i]["input_ids"].tolist() for i in range(n))
    assert sorted(epochs[0]) == sorted(epochs[1]) == everything and epochs[0] != epochs[1]
    assert source.epoch == 2


def test_a_source_with_an_end_stops_there_also_after_a_resume(prepared):
    source = _source(prepared, micro_batches=5)
    assert len(list(source)) == 5 and next(source, None) is None
    again = _source(prepared, micro_batches=5)
    again.load_state_dict({**source.state_dict(), "consumed": 3})
    assert len(list(again)) == 2
    parallel = _source(prepared, micro_batches=5, num_workers=2)
    assert len(list(parallel)) == 5


@pytest.mark.parametrize("change", [{"micro_batch": 2}, {"seed": 5}, {"shuffle": False}])
def test_a_position_in_another_order_is_refused_by_name(prepared, change):
    state = _source(prepared).state_dict()
    with pytest.raises(OverspillError) as caught:
        _source(prepared, **change).load_state_dict(state)
    assert caught.value.code == "OVS602" and caught.value.field == next(iter(change))


def test_a_position_in_other_data_is_refused(prepared):
    state = {**_source(prepared).state_dict(), "data": "another key"}
    with pytest.raises(OverspillError, match="data files") as caught:
        _source(prepared).load_state_dict(state)
    assert caught.value.code == "OVS602"


def test_evaluation_goes_through_the_held_out_part_each_time(prepared):
    held_out = prepared.evaluation
    assert held_out is not None and len(held_out) % 3 != 0
    batches = eval_batches(held_out, 3)
    rounds = [[row for batch in batches() for row in batch["input_ids"].tolist()] for _ in range(2)]
    assert rounds[0] == rounds[1] == [held_out[i]["input_ids"].tolist() for i in range(len(held_out))]


def test_steps_cover_the_epochs(prepared):
    n = len(prepared.train)
    assert steps_in(prepared.train, epochs=1, micro_batch=n, accumulation=1) == 1
    assert steps_in(prepared.train, epochs=2, micro_batch=1, accumulation=1) == 2 * n
    assert steps_in(prepared.train, epochs=1, micro_batch=2, accumulation=4) == -(-n // 8)
    assert steps_in(prepared.train, epochs=0.001, micro_batch=64, accumulation=1) == 1
