"""ModelShape: the parameters of a model and the facts of its layers, without the model.

From config.json for the families that families/ knows, or from the names and shapes of a live module for any
other. It holds no tensors and downloads nothing. A shape made from a config and one read off the module are equal
in names, shapes and order; a test says so for every family.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from overspill.errors import OverspillError
from overspill.model.blocks import Block, find_blocks
from overspill.model.facts import ModelFacts
from overspill.model.families import FAMILIES, build_family
from overspill.model.summary import DecoderFacts, decoder_facts

__all__ = ["ModelShape", "ParameterShape"]


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter. ``tied_to`` names the parameter whose storage it shares; such a one takes no memory."""

    name: str
    shape: tuple[int, ...]
    block: int
    tied_to: str | None = None
    trainable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelShape:
    """A model's parameters in forward order of definition, and what is known of its layers.

    family: config.json's model_type; "module" for a shape read off a live module. facts: None where the family is not
    known. decoder: what the CPU formulas need, where they hold. max_positions: the longest sequence, if there is one.
    """

    family: str
    parameters: tuple[ParameterShape, ...]
    decoder: DecoderFacts | None = None
    max_positions: int | None = None
    facts: ModelFacts | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The shape that a Hugging Face config.json describes.

        Raises OverspillError OVS201 for a family that is not known or a config that lacks a size.
        """
        family = str(config.get("model_type", ""))
        built = build_family(config)
        if built is None:
            raise OverspillError(
                "OVS201",
                f"The shapes of model family {family!r} are not known, so it cannot be forecast from its config alone.",
                field="config.json: model_type",
                value=family,
                limit=", ".join(sorted(FAMILIES)),
                next_step="overspill.attach(model, …) takes any torch module; it needs no known family.",
            )
        return cls(
            family=family,
            parameters=_in_blocks(built.parameters, built.facts.tied),
            decoder=decoder_facts(built.facts),
            max_positions=built.facts.max_positions,
            facts=built.facts,
        )

    @classmethod
    def from_parameters(
        cls, parameters: Iterable[tuple[str, Sequence[int]]], *, config: dict[str, Any] | None = None
    ) -> Self:
        """The shape of any module, from (name, shape) in ``named_parameters()`` order, ties left out.

        config: its config.json, if it has one; gives the facts where the family is known.
        """
        built = build_family(config) if config else None
        return cls(
            family="module",
            parameters=_in_blocks([(name, tuple(shape)) for name, shape in parameters], {}),
            decoder=decoder_facts(built.facts) if built else None,
            max_positions=built.facts.max_positions if built else None,
            facts=built.facts if built else None,
        )

    def freeze(self, patterns: Sequence[str]) -> Self:
        """The same shape with the parameters that match a glob pattern not trained.

        Raises OverspillError OVS101 for a pattern that matches nothing.
        """
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(parameter.name, pattern) for parameter in self.parameters):
                raise OverspillError(
                    "OVS101",
                    "A pattern matches no parameter.",
                    field="model.freeze",
                    value=pattern,
                    next_step=f'Names look like "{self.parameters[len(self.parameters) // 2].name}".',
                )
        frozen = {p.name for p in self.parameters if any(fnmatch.fnmatchcase(p.name, pattern) for pattern in patterns)}
        return replace(
            self, parameters=tuple(replace(p, trainable=p.trainable and p.name not in frozen) for p in self.parameters)
        )

    @property
    def owned(self) -> tuple[ParameterShape, ...]:
        """Parameters with storage of their own: all but the tied ones."""
        return tuple(parameter for parameter in self.parameters if parameter.tied_to is None)

    @property
    def tied_head(self) -> bool:
        return any(parameter.tied_to is not None for parameter in self.parameters)

    @property
    def total_numel(self) -> int:
        return sum(parameter.numel for parameter in self.owned)

    @property
    def active_numel(self) -> int:
        """Elements that one token passes; fewer than total_numel for a mixture of experts."""
        return self.total_numel if self.facts is None else self.facts.active_numel

    @property
    def trainable_numel(self) -> int:
        return sum(parameter.numel for parameter in self.owned if parameter.trainable)

    def blocks(self, *, trainable: bool = True) -> tuple[Block, ...]:
        """The blocks of the trainable parameters (or of the frozen ones), as a session cuts them."""
        return find_blocks([(p.name, p.shape) for p in self.owned if p.trainable is trainable])

    @property
    def largest(self) -> ParameterShape:
        return max(self.owned, key=lambda parameter: parameter.numel)


def _in_blocks(parameters: Sequence[tuple[str, tuple[int, ...]]], tied: dict[str, str]) -> tuple[ParameterShape, ...]:
    blocks = find_blocks([(name, shape) for name, shape in parameters if name not in tied])
    block_of = {parameter.name: block.index for block in blocks for parameter in block.parameters}
    return tuple(
        ParameterShape(name, shape, block_of[tied.get(name, name)], tied.get(name)) for name, shape in parameters
    )
