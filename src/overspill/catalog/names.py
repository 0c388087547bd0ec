"""Names of accelerators as people type them: squeezed to letters and digits, with words left out that may be.

A brand (RTX, GeForce), a form (SXM, PCIe) and the memory may be left out; what tells two cards apart (Ti, SUPER,
Laptop, Max-Q, Ada) may not.
"""

from __future__ import annotations

import itertools
import re
from typing import Final

__all__ = ["forms", "squeeze"]

#: Left out wherever they stand: makers and what drivers add.
_MAKERS: Final = "nvidia geforce tesla amd instinct radeon intel aws google apple corporation"
_ADDED: Final = "gpu graphics edition generation workstation hbm2 hbm2e hbm3 hbm3e tm r active card"
_NOISE: Final = frozenset(f"{_MAKERS} {_ADDED}".split())
#: May be left out, and count as left out: the form of a module, and what a series is called in full.
_OPTIONAL: Final = re.compile(r"^(rtx|gtx|rx|titan|arc|pcie|sxm|nvl|\d+gb|blackwell|server|data|center|max)$")
#: Brands: left out without counting.
_BRAND: Final = frozenset(("rtx", "gtx", "rx", "arc"))
_SIZE: Final = re.compile(r"^\d+gb$")


def _words(name: str) -> list[str]:
    text = re.sub(r"\([^)]*\)", " ", name.lower())
    text = re.sub(r"[/,_+]", " ", text).replace("max-q", "maxq").replace("-", " ")
    text = re.sub(r"\bsxm\d\b|\bsxm\d(?=\d*gb)", "sxm ", text)
    text = re.sub(r"(\d+)\s*gi?b\b", r" \1gb", text)
    words = [word for word in text.split() if word not in _NOISE]
    return [word for word in words if not _SIZE.match(word)] + [word for word in words if _SIZE.match(word)]


def squeeze(name: str) -> str:
    """``NVIDIA A100-SXM4-80GB`` as ``a100sxm80gb``: letters and digits, without makers."""
    text = re.sub(r"([a-z])(\d+gb)$", r"\1 \2", name.strip().lower())
    return "".join(re.sub(r"[^a-z0-9]", "", word) for word in _words(text))


def forms(name: str, memory_gib: float) -> dict[str, int]:
    """Every squeezed way to write a catalogue name, and how many words that way leaves out."""
    words = _words(name)
    size = f"{memory_gib:g}gb"
    if size not in words:
        words.append(size)
    series = any(re.match(r"[wb]\d", word) for word in words)  # Radeon PRO W7900, Arc Pro B60
    free = [place for place, word in enumerate(words) if _OPTIONAL.match(word) or (series and word == "pro")]
    if len(free) == len(words):  # nothing else is in the name: its first word stays
        free = free[1:]
    found: dict[str, int] = {}
    for count in range(len(free) + 1):
        for dropped in itertools.combinations(free, count):
            kept = [word for place, word in enumerate(words) if place not in dropped]
            left_out = sum(words[place] not in _BRAND and words[place] != size for place in dropped) * 2
            left_out += sum(words[place] == size and size in _words(name) for place in dropped)
            form = "".join(re.sub(r"[^a-z0-9]", "", word) for word in kept)
            if form and form != size:
                found[form] = min(left_out, found.get(form, left_out))
    return found
