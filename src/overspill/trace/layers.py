"""Finds the layers that repeat, and follows forward and backward from one to the next.

A list of layers (an ``nn.ModuleList`` whose members look alike, perhaps in a pattern such as five sliding-window
layers and one full) is what a deep model consists of. `repetition` finds the pattern, `pruned` shortens the model to
a few periods of it, and `Follower` tells the recorder in which layer's forward or backward it is.

[Note: Where a layer's backward begins] When the gradient of its output is complete. A hook on that tensor says so, and
unlike module hooks it adds nothing to the graph. The tensor is caught where the next module takes it as its input
(or the enclosing one returns it), since inside a reentrant checkpoint the layer itself runs without a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from overspill.forecast.events import Category
from overspill.trace.recorder import Recorder, Segment

__all__ = ["Follower", "Layers", "Repetition", "find_layers", "pruned", "repetition"]

PERIODS: Final = 5
"""Periods that are traced: the first, three alike of which the middle one is repeated, and the last."""


@dataclass(frozen=True)
class Layers:
    """A list of layers: its place in the model and the list itself (at full depth)."""

    name: str
    modules: tuple[nn.Module, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """Layers 0 … first-1 are as they are; from ``first`` on kinds repeat with ``period``. ``kept`` are traced."""

    first: int
    period: int
    depth: int
    kept: int

    @property
    def copies(self) -> int:
        """Periods that are inserted to reach full depth."""
        return (self.depth - self.kept) // self.period


def find_layers(model: nn.Module) -> tuple[Layers, ...]:
    """The outermost lists of at least two modules of one class, in order."""
    found: list[Layers] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        if any(name.startswith(other.name + ".") for other in found):
            continue
        if len({type(member) for member in module}) == 1:
            found.append(Layers(name, tuple(module)))
    return tuple(found)


def kind(module: nn.Module) -> tuple[Any, ...]:
    """What makes two layers the same for memory: classes, shapes, dtypes, what is trained, and plain attributes."""
    facts: list[Any] = []
    for name, inner in module.named_modules():
        plain = tuple(
            (key, value)
            for key, value in sorted(vars(inner).items())
            if not key.startswith("_")
            and key not in ("layer_idx", "layer_id")
            and isinstance(value, bool | int | float | str | None)
        )
        facts.append((name, type(inner), plain))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        facts.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
    return tuple(facts)


def repetition(layers: Layers, periods: int = PERIODS) -> Repetition:
    """The shortest pattern that explains the list; the whole list is kept where there is none that saves anything."""
    kinds: list[int] = []
    seen: dict[tuple[Any, ...], int] = {}
    for module in layers.modules:
        kinds.append(seen.setdefault(kind(module), len(seen)))
    depth = len(kinds)
    best = Repetition(first=0, period=1, depth=depth, kept=depth)
    for period in range(1, depth // (periods + 1) + 1):
        first = depth - period
        while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
            first -= 1
        kept = first + periods * period + (depth - first) % period
        if kept < best.kept:
            best = Repetition(first=first, period=period, depth=depth, kept=kept)
    return best


@contextmanager
def pruned(model: nn.Module, keep: dict[str, int]) -> Iterator[None]:
    """Shortens each named list to its first layers while the block runs."""
    whole = {name: model.get_submodule(name) for name in keep}
    try:
        for name, kept in keep.items():
            _put(model, name, nn.ModuleList(list(whole[name].children())[:kept]))
        yield
    finally:
        for name, module in whole.items():
            _put(model, name, module)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    model.get_submodule(parent)._modules[leaf] = module


class Follower:
    """Hooks on every module that keep the recorder's phase, segment and module up to date."""

    def __init__(self, model: nn.Module, layers: tuple[Layers, ...], recorder: Recorder) -> None:
        self.recorder = recorder
        self.visit = 0
        self._backward = False
        self._named = {module: name for name, module in model.named_modules()}
        self._place: dict[nn.Module, tuple[int, int]] = {}
        self._last: dict[int, int] = {}
        for number, found in enumerate(layers):
            here = list(model.get_submodule(found.name).children())
            self._place.update({module: (number, at) for at, module in enumerate(here)})
            self._last[number] = len(here) - 1
        self._names = [found.name for found in layers]
        self._ended: tuple[int, int] | None = None
        self._inside = 0
        self._born: list[int] = []
        self._modules: list[str] = []

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def in_backward(self) -> bool:
        return self._backward

    # ---- passes ----

    def begin(self, phase: str, *, backward: bool) -> None:
        """A forward or a backward begins."""
        self.visit += 1
        self._backward = backward
        self._ended = None
        self._outside(phase)

    def outside(self, phase: str) -> None:
        """Between passes: the optimizer, clipping, …"""
        self.visit += 1
        self._backward = False
        self._outside(phase)

    def _outside(self, phase: str) -> None:
        self.recorder.phase = phase
        self.recorder.segment = Segment(self.visit)

    # ---- hooks ----

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._named.get(module, "")
        self._modules.append(self.recorder.module)
        self.recorder.module = name
        place = self._place.get(module)
        if self._backward:
            if place is not None:
                self._born.append(self.recorder.next_block)
            return
        if self._ended is not None and self._inside == 0:
            self._catch(args, kwargs, self._ended)
        if place is not None and self._inside == 0:
            if place[1] == 0:
                self._catch(args, kwargs, (place[0], -1))
            self.recorder.segment = Segment(self.visit, *place)
            self.recorder.phase = f"forward of {self._names[place[0]]}.{place[1]}"
        if place is not None:
            self._inside += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self.recorder.module = self._modules.pop()
        place = self._place.get(module)
        if place is None:
            if self._ended is not None and self._inside == 0 and not self._backward:  # no module came after the last
                self._catch((output,) if isinstance(output, torch.Tensor) else (), {}, self._ended)
            return
        if self._backward:
            if self._born:
                for mark in self.recorder.alive_since(self._born.pop()):
                    if mark.category is Category.TEMPORARIES:
                        mark.category = Category.ACTIVATIONS
            return
        self._inside -= 1
        if self._inside == 0:
            self._ended = place
            if place[1] == self._last[place[0]]:
                self._outside("loss" if torch.is_grad_enabled() else "evaluation")

    def _catch(self, args: Any, kwargs: Any, place: tuple[int, int]) -> None:
        """Puts the hook of [Note: Where a layer's backward begins] on the first input that has a graph."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.requires_grad and value.is_floating_point():
                value.register_hook(lambda _: self._begin_backward(place))  # type: ignore[no-untyped-call]
                self._ended = None
                return

    def _begin_backward(self, place: tuple[int, int]) -> None:
        if place[1] < 0:
            self._outside("end of backward")
            return
        self.recorder.segment = Segment(self.visit, *place)
        self.recorder.phase = f"backward of {self._names[place[0]]}.{place[1]}"
