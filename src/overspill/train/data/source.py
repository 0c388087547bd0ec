"""Micro-batches without end, in a fixed order, with a position that a commit can hold.

The position counts micro-batches handed out, not those that workers have read ahead: resumed from any of them, the
same ones follow, with any number of workers. Micro-batch k holds positions k·b … (k+1)·b-1 of the order, which runs
on from epoch to epoch, so every sequence comes once an epoch and every micro-batch is full.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from overspill import _native
from overspill.errors import OverspillError
from overspill.train.data.dataset import SequenceDataset
from overspill.train.data.order import Order

__all__ = ["BatchSource", "eval_batches", "steps_in"]

Batch = dict[str, torch.Tensor]


class BatchSource:
    """An iterator of micro-batches that `Session.track` can hold (``state_dict``, ``load_state_dict``).

    Args:
        dataset: of `prepare_data`.
        micro_batch: sequences per micro-batch.
        seed: of the order.
        shuffle: a new order each epoch, or always that of the files.
        num_workers: processes that read ahead; 0 reads in this one. They are forked at the first batch.
        micro_batches: end after so many, counted from the very beginning; None never ends.
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        *,
        micro_batch: int,
        seed: int,
        shuffle: bool = True,
        num_workers: int = 0,
        micro_batches: int | None = None,
    ) -> None:
        assert micro_batch >= 1 and num_workers >= 0
        self._dataset = dataset
        self._order = Order(seed=seed, n=len(dataset), shuffle=shuffle)
        self._micro_batch = micro_batch
        self._num_workers = num_workers
        self._micro_batches = micro_batches
        self._consumed = 0
        self._batches: Iterator[Batch] | None = None

    @property
    def consumed(self) -> int:
        """Micro-batches handed out so far, over all runs."""
        return self._consumed

    @property
    def epoch(self) -> float:
        """How often the data has been gone through."""
        return self._consumed * self._micro_batch / self._order.n

    def __iter__(self) -> BatchSource:
        return self

    def __next__(self) -> Batch:
        if self._micro_batches is not None and self._consumed >= self._micro_batches:
            self.close()
            raise StopIteration
        if self._batches is None:
            self._batches = self._read_from(self._consumed)
        batch = next(self._batches)
        self._consumed += 1
        return batch

    def _indices(self, first: int) -> Iterator[list[int]]:
        number = first
        while self._micro_batches is None or number < self._micro_batches:
            begin = number * self._micro_batch
            yield [self._order.at(position) for position in range(begin, begin + self._micro_batch)]
            number += 1

    def _read_from(self, first: int) -> Iterator[Batch]:
        if self._num_workers == 0:
            return (self._dataset.collate([self._dataset[i] for i in indices]) for indices in self._indices(first))
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=_Indices(self._indices(first)),
            num_workers=self._num_workers,
            collate_fn=self._dataset.collate,
            multiprocessing_context="fork",
            # A loader without a generator of its own draws a seed from torch's, which would then stand elsewhere
            # after a resume than in the run that was not interrupted.
            generator=torch.Generator(),
        )
        # A worker keeps each page that this process writes to, or gives back, after the fork. So free heap goes back
        # before it, and the collector, which writes into every object that it looks at, leaves those alone.
        gc.collect()
        gc.freeze()
        _native.malloc_trim()
        return iter(loader)

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self._consumed, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {
            "data": self._dataset.facts.key,
            "sequences": self._order.n,
            "micro_batch": self._micro_batch,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raises OverspillError OVS602 when a position was counted on other data or in another order."""
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                what = "The data files, the tokenizer or the data settings have" if name == "data" else f"{name} has"
                raise OverspillError(
                    "OVS602",
                    f"{what} changed since the run began, so its position in the data means nothing.",
                    field=name,
                    value=mine,
                    limit=f"{state.get(name)} in the run",
                )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position. Raises OverspillError OVS602 as `check` does."""
        self.check(state)
        self.close()
        self._consumed = int(state["consumed"])

    def close(self) -> None:
        """End the workers; the next batch starts new ones at the same position."""
        batches, self._batches = self._batches, None
        # Its worker processes end when the iterator goes; torch offers no public call for it.
        if batches is not None and hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()


class _Indices(torch.utils.data.Sampler[list[int]]):
    """An endless batch sampler: it has no length, so it is no sequence."""

    def __init__(self, indices: Iterator[list[int]]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return self._indices


def eval_batches(dataset: SequenceDataset, micro_batch: int) -> Callable[[], Iterable[Batch]]:
    """What `TrainingLoop` calls for an evaluation: all held-out sequences in order, the last batch may be smaller."""

    def batches() -> Iterator[Batch]:
        for begin in range(0, len(dataset), micro_batch):
            yield dataset.collate([dataset[i] for i in range(begin, min(begin + micro_batch, len(dataset)))])

    return batches


def steps_in(dataset: SequenceDataset, *, epochs: float, micro_batch: int, accumulation: int) -> int:
    """Optimizer steps that go ``epochs`` times through the data, the last one made full; at least 1."""
    return max(1, math.ceil(epochs * len(dataset) / (micro_batch * accumulation) - 1e-9))
