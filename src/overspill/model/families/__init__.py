"""Every model family whose shapes are known, by config.json's model_type.

A family is a function from a config to every parameter (name and shape, in the order of the transformers module) and to
the facts of facts.py. No torch, no transformers: a forecast must work where neither is installed. A unit test holds
each family equal to the real module on the meta device. How to add one: docs/howto/add-a-model-family.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from overspill.errors import OverspillError
from overspill.model.build import Built
from overspill.model.config import Config
from overspill.model.families.classic import CLASSIC
from overspill.model.families.encoders import ENCODERS
from overspill.model.families.llama_line import decoder
from overspill.model.families.multimodal import MULTIMODAL, NESTED
from overspill.model.families.seq2seq import SEQ2SEQ
from overspill.model.families.styles import STYLES

__all__ = ["CONFIG_TYPES", "FAMILIES", "build_family"]

FAMILIES: Final[dict[str, Callable[[Config], Built]]] = {
    **{name: decoder(style) for name, style in STYLES.items()},
    **CLASSIC,
    **ENCODERS,
    **SEQ2SEQ,
    **MULTIMODAL,
}

#: Configuration classes whose defaults are read: the families, and what stands inside vision-language configs.
CONFIG_TYPES: Final = frozenset({*FAMILIES, *NESTED})


def build_family(config: dict[str, Any]) -> Built | None:
    """What ``config`` describes, or None for a family that is not known.

    Raises OverspillError OVS201 for a config that lacks a size or holds another kind of value where one is read.
    """
    family = str(config.get("model_type", ""))
    build = FAMILIES.get(family)
    if build is None:
        return None
    try:
        return build(Config(config, family))
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        # A key that is read with a default holds something of another kind; which one, the sentence says.
        raise OverspillError(
            "OVS201",
            f"The model's config.json describes no {family}: {error}.",
            field="config.json",
            next_step="Use the config.json that came with the weights.",
        ) from None
