"""The card that a row of measurements names, as an accelerator of the catalogue.

Not a second catalogue: names go through catalog.accelerators. What is handled here is how tables write them: a memory
in GiB is what the runtime offered (torch's total_memory) and is taken as it is; one in GB is the size on the box; two
cards or two sizes side by side mean that the source does not say which, and the larger memory is taken, since a
capacity that was not there would cut a figure.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from overspill.catalog.accelerators import Accelerator, accelerator, usable_of
from overspill.errors import OverspillError
from overspill.units import GiB

__all__ = ["card_of", "with_capacity"]


def with_capacity(card: Accelerator, nbytes: int) -> Accelerator:
    """The same card with another memory: what the runtime offers is all that the driver shows."""
    return replace(
        card, memory_nbytes=nbytes, seen_nbytes=nbytes, usable_nbytes=nbytes, usable_low_nbytes=nbytes,
        usable_high_nbytes=nbytes, usable_rule="as given",
    )  # fmt: skip


@cache
def card_of(text: str) -> tuple[Accelerator | None, str]:
    """(the card, "") or (None, why not). An empty text is a card that was not published."""
    if not text.strip():
        return None, "the card is not published"
    shown = [float(one) for one in re.findall(r"(\d+(?:\.\d+)?)\s*GiB", text)]
    printed = [float(one) for one in re.findall(r"(\d+(?:\.\d+)?)(?=\s*GB|/\d+\s*GB)", text, re.IGNORECASE)]
    plain = re.sub(r"\([^)]*\)", " ", text.replace("_", "-"))
    plain = re.sub(r"TiS\b", " Ti SUPER", plain).strip()  # GeForce cards: "4070TiS"
    if not shown and "/" not in plain:
        found = _catalogued(plain)
        if found is not None:
            return found, ""
    names = re.sub(r"[\s-]*\d+(?:\.\d+)?(?:/\d+)?\s*Gi?B\b", " ", plain, flags=re.IGNORECASE)
    for name in (one.strip(" -") for one in names.split("/")):
        if printed and (found := _catalogued(f"{name} {max(printed):g}GB")) is not None and not shown:
            return found, ""
        if (found := _catalogued(name)) is None:
            continue
        if shown:
            return with_capacity(found, round(max(shown) * GiB)), ""
        if printed:
            return with_capacity(found, usable_of(round(max(printed) * GiB))[0]), ""
        return found, ""
    return None, f"the card {text!r} is not in the catalogue"


def _catalogued(name: str) -> Accelerator | None:
    try:
        return accelerator(name)
    except OverspillError:
        return None
