"""Packing and padding lose no token unseen, keep masks on their tokens, and cut where they should."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overspill.train.data.pack import Packer, Padder

# A document is a list of parts; a part is a list of (token, counted).
TOKEN = st.tuples(st.integers(0, 9), st.booleans())
DOCUMENTS = st.lists(st.lists(st.lists(TOKEN, max_size=9), max_size=4), max_size=8)


def _run(packer, documents, *, divisible=True):
    sequences = []
    for document in documents:
        for part in document:
            tokens = np.array([token for token, _ in part], dtype=np.int64)
            counted = np.array([flag for _, flag in part], dtype=bool)
            sequences += packer.add(tokens, counted)
        sequences += packer.end_document(divisible=divisible)
    packer.finish()
    return [list(zip(tokens.tolist(), counted.tolist(), strict=True)) for tokens, counted in sequences]


def _counts_something(sequence) -> bool:
    return any(flag for _, flag in sequence[1:])


@given(documents=DOCUMENTS, seq_len=st.integers(2, 7))
def test_packing_is_the_stream_of_documents_cut_every_seq_len_tokens(documents, seq_len):
    stream = [pair for document in documents for part in document for pair in part]
    cuts = [stream[i : i + seq_len] for i in range(0, len(stream) - seq_len + 1, seq_len)]
    packer = Packer(seq_len)
    assert _run(packer, documents) == [cut for cut in cuts if _counts_something(cut)]
    assert packer.dropped_tokens == len(stream) - seq_len * len(cuts)
    assert packer.unlabelled_tokens == seq_len * sum(not _counts_something(cut) for cut in cuts)


@given(documents=DOCUMENTS, seq_len=st.integers(2, 7))
def test_padding_divides_plain_text_without_losing_a_token(documents, seq_len):
    expected = []
    for document in documents:
        text = [pair for part in document for pair in part]
        expected += [text[i : i + seq_len] for i in range(0, len(text), seq_len)]
    padder = Padder(seq_len)
    sequences = _run(padder, documents)
    assert sequences == [cut for cut in expected if _counts_something(cut)]
    assert padder.dropped_tokens == 0
    assert padder.unlabelled_tokens == sum(len(cut) for cut in expected if not _counts_something(cut))


@given(documents=DOCUMENTS, seq_len=st.integers(2, 7))
def test_padding_cuts_examples_off_at_seq_len_and_counts_the_rest(documents, seq_len):
    texts = [[pair for part in document for pair in part] for document in documents]
    padder = Padder(seq_len)
    sequences = _run(padder, documents, divisible=False)
    assert sequences == [text[:seq_len] for text in texts if _counts_something(text[:seq_len])]
    assert padder.dropped_tokens == sum(max(0, len(text) - seq_len) for text in texts)
    kept = sum(len(sequence) for sequence in sequences)
    assert kept + padder.dropped_tokens + padder.unlabelled_tokens == sum(len(text) for text in texts)
