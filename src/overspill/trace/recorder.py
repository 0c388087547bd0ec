"""Follows storages through a step: when each is born, how large it is, when it dies, and what it was for.

A TorchDispatchMode sees every operator's results; a storage that is new has been allocated just now, and a weak
reference tells when it dies. What an operator allocates and frees inside itself is not seen here (device rules add
what matters). The idea is that of torch.distributed._tools.mem_tracker.

[Note: Storages older than the mode] An operator may return a storage that existed before (in-place and view operators
do). It must not count as new: `adopt` registers everything that exists first, and a result that its schema says is an
alias of an argument is adopted when it is met.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overspill.errors import OverspillError
from overspill.forecast.events import Category, Kind

__all__ = ["Mark", "Record", "Recorder", "Segment", "for_each_tensor"]

_ITEM: Final = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True, slots=True)
class Segment:
    """Where in the step's structure an event lies: in one visit to one layer of one repeated list, or outside (-1).

    ``visit`` counts the passes (a forward or a backward) of the step.
    """

    visit: int
    layers: int = -1
    layer: int = -1


@dataclass(slots=True)
class Record:
    """One malloc or free as it was seen."""

    kind: Kind
    block: int
    phase: str
    segment: Segment


@dataclass(slots=True)
class Mark:
    """What is known about a block."""

    nbytes: int
    category: Category
    module: str
    width: int
    """Size of the last dimension of the tensor that it was made for."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records events of one device's storages ("meta", or another for checks). Used as a context, also repeatedly."""

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.records: list[Record] = []
        self.marks: dict[int, Mark] = {}
        self.phase = ""
        self.module = ""
        self.segment = Segment(0)
        self.values_do_not_matter = False
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._aliases: dict[Any, bool] = {}
        self._silent: set[int] = set()
        self._next = 0

    # ---- what happens ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ITEM and args[0].device.type == "meta":
            return self._value(args[0])
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._see(result, func)
        elif isinstance(result, list | tuple):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._see(item, func)
                elif isinstance(item, list | tuple):
                    for inner in item:
                        if isinstance(inner, torch.Tensor):
                            self._see(inner, func)
        elif result is None or not isinstance(result, bool | int | float):
            for value in args:  # _foreach_add_ and its like return nothing; resize_ may have changed a size
                if isinstance(value, torch.Tensor):
                    self._see(value, None)
        return result

    def _value(self, tensor: torch.Tensor) -> bool | int | float:
        """[Note: Values that are asked for] An optimizer's scalars (a norm, a step size) decide no size: any will do.

        In a model they may well (a mask that is made or not, experts that get tokens or not), so there it is an error.
        """
        if not self.values_do_not_matter:
            raise OverspillError(
                "OVS208",
                f"The model asks for a tensor's value (in {self.module or 'its forward'}); a trace has shapes only.",
                next_step="Trace a model whose sizes do not depend on values, or replace that module by a footprint.",
            )
        if tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _see(self, tensor: torch.Tensor, func: Any) -> None:
        if tensor.device.type != self.device_type or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._known.get(key)
        if found is not None:
            if self.marks[found[0]].nbytes != (nbytes := storage.nbytes()) and found[0] not in self._silent:
                self._resized(key, found[0], nbytes)
            return
        alias = func is None or self._aliases.get(func)
        if alias is None:
            alias = self._aliases[func] = any(r.alias_info is not None for r in func._schema.returns)
        if alias:
            self.adopt(tensor, Category.TEMPORARIES)
            return
        self._born(storage, key, Category.TEMPORARIES, tensor.shape[-1] if tensor.dim() else 1, self.module)

    def _born(self, storage: Any, key: int, category: Category, width: int, module: str) -> int:
        block = self._next
        self._next += 1
        self.marks[block] = Mark(storage.nbytes(), category, module, width)
        self.records.append(Record(Kind.MALLOC, block, self.phase, self.segment))
        self._known[key] = (block, weakref.ref(storage, lambda _: self._died(key, block)))
        return block

    def _died(self, key: int, block: int) -> None:
        self._known.pop(key, None)
        if block not in self._silent:
            self.records.append(Record(Kind.FREE, block, self.phase, self.segment))

    def _resized(self, key: int, block: int, nbytes: int) -> None:
        """A storage that grew or shrank was freed and allocated anew."""
        old, reference = self.marks[block], self._known[key][1]
        storage = reference()
        self.records.append(Record(Kind.FREE, block, self.phase, self.segment))
        self._known.pop(key)
        new = self._born(storage, key, old.category, old.width, old.module)
        assert self.marks[new].nbytes == nbytes

    # ---- what the caller knows ----

    def adopt(self, tensor: torch.Tensor, category: Category, name: str = "") -> None:
        """Registers a storage that exists already: it is allocated from the first event on. ``name``: the parameter's.

        Its malloc is put where the record stands now; the caller adopts what there is before it runs anything, and
        what is met later is moved to the start by `at_start`.
        """
        if tensor.device.type != self.device_type or tensor.untyped_storage()._cdata in self._known:
            return
        kept = self.phase, self.segment, self.module
        self.phase, self.segment, self.module = "load", Segment(-1), ""
        storage = tensor.untyped_storage()
        self._born(storage, storage._cdata, category, 0, name.rpartition(".")[0])
        self.phase, self.segment, self.module = kept

    def ghost(self, tensor: torch.Tensor) -> None:
        """A storage that another part of the trace accounts for: known, and without events of its own."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._next
        self._next += 1
        self.marks[block] = Mark(storage.nbytes(), Category.TEMPORARIES, "", 0)
        self._silent.add(block)
        self._known[key] = (block, weakref.ref(storage, lambda _: self._died(key, block)))

    def mark(self, tensor: torch.Tensor, category: Category) -> None:
        """Says what a storage is for, for its whole life."""
        found = self._known.get(tensor.untyped_storage()._cdata)
        if found is not None and found[0] not in self._silent:
            self.marks[found[0]].category = category

    def is_known(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known

    def alive_since(self, block: int) -> Iterator[Mark]:
        """Marks of blocks that are alive and not older than ``block`` (see `next_block`)."""
        for found, _ in self._known.values():
            if found >= block and found not in self._silent:
                yield self.marks[found]

    @property
    def next_block(self) -> int:
        return self._next

    @contextmanager
    def while_loading(self, nbytes: int) -> Iterator[None]:
        """A block that exists while something is loaded (a weight before it is quantised)."""
        block = self._next
        self._next += 1
        self.marks[block] = Mark(nbytes, Category.TEMPORARIES, "", 0)
        self.records.append(Record(Kind.MALLOC, block, "load", Segment(-1)))
        yield
        self.records.append(Record(Kind.FREE, block, "load", Segment(-1)))

    def footprint(self, nbytes: int, category: Category) -> None:
        """Records a block that lives to the end (a workspace)."""
        block = self._next
        self._next += 1
        self.marks[block] = Mark(nbytes, category, self.module, 0)
        self.records.append(Record(Kind.MALLOC, block, self.phase, self.segment))

    def at_start(self) -> list[Record]:
        """All records, those of adopted storages first."""
        before = [r for r in self.records if r.segment.visit < 0]
        return before + [r for r in self.records if r.segment.visit >= 0]

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        kept, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = kept


def for_each_tensor(values: Any, act: Callable[[torch.Tensor], None]) -> None:
    """Calls ``act`` for every tensor in nested lists, tuples and dicts."""
    if isinstance(values, torch.Tensor):
        act(values)
    elif isinstance(values, dict):
        for_each_tensor(values.values(), act)
    elif isinstance(values, Iterable) and not isinstance(values, str | bytes):
        for value in values:
            for_each_tensor(value, act)
