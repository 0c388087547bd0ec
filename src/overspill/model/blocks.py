"""Blocks: what moves as one. A decoder layer, the embeddings, or the final norm with the head.

Works on names and shapes alone, so that a forecast (from config.json) and a session (from a live module) cut a
model in the same places. This file places elements; it moves none. A block has one flat element space, and every
state class of the block (weights, gradients, master, moments) uses the same offsets in it: that is what lets one
kernel call walk several one-dimensional arrays. The rule is the one FSDP users write by hand as a wrap policy
("one unit per decoder layer"), read off the parameter names instead of the module classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["BLOCK_ALIGN_NUMEL", "PARAMETER_ALIGN_NUMEL", "Block", "BlockParameter", "find_blocks", "layer_of"]

#: A parameter starts at a multiple of this: 64 elements are one 128-byte line pair in bf16, whole vectors in fp32.
PARAMETER_ALIGN_NUMEL: Final = 64
#: A block's length is a multiple of this: 2048 two-byte elements are one 4096-byte sector of a slot file.
BLOCK_ALIGN_NUMEL: Final = 2048

# The outermost indexed container that has something inside it: "model.layers.3." in "model.layers.3.mlp.experts.0.w".
# A ParameterList ("scales.3", nothing behind the index) is no layer.
_LAYER: Final = re.compile(r"^(?:.*?\.)??(?P<index>[0-9]+)\.")
# Names of what runs after the layers even where the module defines it before them (OPT's final_layer_norm).
_AFTER_LAYERS: Final = re.compile(r"(?:^|[._])(?:final|ln_f|norm_f|lm_head|embed_out|project_out)(?:[._]|$)|_head\.")


@dataclass(frozen=True, slots=True)
class BlockParameter:
    """One parameter's place in its block: elements ``offset`` to ``offset + numel`` of the flat space."""

    name: str
    shape: tuple[int, ...]
    numel: int
    offset: int


@dataclass(frozen=True, slots=True)
class Block:
    """One block: ``numel`` elements of flat space, padding included, and the parameters in it by offset."""

    index: int
    name: str
    parameters: tuple[BlockParameter, ...]
    numel: int

    @property
    def parameter_numel(self) -> int:
        """Elements that belong to parameters, padding left out."""
        return sum(parameter.numel for parameter in self.parameters)


def layer_of(name: str) -> str | None:
    """The layer that a parameter belongs to (``"model.layers.3"``), or None for one outside all layers."""
    match = _LAYER.match(name)
    return None if match is None else name[: match.end("index")]


def find_blocks(
    parameters: Sequence[tuple[str, tuple[int, ...]]],
    groups: Sequence[tuple[str, Sequence[str]]] | None = None,
) -> tuple[Block, ...]:
    """Cut a model into blocks, in forward order.

    Args:
        parameters: (name, shape) in the module's own order, each parameter once: a tied head is listed under its
            first owner only, as ``named_parameters()`` does. Names may have gaps (frozen layers, another dtype).
        groups: (block name, parameter names) in forward order, to cut by something better than names (a traced
            order). Names in it that are not in ``parameters`` are passed over; every parameter must be in one.

    Returns:
        Blocks with indices 0, 1, …; empty when there are no parameters.
    """
    shape_by_name = dict(parameters)
    if len(shape_by_name) != len(parameters):
        raise ValueError("a parameter is listed twice; list a tied parameter under its first owner only")
    if groups is None:
        named = _groups_from_names(list(shape_by_name))
    else:
        named = [(name, [member for member in members if member in shape_by_name]) for name, members in groups]
        placed = [member for _, members in named for member in members]
        if len(placed) != len(shape_by_name) or set(placed) != set(shape_by_name):
            raise ValueError("groups must hold every parameter exactly once")
    filled = [(name, members) for name, members in named if members]
    return tuple(
        _lay_out(index, name, ((member, shape_by_name[member]) for member in members))
        for index, (name, members) in enumerate(filled)
    )


def _groups_from_names(names: list[str]) -> list[tuple[str, list[str]]]:
    """Layers by their outermost index; what stands outside them goes before, between or after, as it is listed."""
    first_layer = next((position for position, name in enumerate(names) if layer_of(name)), len(names))
    moved = [name for name in names[:first_layer] if _AFTER_LAYERS.search(name)]
    kept_before = [name for name in names[:first_layer] if not _AFTER_LAYERS.search(name)]

    members_by_group: dict[str, list[str]] = {}
    if kept_before:
        members_by_group["embeddings"] = kept_before
    previous = "embeddings"
    for name in names[first_layer:]:
        layer = layer_of(name)
        if layer is None:
            # A run of names outside all layers is one group, called after the layer that it follows.
            layer = previous if previous.startswith("after ") else f"after {previous}"
        members_by_group.setdefault(layer, []).append(name)
        previous = layer
    last = next(reversed(members_by_group), None)
    tail = members_by_group.pop(last) if last is not None and last.startswith("after ") else []
    if tail or moved:
        members_by_group["head"] = moved + tail
    return list(members_by_group.items())


def _lay_out(index: int, name: str, members: Iterable[tuple[str, tuple[int, ...]]]) -> Block:
    placed = []
    end = 0
    for member, shape in members:
        numel = math.prod(shape)
        placed.append(BlockParameter(name=member, shape=tuple(shape), numel=numel, offset=end))
        end = _round_up(end + numel, PARAMETER_ALIGN_NUMEL)
    # At least one sector, so that no slot file is ever empty.
    return Block(index, name, tuple(placed), max(_round_up(end, BLOCK_ALIGN_NUMEL), BLOCK_ALIGN_NUMEL))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
