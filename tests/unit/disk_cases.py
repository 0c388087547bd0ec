"""Small stores and their contents, for the tests of the disk tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from overspill.tiers.disk import DiskStore, SlotSpec, TensorSpec
from overspill.tiers.disk.layout import DTYPE_NBYTES

Content = dict[str, bytes]


def slot(name: str, numel: int, dtype: str = "float32", *, tensors: int = 1) -> SlotSpec:
    """A slot cut evenly into ``tensors`` parameters."""
    width = DTYPE_NBYTES[dtype]
    share = numel // tensors
    inside = tuple(TensorSpec(f"{name}.p{i}", i * share * width, (share,), dtype) for i in range(tensors))
    return SlotSpec(name, dtype, (numel,), numel * width, "moments", inside)


SLOTS = [slot("b0000.exp_avg", 5000), slot("b0000.master", 5000, "int16"), slot("b0001.exp_avg", 2048)]


def create(path: Path, slots: Sequence[SlotSpec] = SLOTS, **options: Any) -> DiskStore:
    options = {"identity": {"model": "tiny"}, "pins": 1, "piece_nbytes": 4096} | options
    return DiskStore.create(path, slots, **options)


def random_content(slots: Sequence[SlotSpec], seed: int) -> Content:
    rng = np.random.default_rng(seed)
    return {spec.name: rng.integers(0, 256, spec.nbytes, dtype=np.uint8).tobytes() for spec in slots}


def write(store: DiskStore, content: Content, *, part_nbytes: int = 8192, checksum: bool = True) -> None:
    for name, data in content.items():
        for start in range(0, len(data), part_nbytes):
            store.write_from(name, start, bytearray(data[start : start + part_nbytes]), checksum=checksum)


def commit(store: DiskStore, step: int, seed: int | None = None, **options: Any) -> Content:
    """Write and commit random bytes; returns them."""
    content = random_content(store.slots, step if seed is None else seed)
    write(store, content, **options)
    store.commit(store.prepare(step, {"step": step}))
    return content


def read(store: DiskStore, *, verify: bool = True) -> Content:
    content: Content = {}
    for spec in store.slots:
        buffer = bytearray(spec.nbytes)
        store.read_into(spec.name, 0, buffer, verify=verify)
        content[spec.name] = bytes(buffer)
    return content


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())
