"""A typical decoder of about a given size, for who knows only "7B": the shape, and every assumption as a sentence.

The rule (docs/theory/models.md, `size`): take the five dense Llama and Qwen decoders of the catalogue whose counts are
nearest in ratio; give the new model the median of their proportions; choose depth, then the MLP's width, so that the
count comes out. No figure is written down here: all come from the catalogue.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any, Final

from overspill.catalog.models import CatalogModel, every_model
from overspill.errors import OverspillError
from overspill.model.shape import ModelShape

__all__ = ["SizedModel", "shape_of_size"]

_FAMILIES: Final = ("llama", "qwen2", "qwen3")
_NEIGHBOURS: Final = 5
#: Widths of MLPs are multiples of this in every model of the catalogue above 1B, or nearly all.
_WIDTH_MULTIPLE: Final = 64
_SMALLEST: Final = 50 * 10**6  # below, a usual vocabulary alone is larger
_LARGEST: Final = 10**13


@dataclass(frozen=True)
class SizedModel:
    """A shape that was made up, its config, and what was assumed, a sentence each."""

    shape: ModelShape
    config: dict[str, Any]
    assumptions: tuple[str, ...]


def shape_of_size(numel: int) -> SizedModel:
    """A Llama-like decoder of about ``numel`` parameters (within 1 % from 200 million up, 1.5 % below).

    Raises OverspillError OVS201 for a number that is no model's: below 50 million or above ten trillion.
    """
    if not _SMALLEST <= numel <= _LARGEST:
        raise OverspillError(
            "OVS201",
            "No typical decoder has so many parameters.",
            field="params",
            value=numel,
            limit=f"{_SMALLEST} to {_LARGEST}",
            next_step='Write the number of parameters, as "7B" or "350M".',
        )
    near = _nearest(numel)
    head_dim = median_low(_head_dim(model) for model in near)
    proportion = median(_key(model, "hidden_size") / _key(model, "num_hidden_layers") for model in near)
    wide = median(_key(model, "intermediate_size") / _key(model, "hidden_size") for model in near)
    sharing = median_low(
        _key(model, "num_attention_heads")
        // model.config.get("num_key_value_heads", _key(model, "num_attention_heads"))
        for model in near
    )
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": median_low(_key(model, "vocab_size") for model in near),
        "max_position_embeddings": median_low(_key(model, "max_position_embeddings") for model in near),
        "head_dim": head_dim,
        "tie_word_embeddings": sum(bool(model.config.get("tie_word_embeddings")) for model in near) > len(near) / 2,
        "hidden_act": "silu",
    }

    def sized(layers: int, intermediate: int | None = None) -> dict[str, Any]:
        kv_heads = max(1, round(layers * proportion / head_dim / sharing))
        heads = kv_heads * sharing
        hidden = heads * head_dim
        width = intermediate or max(1, round(wide * hidden / _WIDTH_MULTIPLE)) * _WIDTH_MULTIPLE
        return config | {
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "hidden_size": hidden, "intermediate_size": width,
        }  # fmt: skip

    layers = _first(lambda count: _numel(sized(count)) >= numel)
    layers = min((max(1, layers - 1), layers), key=lambda count: abs(math.log(_numel(sized(count)) / numel)))
    each = 3 * sized(layers)["hidden_size"] * layers * _WIDTH_MULTIPLE
    rest = _numel(sized(layers, _WIDTH_MULTIPLE)) - each
    final = sized(layers, max(1, round((numel - rest) / each)) * _WIDTH_MULTIPLE)
    shape = ModelShape.from_config(final)
    return SizedModel(shape, final, _sentences(numel, shape.total_numel, final, near))


def _nearest(numel: int) -> list[CatalogModel]:
    """The neighbours, one of each count: fine-tunes of one model are one neighbour."""
    by_count = {model.numel: model for model in every_model() if model.config["model_type"] in _FAMILIES}
    return sorted(by_count.values(), key=lambda model: abs(math.log(model.numel / numel)))[:_NEIGHBOURS]


def _key(model: CatalogModel, key: str) -> int:
    value: int = model.config[key]
    return value


def _head_dim(model: CatalogModel) -> int:
    return int(model.config.get("head_dim") or _key(model, "hidden_size") // _key(model, "num_attention_heads"))


def _numel(config: dict[str, Any]) -> int:
    """The count of a Llama, as docs/theory/models.md (`llama`) writes it: cheap enough to search with."""
    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * width + 2 * hidden
    heads = 1 if config["tie_word_embeddings"] else 2
    total: int = config["num_hidden_layers"] * layer + heads * vocab * hidden + hidden
    return total


def _first(reaches: Callable[[int], bool]) -> int:
    """The smallest count from 1 for which a monotone condition holds."""
    high = 1
    while not reaches(high):
        high *= 2
    low = high // 2 + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    return high


def _sentences(asked: int, made: int, config: dict[str, Any], near: list[CatalogModel]) -> tuple[str, ...]:
    names = ", ".join(model.name for model in near)
    tied = "tied to the embeddings" if config["tie_word_embeddings"] else "a matrix of its own"
    return (
        f"The model is taken for a dense decoder like Llama, of {made:,} parameters where {asked:,} were asked for.",
        f"Proportions are medians of the catalogue's nearest: {names}.",
        f"{config['num_hidden_layers']} layers of width {config['hidden_size']}; the gated MLP is "
        f"{config['intermediate_size']} wide.",
        f"{config['num_attention_heads']} query heads and {config['num_key_value_heads']} for keys and values, of "
        f"{config['head_dim']} dimensions; no biases, no sliding window.",
        f"A vocabulary of {config['vocab_size']} tokens, and a head that is {tied}.",
        f"Sequences up to {config['max_position_embeddings']} tokens.",
    )
