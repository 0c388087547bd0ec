"""Tokens of documents to sequences: packed (no padding, several documents in one) or padded (one document each).

Pure: numpy arrays in, numpy arrays out, nothing is read or written. A document arrives in parts; each part has its
tokens and, for each token, whether the loss counts it. What cannot become a sequence is counted, never lost unseen.

[Note: Packing] Documents stand one behind the other, each ended by the end-of-text token, and are cut every seq_len
tokens, as in GPT-3 (Brown et al. 2020, section B). Attention and positions run across documents; the end-of-text
token tells the model. A sequence without a single counted label is left out: its mean loss would be 0/0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Counted", "Packer", "Padder", "Sequence", "Tokens"]

Tokens = npt.NDArray[np.int64]
Counted = npt.NDArray[np.bool_]
Sequence = tuple[Tokens, Counted]


def _has_label(counted: Counted) -> bool:
    return bool(counted[1:].any())  # position 0 is predicted from nothing


@dataclass
class Packer:
    """Cuts the stream of documents every ``seq_len`` tokens.

    dropped_tokens: of the incomplete sequence at the very end, after `finish`.
    unlabelled_tokens: of sequences in which no label counts.
    cut_documents, unlabelled_documents: none; a document is never dropped as one.
    """

    seq_len: int
    dropped_tokens: int = 0
    unlabelled_tokens: int = 0
    cut_documents: int = 0
    unlabelled_documents: int = 0
    _tokens: list[Tokens] = field(default_factory=list)
    _counted: list[Counted] = field(default_factory=list)
    _held: int = 0

    def add(self, tokens: Tokens, counted: Counted) -> Iterator[Sequence]:
        """Take a part of the current document; gives the sequences that are complete with it."""
        assert tokens.shape == counted.shape
        self._tokens.append(tokens)
        self._counted.append(counted)
        self._held += len(tokens)
        if self._held < self.seq_len:
            return
        all_tokens, all_counted = np.concatenate(self._tokens), np.concatenate(self._counted)
        whole = self._held - self._held % self.seq_len
        self._tokens, self._counted = [all_tokens[whole:]], [all_counted[whole:]]
        self._held -= whole
        for begin in range(0, whole, self.seq_len):
            cut = slice(begin, begin + self.seq_len)
            if _has_label(all_counted[cut]):
                yield all_tokens[cut], all_counted[cut]
            else:
                self.unlabelled_tokens += self.seq_len

    def end_document(self, *, divisible: bool) -> Iterator[Sequence]:
        """Nothing to do: the document's last token is its end-of-text token, the next document follows."""
        return iter(())

    def finish(self) -> None:
        self.dropped_tokens += self._held
        self._tokens, self._counted, self._held = [], [], 0


@dataclass
class Padder:
    """One sequence per document, of at most ``seq_len`` tokens; padding is added when a batch is made.

    A document that is longer is divided into several sequences if it is plain text, else cut off: the rest of an
    answer without its question teaches nothing.

    dropped_tokens: cut off from documents that are too long.
    unlabelled_tokens: of sequences in which no label counts.
    cut_documents: that are too long; unlabelled_documents: that gave no sequence, since no label counts.
    """

    seq_len: int
    dropped_tokens: int = 0
    unlabelled_tokens: int = 0
    cut_documents: int = 0
    unlabelled_documents: int = 0
    _tokens: list[Tokens] = field(default_factory=list)
    _counted: list[Counted] = field(default_factory=list)

    def add(self, tokens: Tokens, counted: Counted) -> Iterator[Sequence]:
        assert tokens.shape == counted.shape
        self._tokens.append(tokens)
        self._counted.append(counted)
        return iter(())

    def end_document(self, *, divisible: bool) -> Iterator[Sequence]:
        """Give the document's sequences; the next part belongs to another document."""
        if not self._tokens:
            return
        tokens, counted = np.concatenate(self._tokens), np.concatenate(self._counted)
        self._tokens, self._counted = [], []
        if not divisible and len(tokens) > self.seq_len:
            self.dropped_tokens += len(tokens) - self.seq_len
            self.cut_documents += 1
            tokens, counted = tokens[: self.seq_len], counted[: self.seq_len]
        gave = False
        for begin in range(0, len(tokens), self.seq_len):
            cut = slice(begin, begin + self.seq_len)
            if _has_label(counted[cut]):
                gave = True
                yield tokens[cut], counted[cut]
            else:
                self.unlabelled_tokens += len(tokens[cut])
        self.unlabelled_documents += not gave

    def finish(self) -> None:
        assert not self._tokens, "the last document was not ended"
