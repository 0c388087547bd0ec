"""What a process holds on a GPU beside its tensors: context, cuBLAS workspace, NCCL buffers, as facts with sources.

The facts are in overheads.toml. A question that several of them answer gets an interval: from the smallest to the
largest that was seen under the conditions named, never an average of them.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

__all__ = ["Fact", "Interval", "context", "cublas_workspace", "facts", "nccl_channel", "nccl_communicator"]


@dataclass(frozen=True)
class Fact:
    """One size that was read or seen.

    Attributes:
        kind: context, cublas_workspace, nccl_channel or nccl_communicator.
        nbytes: the size.
        source: where, and when.
        mechanism: why there is such a size.
        conditions: what it holds for: loading, card, when, protocol.
        torch, capability: from this version on, and below that one; "" is open.
    """

    kind: str
    nbytes: int
    source: str
    mechanism: str
    conditions: dict[str, str]
    torch: tuple[str, str]
    capability: tuple[str, str]


@dataclass(frozen=True)
class Interval:
    """Bytes from low to high, and the facts that span it."""

    low_nbytes: int
    high_nbytes: int
    facts: tuple[Fact, ...]


@functools.cache
def facts() -> tuple[Fact, ...]:
    """Every fact of overheads.toml."""
    text = resources.files("overspill.catalog").joinpath("overheads.toml").read_text(encoding="utf-8")
    found = []
    for kind, rows in tomllib.loads(text).items():
        for row in rows:
            own: dict[str, Any] = dict(row)
            torch, capability = own.pop("torch", ["", ""]), own.pop("capability", ["", ""])
            nbytes, source, mechanism = own.pop("nbytes"), own.pop("source"), own.pop("mechanism")
            found.append(Fact(kind, nbytes, source, mechanism, own, tuple(torch), tuple(capability)))
    return tuple(found)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".") if part.isdigit())


def _within(value: str | None, bounds: tuple[str, str]) -> bool:
    """Whether a version lies in [low, high); one that is not known may."""
    if value is None:
        return True
    low, high = bounds
    here = _version(value)
    return (not low or here >= _version(low)) and (not high or here < _version(high))


def _interval(found: list[Fact]) -> Interval:
    sizes = [one.nbytes for one in found]
    return Interval(min(sizes, default=0), max(sizes, default=0), tuple(found))


def context(*, torch: str | None = None, loading: str = "lazy") -> Interval:
    """A process's CUDA context. ``loading``: lazy, or eager (CUDA_MODULE_LOADING, and always before torch 1.13)."""
    if torch is not None and _version(torch) < (1, 13):
        loading = "eager"
    rows = [one for one in facts() if one.kind == "context" and one.conditions["loading"] == loading]
    return _interval([one for one in rows if _within(torch, one.torch)])


def cublas_workspace(*, capability: str | None, torch: str | None = None) -> Interval:
    """One workspace of cuBLAS, for one handle and stream; the backward's thread has a handle of its own.

    ``capability``: the compute capability, as "8.9". Nothing for a card without one (AMD's gfx names): empty interval.
    """
    if capability is not None and not capability[:1].isdigit():
        return _interval([])
    rows = [one for one in facts() if one.kind == "cublas_workspace" and _within(capability, one.capability)]
    return _interval([one for one in rows if _within(torch, one.torch)])


def nccl_channel() -> Interval:
    """Buffers of one channel to one peer: from the Simple protocol's alone to all three."""
    return _interval([one for one in facts() if one.kind == "nccl_channel"])


def nccl_communicator() -> Interval:
    """One communicator as a whole, as seen on nodes with NVLink."""
    return _interval([one for one in facts() if one.kind == "nccl_communicator"])
