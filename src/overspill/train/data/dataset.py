"""Sequences out of token files, as a torch Dataset: one sequence is read at a time, nothing is held.

It is picklable and fork-safe: a worker maps the files for itself when it first reads. The held-out part is a second
dataset on the same files.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from overspill.train.data.store import DataFacts

__all__ = ["IGNORED", "SequenceDataset"]

IGNORED: Final = -100  # the label that cross-entropy skips, in torch and transformers alike
_PAD_MULTIPLE: Final = 8


class SequenceDataset(Dataset[dict[str, torch.Tensor]]):
    """The training part or the held-out part of a directory of token files.

    ``dataset[i]`` gives ``input_ids`` and ``labels``, int64 of equal length; `collate` makes a micro-batch of several.
    Labels are the tokens themselves (the model shifts them), IGNORED where the loss does not count.

    Args:
        held_out: how many sequences are held out for evaluation; they are spread evenly over the files.
        part: which of the two this is.
    """

    def __init__(self, directory: Path, facts: DataFacts, *, held_out: int, part: Literal["train", "eval"]) -> None:
        assert 0 <= held_out < facts.sequences
        self.directory = directory
        self.facts = facts
        self.part = part
        self._held_out = held_out
        self._maps: dict[str, Any] = {}

    def __len__(self) -> int:
        return self._held_out if self.part == "eval" else self.facts.sequences - self._held_out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}

    def sequence_number(self, index: int) -> int:
        """Which sequence of the files stands at ``index`` of this part."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self._held_out == 0:
            return index
        if self.part == "eval":
            return self._eval_number(index)
        # The number of held-out sequences before it, by bisection: they are evenly spread, so need no list.
        low, high = 0, self._held_out
        while low < high:
            middle = (low + high) // 2
            if self._eval_number(middle) - middle <= index:
                low = middle + 1
            else:
                high = middle
        return index + low

    def _eval_number(self, index: int) -> int:
        return (2 * index + 1) * self.facts.sequences // (2 * self._held_out)

    def _map(self, name: str, dtype: Any) -> Any:
        if name not in self._maps:
            self._maps[name] = np.memmap(self.directory / name, dtype=dtype, mode="r")
        return self._maps[name]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        number = self.sequence_number(index)
        offsets = self._map("offsets.bin", np.int64)
        begin, end = int(offsets[number]), int(offsets[number + 1])
        tokens = self._map("tokens.bin", np.dtype(self.facts.token_dtype))[begin:end].astype(np.int64)
        counted = self._map("counted.bin", np.uint8)[begin:end].astype(bool)
        labels = np.where(counted, tokens, IGNORED)
        return {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}

    def collate(self, items: SequenceOf[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """A micro-batch: stacked; unless packed, padded to its longest sequence, with an attention mask."""
        if self.facts.packing:
            return {name: torch.stack([item[name] for item in items]) for name in ("input_ids", "labels")}
        longest = max(len(item["input_ids"]) for item in items)
        length = min(-(-longest // _PAD_MULTIPLE) * _PAD_MULTIPLE, self.facts.seq_len)
        shape = (len(items), length)
        batch = {
            "input_ids": torch.full(shape, self.facts.pad_token),
            "labels": torch.full(shape, IGNORED),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
        }
        for row, item in enumerate(items):
            used = len(item["input_ids"])
            batch["input_ids"][row, :used] = item["input_ids"]
            batch["labels"][row, :used] = item["labels"]
            batch["attention_mask"][row, :used] = 1
        return batch
