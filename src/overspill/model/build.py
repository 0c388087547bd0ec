"""The words in which families.py's functions write a model down: parts, layers, stacks, and the model around them.

``Parts`` collects parameters and linear modules of one module tree in the order in which ``named_parameters()`` gives
them; ``Assembly`` puts stacks and what stands outside them together in that order. A layer is written once for each
distinct signature (its attention's kind, whether it is a mixture of experts, …), not once for each index.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from overspill.model.facts import LayerKind, LinearShape, ModelFacts, Named, NormKind, Stack

__all__ = ["Assembly", "Built", "Parts"]


@dataclass(frozen=True, slots=True)
class Built:
    """What a family makes of a config: every parameter in the module's order, and the facts."""

    parameters: tuple[Named, ...]
    facts: ModelFacts


class Parts:
    """Parameters and linear modules of one module tree, in its order. Methods return self, to be chained."""

    def __init__(self, at: str = "") -> None:
        self._at = at
        self.named: list[Named] = []
        self.linears: list[LinearShape] = []

    def linear(self, name: str, into: int, out: int, bias: bool = False) -> Parts:
        self.named.append((f"{self._at}{name}.weight", (out, into)))
        if bias:
            self.named.append((f"{self._at}{name}.bias", (out,)))
        self.linears.append(LinearShape(self._at + name, into, out, bias))
        return self

    def conv1d(self, name: str, into: int, out: int) -> Parts:
        """GPT-2's linear layer, which keeps its weight transposed."""
        self.named += [(f"{self._at}{name}.weight", (into, out)), (f"{self._at}{name}.bias", (out,))]
        self.linears.append(LinearShape(self._at + name, into, out, True, "conv1d"))
        return self

    def experts(
        self, name: str, count: int, into: int, out: int, *, bias: bool = False, transposed: bool = False
    ) -> Parts:
        """A 3-D parameter with the matrix of every expert: (experts, out, in), transposed (experts, in, out)."""
        self.named.append((self._at + name, (count, into, out) if transposed else (count, out, into)))
        if bias:
            self.named.append((f"{self._at}{name}_bias", (count, out)))
        self.linears.append(LinearShape(self._at + name, into, out, bias, "experts", count))
        return self

    def norm(self, name: str, width: int, bias: bool = False) -> Parts:
        return self.weight(name, width, bias=bias)

    def weight(self, name: str, *shape: int, bias: bool = False) -> Parts:
        """A module with a weight that no adapter takes for a linear layer: an embedding, a norm, a router."""
        self.named.append((f"{self._at}{name}.weight", shape))
        if bias:
            self.named.append((f"{self._at}{name}.bias", shape[:1]))
        return self

    def parameter(self, name: str, *shape: int) -> Parts:
        """A bare parameter of the tree's own."""
        self.named.append((self._at + name, shape))
        return self

    def extend(self, parts: Parts) -> Parts:
        self.named += [(self._at + name, shape) for name, shape in parts.named]
        self.linears += [replace(linear, name=self._at + linear.name) for linear in parts.linears]
        return self


class Assembly:
    """A model in the making: sections in the module's order."""

    def __init__(self) -> None:
        self._sections: list[Parts | Stack] = []

    def outer(self, at: str = "") -> Parts:
        """Opens a section outside all stacks; at: a path that all its names start with."""
        parts = Parts(at)
        self._sections.append(parts)
        return parts

    def stack(
        self,
        role: Literal["decoder", "encoder", "vision"],
        prefix: str,
        hidden: int,
        signatures: Sequence[Hashable],
        layer: Callable[[Any], LayerKind],
        *,
        final_norm: NormKind = "none",
    ) -> Stack:
        """Opens a section of layers; layer: makes the kind of a signature, its positions left empty."""
        positions: dict[Hashable, list[int]] = {}
        for index, signature in enumerate(signatures):
            positions.setdefault(signature, []).append(index)
        kinds = tuple(replace(layer(signature), positions=tuple(at)) for signature, at in positions.items())
        stack = Stack(role, prefix, hidden, kinds, final_norm)
        self._sections.append(stack)
        return stack

    def finish(self, *, tied: dict[str, str] | None = None, **facts: Any) -> Built:
        """The whole model; tied: parameter → owner; facts: the other fields of ModelFacts."""
        named: list[Named] = []
        outer: list[Named] = []
        linears: list[LinearShape] = []
        for section in self._sections:
            if isinstance(section, Parts):
                named += section.named
                outer += section.named
                linears += section.linears
                continue
            for index, kind in enumerate(section.sequence):
                at = f"{section.prefix}.{index}."
                named += [(at + name, shape) for name, shape in kind.parameters]
        stacks = tuple(section for section in self._sections if isinstance(section, Stack))
        return Built(
            tuple(named),
            ModelFacts(
                stacks=stacks,
                outer=tuple(outer),
                outer_linears=tuple(linears),
                ties=tuple((tied or {}).items()),
                **facts,
            ),
        )
