"""From files to datasets: token files, their reuse, the held-out part, and every mistake by file and line."""

from __future__ import annotations

import errno
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from overspill.errors import OverspillError
from overspill.job import DataConfig
from overspill.train.data import SequenceDataset, prepare_data
from overspill.train.data.store import DataFacts, token_dtype
from overspill.train.data.tokenise import Tokeniser
from testing.peak import measure_peak_nbytes
from testing.tiny import TINY_ASSETS, TINY_PLAY

EOS = 2
CHAT_ROWS = [
    {"messages": [{"role": "user", "content": f"Count to {n}."}, {"role": "assistant", "content": "1 " * n}]}
    for n in range(1, 30)
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_ASSETS)


def _jsonl(file: Path, rows: list) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def test_a_play_becomes_sequences_that_are_its_tokens_in_order(tmp_path, tokenizer):
    prepared = prepare_data(DataConfig(path=str(TINY_PLAY), seq_len=64), tokenizer, tmp_path / "data")
    whole = [*tokenizer(TINY_PLAY.read_text(), verbose=False).input_ids, EOS]
    stored = torch.cat([prepared.train[i]["input_ids"] for i in range(len(prepared.train))]).tolist()
    assert stored == whole[: len(whole) // 64 * 64]
    assert prepared.facts.dropped_tokens == len(whole) % 64
    item = prepared.train[3]
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert torch.equal(item["input_ids"], item["labels"])
    assert prepared.evaluation is None and not prepared.reused


def test_several_files_are_several_documents(tmp_path, tokenizer):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"Enter {name}. " * 20)
    config = DataConfig(path=(str(tmp_path / "a.txt"), str(tmp_path / "b.txt")), seq_len=8)
    prepared = prepare_data(config, tokenizer, tmp_path / "data")
    stored = torch.cat([prepared.train[i]["input_ids"] for i in range(len(prepared.train))]).tolist()
    assert stored.count(EOS) >= 1
    assert "b.txt" in tokenizer.decode(stored[stored.index(EOS) :])
    assert prepared.facts.rows_by_kind == {"text": 2}


def test_padded_micro_batches_hide_the_padding_from_attention_and_loss(tmp_path, tokenizer):
    config = DataConfig(path=_jsonl(tmp_path / "c.jsonl", CHAT_ROWS), seq_len=64, packing=False)
    dataset = prepare_data(config, tokenizer, tmp_path / "data").train
    assert len(dataset) == len(CHAT_ROWS)
    batch = dataset.collate([dataset[0], dataset[5]])
    lengths = [len(dataset[0]["input_ids"]), len(dataset[5]["input_ids"])]
    assert lengths[0] < lengths[1]
    assert batch["input_ids"].shape[1] == -(-lengths[1] // 8) * 8
    for row, length in enumerate(lengths):
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (batch["input_ids"].shape[1] - length)
        assert (batch["labels"][row, length:] == -100).all()
        assert (batch["input_ids"][row, length:] == tokenizer.pad_token_id).all()
        answer = batch["labels"][row][batch["labels"][row] != -100]
        assert tokenizer.decode(answer) == "1 " * (1 if row == 0 else 6) + "<|im_end|>"


def test_packed_conversations_count_answers_only(tmp_path, tokenizer):
    config = DataConfig(path=_jsonl(tmp_path / "c.jsonl", CHAT_ROWS), seq_len=64)
    prepared = prepare_data(config, tokenizer, tmp_path / "data")
    for i in range(len(prepared.train)):
        item = prepared.train[i]
        assert len(item["input_ids"]) == 64
        counted = item["labels"] != -100
        assert torch.equal(item["labels"][counted], item["input_ids"][counted]) and counted[1:].any()
        assert "Count" not in tokenizer.decode(item["labels"][counted])


def test_sequences_without_a_counted_label_are_left_out_and_counted(tmp_path, tokenizer):
    rows = [{"prompt": "Hail " * 100, "completion": "king"}, {"prompt": "Hail ", "completion": "king " * 40}]
    prepared = prepare_data(
        DataConfig(path=_jsonl(tmp_path / "c.jsonl", rows), seq_len=32), tokenizer, tmp_path / "data"
    )
    assert prepared.facts.unlabelled_tokens > 0
    assert all((prepared.train[i]["labels"][1:] != -100).any() for i in range(len(prepared.train)))


def test_rows_that_are_left_out_are_said_one_sentence_for_each_kind(tmp_path, tokenizer):
    rows = [{"prompt": "Hail ", "completion": "" if n < 95 else "king " * 40} for n in range(100)]
    packed = DataConfig(path=_jsonl(tmp_path / "a.jsonl", rows), seq_len=32)
    assert prepare_data(packed, tokenizer, tmp_path / "a").notes == ("95 of 100 rows have no answer and are left out.",)
    assert prepare_data(packed, tokenizer, tmp_path / "a").notes[0].startswith("95 of 100")  # reused

    rows = [{"text": ""}, {"text": "Hail, king! " * 30}, {"question": "Who?", "answer": " "}]
    notes = prepare_data(
        DataConfig(path=_jsonl(tmp_path / "b.jsonl", rows), seq_len=32), tokenizer, tmp_path / "b"
    ).notes
    assert notes == ("1 of 3 rows has no answer and is left out.", "1 of 3 rows has no text and is left out.")

    rows = [{"prompt": "Hail " * 50, "completion": "king"}] * 3 + [{"prompt": "Hail ", "completion": "king " * 60}]
    config = DataConfig(path=_jsonl(tmp_path / "c.jsonl", rows), seq_len=32, packing=False)
    cut, unlabelled = prepare_data(config, tokenizer, tmp_path / "c").notes
    assert cut.startswith("4 of 4 rows are longer than data.seq_len = 32 tokens and are cut off there;")
    assert unlabelled.startswith("3 of 4 rows have no token that the loss counts within data.seq_len = 32 tokens")
    packed = config.model_copy(update={"packing": True})
    (said,) = prepare_data(packed, tokenizer, tmp_path / "d").notes
    assert "sequences have no token that the loss counts and are left out." in said


def test_token_files_are_reused_only_when_nothing_that_matters_has_changed(tmp_path, tokenizer):
    text = tmp_path / "play.txt"
    shutil.copyfile(TINY_PLAY, text)
    config = DataConfig(path=str(text), seq_len=64)
    first = prepare_data(config, tokenizer, tmp_path / "data")
    again = prepare_data(config.model_copy(update={"shuffle": False, "num_workers": 2}), tokenizer, tmp_path / "data")
    assert again.reused and again.facts == first.facts
    moved = tmp_path / "moved.txt"
    text.rename(moved)
    config = config.model_copy(update={"path": str(moved)})
    assert prepare_data(config, tokenizer, tmp_path / "data").reused
    with moved.open("r+") as file:
        file.write("m")  # a byte of the same length
    changed = prepare_data(config, tokenizer, tmp_path / "data")
    assert not changed.reused and changed.facts.key != first.facts.key
    assert not prepare_data(config.model_copy(update={"seq_len": 32}), tokenizer, tmp_path / "data").reused
    other = AutoTokenizer.from_pretrained(TINY_ASSETS)
    other.chat_template = "{{ messages }}"
    assert not prepare_data(config.model_copy(update={"seq_len": 32}), other, tmp_path / "data").reused


@pytest.mark.parametrize("damage", ["truncate", "no index", "bad index", "killed"])
def test_half_written_token_files_are_not_believed(tmp_path, tokenizer, damage):
    config = DataConfig(path=str(TINY_PLAY), seq_len=64)
    first = prepare_data(config, tokenizer, tmp_path / "data")
    expected = first.train[7]["input_ids"]
    if damage == "truncate":
        with (tmp_path / "data" / "tokens.bin").open("r+b") as file:
            file.truncate(1000)
    elif damage == "no index":
        (tmp_path / "data" / "index.json").unlink()
    elif damage == "bad index":
        (tmp_path / "data" / "index.json").write_text('{"format": 1')
    else:
        (tmp_path / "data").rename(tmp_path / ".data.partial")
    again = prepare_data(config, tokenizer, tmp_path / "data")
    assert not again.reused and torch.equal(again.train[7]["input_ids"], expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def _flip(file: Path, at: int, bit: int = 1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= bit
    file.write_bytes(data)


TOKEN_DAMAGE = {
    "a token": lambda d: _flip(d / "tokens.bin", 100),
    "what counts": lambda d: _flip(d / "counted.bin", 100),
    "an offset": lambda d: _flip(d / "offsets.bin", 8 * 20 + 1),
    "a missing file": lambda d: (d / "counted.bin").unlink(),
    "a longer file": lambda d: (d / "offsets.bin").write_bytes((d / "offsets.bin").read_bytes() + b"12345678"),
}


@pytest.mark.parametrize("what", TOKEN_DAMAGE)
def test_damaged_token_files_are_made_anew_from_the_text_or_refused_by_name(tmp_path, tokenizer, what):
    text = tmp_path / "play.txt"
    shutil.copyfile(TINY_PLAY, text)
    config = DataConfig(path=str(text), seq_len=64)
    first = prepare_data(config, tokenizer, tmp_path / "data")
    whole = {file.name: file.read_bytes() for file in (tmp_path / "data").iterdir()}
    TOKEN_DAMAGE[what](tmp_path / "data")
    damaged = next(name for name in whole if _content(tmp_path / "data" / name) != whole[name])
    text.rename(tmp_path / "away.txt")
    with pytest.raises(OverspillError, match=rf"OVS404.*{damaged}.*play.txt back"):
        prepare_data(config, tokenizer, tmp_path / "data", expected_key=first.facts.key)
    (tmp_path / "away.txt").rename(text)
    again = prepare_data(config, tokenizer, tmp_path / "data", expected_key=first.facts.key)
    assert not again.reused and again.facts == first.facts
    assert len(again.notes) == 1 and damaged in again.notes[0] and "made anew" in again.notes[0]
    assert {file.name: file.read_bytes() for file in (tmp_path / "data").iterdir()} == whole


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


def test_a_flipped_bit_in_the_index_is_noticed(tmp_path, tokenizer):
    config = DataConfig(path=str(TINY_PLAY), seq_len=64)
    first = prepare_data(config, tokenizer, tmp_path / "data")
    index = tmp_path / "data" / "index.json"
    index.write_text(index.read_text().replace('"pad_token": 0', '"pad_token": 1'))
    again = prepare_data(config, tokenizer, tmp_path / "data", expected_key=first.facts.key)
    assert not again.reused and again.facts == first.facts and "index" in again.notes[0]


def test_damaged_token_files_are_not_replaced_by_other_tokens(tmp_path, tokenizer, monkeypatch):
    config = DataConfig(path=str(TINY_PLAY), seq_len=64)
    key = prepare_data(config, tokenizer, tmp_path / "data").facts.key
    _flip(tmp_path / "data" / "tokens.bin", 100)
    before = (tmp_path / "data" / "tokens.bin").read_bytes()
    encode = Tokeniser.encode  # of another release of tokenizers, say
    monkeypatch.setattr(Tokeniser, "encode", lambda self, text: [7, *encode(self, text)])
    with pytest.raises(OverspillError, match=r"OVS602.*other tokens"):
        prepare_data(config, tokenizer, tmp_path / "data", expected_key=key)
    assert (tmp_path / "data" / "tokens.bin").read_bytes() == before


def test_token_files_of_a_version_without_checksums_are_taken(tmp_path, tokenizer):
    config = DataConfig(path=str(TINY_PLAY), seq_len=64)
    first = prepare_data(config, tokenizer, tmp_path / "data")
    index = tmp_path / "data" / "index.json"
    later = ("checksum", "digests", "skipped_by_kind", "cut_rows", "unlabelled_rows")
    index.write_text(json.dumps({k: v for k, v in json.loads(index.read_text()).items() if k not in later}))
    again = prepare_data(config, tokenizer, tmp_path / "data", expected_key=first.facts.key)
    assert again.reused and again.notes == ()


def test_a_disk_that_fills_up_is_named_and_nothing_half_written_stays(tmp_path, tokenizer, monkeypatch):
    import os

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OverspillError) as caught:
        prepare_data(DataConfig(path=str(TINY_PLAY), seq_len=64), tokenizer, tmp_path / "data")
    assert caught.value.code == "OVS401"
    assert list(tmp_path.iterdir()) == []


# The held-out part


def _dataset(sequences: int, held_out: int, part: str) -> SequenceDataset:
    facts = DataFacts("k", "s", 8, True, 0, "uint16", sequences, 8 * sequences, 0, 1, {}, 0, 0, 0)
    return SequenceDataset(Path("unused"), facts, held_out=held_out, part=part)  # type: ignore[arg-type]


@given(data=st.data())
def test_training_and_held_out_sequences_are_all_and_none_twice(data):
    sequences = data.draw(st.integers(2, 400))
    held_out = data.draw(st.integers(0, sequences - 1))
    train, held = _dataset(sequences, held_out, "train"), _dataset(sequences, held_out, "eval")
    numbers = [part.sequence_number(i) for part in (train, held) for i in range(len(part))]
    assert sorted(numbers) == list(range(sequences)) and len(held) == held_out
    ordered = [train.sequence_number(i) for i in range(len(train))]
    assert ordered == sorted(ordered)
    with pytest.raises(IndexError):
        train.sequence_number(len(train))


def test_held_out_sequences_are_spread_over_the_text(tmp_path, tokenizer):
    config = DataConfig(path=str(TINY_PLAY), seq_len=64, eval_fraction=0.1)
    prepared = prepare_data(config, tokenizer, tmp_path / "data")
    assert prepared.evaluation is not None
    total = prepared.facts.sequences
    assert len(prepared.evaluation) == round(total * 0.1)
    numbers = [prepared.evaluation.sequence_number(i) for i in range(len(prepared.evaluation))]
    assert np.diff(numbers).max() <= 11 and numbers[0] < 10 and numbers[-1] > total - 11


def test_a_pickled_dataset_reads_the_same(tmp_path, tokenizer):
    dataset = prepare_data(DataConfig(path=str(TINY_PLAY), seq_len=64), tokenizer, tmp_path / "data").train
    first = dataset[0]
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 2000 and torch.equal(copy[0]["input_ids"], first["input_ids"])


def test_vocabularies_above_16_bits_get_wider_tokens():
    assert token_dtype(65_536) == np.uint16 and token_dtype(65_537) == np.int32


def test_preparing_a_long_text_takes_little_memory(tmp_path):
    text = tmp_path / "long.txt"
    text.write_text(TINY_PLAY.read_text() * 10)  # 1 MB, 410,000 tokens
    before = f"""
from transformers import AutoTokenizer
from overspill.job import DataConfig
from overspill.train.data import prepare_data
tokenizer = AutoTokenizer.from_pretrained({str(TINY_ASSETS)!r})
config = DataConfig(path={str(text)!r}, seq_len=128)
tokenizer("warm up")
"""
    windows, whole = measure_peak_nbytes(
        before,
        f"assert prepare_data(config, tokenizer, {str(tmp_path / 'data')!r}).facts.tokens > 400_000",
        f"tokenizer(open({str(text)!r}).read(), verbose=False)",
    )
    print(windows / 2**20, whole / 2**20)
    assert windows < 32 * 2**20
    assert whole > 3 * windows  # in one piece it takes this much


# Mistakes


def _refused(path, tokenizer, tmp_path, **settings) -> OverspillError:
    with pytest.raises(OverspillError) as caught:
        prepare_data(DataConfig(path=path, **{"seq_len": 16, **settings}), tokenizer, tmp_path / "data")
    assert not (tmp_path / "data").exists() and not (tmp_path / ".data.partial").exists()
    return caught.value


LINES = {
    "no JSON": ('{"text": "a"}\n{"text": \n', 2, "no JSON"),
    "an array": ("\n\n[1, 2]\n", 3, "no JSON object"),
    "no known key": ('{"body": "a"}\n', 1, "it holds body"),
    "a number as text": ('{"text": 5}\n', 1, '"text" is no text'),
    "messages as text": ('{"messages": "hi"}\n', 1, "no list of messages"),
    "no messages": ('{"messages": []}\n', 1, "no list of messages"),
    "a message without role": ('{"messages": [{"content": "hi"}]}\n', 1, "role"),
    "no assistant": ('{"messages": [{"role": "user", "content": "hi"}]}\n', 1, "no assistant"),
    "deep nesting": ("[" * 200_000 + "\n", 1, "JSON"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, tokenizer, name):
    content, line, said = LINES[name]
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    error = _refused(str(file), tokenizer, tmp_path)
    assert error.code == "OVS204" and error.field == f"{file}:{line}" and said in error.message


def test_a_format_that_is_asked_for_is_kept_to(tmp_path, tokenizer):
    file = _jsonl(tmp_path / "rows.jsonl", [{"text": "a"}])
    for kind, wanted in (("chat", '"messages"'), ("completion", '"prompt" and "completion"')):
        error = _refused(file, tokenizer, tmp_path, format=kind)
        assert error.code == "OVS204" and wanted in error.next_step


def test_files_that_hold_nothing_usable_are_named(tmp_path, tokenizer):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    (tmp_path / "white.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes("Café ".encode("latin-1") * 50)
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "Caf\xe9"}\n')
    (tmp_path / "data.csv").write_text("a,b\n")
    cases = {
        "missing.txt": "does not exist",
        "empty.txt": "is empty",
        "blank.jsonl": "no usable row",
        "latin.txt": "not UTF-8",
        "latin.jsonl": "not UTF-8",
        "data.csv": ".txt or .jsonl",
        ".": "no file",
    }
    for name, said in cases.items():
        error = _refused(str(tmp_path / name), tokenizer, tmp_path)
        assert error.code == "OVS204" and said in error.message, name


def test_too_little_text_is_told_in_tokens(tmp_path, tokenizer):
    (tmp_path / "short.txt").write_text("Hail, king!")
    error = _refused(str(tmp_path / "short.txt"), tokenizer, tmp_path, seq_len=100)
    tokens = len(tokenizer("Hail, king!").input_ids) + 1
    assert error.code == "OVS204" and f"{tokens} tokens" in error.message and "100" in error.message


def test_data_that_is_all_prompt_is_refused(tmp_path, tokenizer):
    file = _jsonl(tmp_path / "rows.jsonl", [{"prompt": "Hail " * 50, "completion": "king"}])
    error = _refused(file, tokenizer, tmp_path, packing=False)
    assert error.code == "OVS204" and "train_on_prompt" in error.next_step


def test_sequences_longer_than_the_models_positions_are_refused_first(tmp_path, tokenizer):
    with pytest.raises(OverspillError) as caught:
        prepare_data(DataConfig(path="missing.txt", seq_len=257), tokenizer, tmp_path / "data", max_positions=256)
    assert (caught.value.code, caught.value.value, caught.value.limit) == ("OVS205", 257, 256)


def test_nothing_can_be_held_out_of_one_sequence(tmp_path, tokenizer):
    (tmp_path / "short.txt").write_text("Hail, king! " * 5)
    config = DataConfig(path=str(tmp_path / "short.txt"), seq_len=16, eval_fraction=0.5)
    with pytest.raises(OverspillError, match="one sequence only") as caught:
        prepare_data(config, tokenizer, tmp_path / "data")
    assert caught.value.code == "OVS204"


def test_the_token_files_of_a_run_are_not_replaced_by_others(tmp_path, tokenizer):
    text = tmp_path / "play.txt"
    shutil.copyfile(TINY_PLAY, text)
    config = DataConfig(path=str(text), seq_len=64)
    key = prepare_data(config, tokenizer, tmp_path / "data").facts.key
    before = (tmp_path / "data" / "tokens.bin").read_bytes()
    text.write_text(text.read_text() + "more")
    with pytest.raises(OverspillError, match="OVS602"):
        prepare_data(config, tokenizer, tmp_path / "data", expected_key=key)
    text.unlink()
    with pytest.raises(OverspillError, match="OVS602"):
        prepare_data(config.model_copy(update={"seq_len": 32}), tokenizer, tmp_path / "data", expected_key=key)
    kept = prepare_data(config, tokenizer, tmp_path / "data", expected_key=key)
    assert kept.reused and kept.facts.key == key and "play.txt is no longer there" in kept.notes[0]
    assert (tmp_path / "data" / "tokens.bin").read_bytes() == before
    (tmp_path / "data" / "index.json").unlink()
    with pytest.raises(OverspillError, match=r"OVS204.*does not exist"):
        prepare_data(config, tokenizer, tmp_path / "data", expected_key=key)
