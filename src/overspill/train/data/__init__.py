"""Text to micro-batches: read rows, tokenise, mask, pack, store on disk, draw in a fixed order.

`prepare_data` does the first five and gives datasets; `BatchSource` draws from one, forever, and knows where it is.
Host memory stays small whatever the size of the text: tokens go to files and come back one sequence at a time.
"""

from __future__ import annotations

from overspill.train.data.dataset import SequenceDataset
from overspill.train.data.order import Order
from overspill.train.data.prepare import PreparedData, prepare_data
from overspill.train.data.source import BatchSource, eval_batches, steps_in
from overspill.train.data.store import DataFacts

__all__ = [
    "BatchSource",
    "DataFacts",
    "Order",
    "PreparedData",
    "SequenceDataset",
    "eval_batches",
    "prepare_data",
    "steps_in",
]
