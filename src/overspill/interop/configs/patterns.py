"""A regular expression over module names, as people write it for LoRA targets, as the ends that it allows.

`layers.[\\d]+.(mlp|self_attn).(up|down|q)_proj` allows modules that end in up_proj, down_proj and q_proj. Only
alternatives in round brackets are spelled out; anything else in the last part is refused.
"""

from __future__ import annotations

import itertools
import re

from overspill.errors import OverspillError

__all__ = ["module_ends"]


def module_ends(pattern: str) -> tuple[str, ...]:
    """The last names that the pattern allows. Raises OverspillError OVS109 for one that cannot be spelled out."""
    last = _last_part(pattern.strip().rstrip("$").removesuffix(".*"))
    pieces = re.split(r"(\([^()]*\))", last)
    choices = [
        [one.strip() for one in piece[1:-1].removeprefix("?:").split("|")] if piece.startswith("(") else [piece]
        for piece in pieces
    ]
    ends = tuple(dict.fromkeys("".join(words) for words in itertools.product(*choices)))
    if len(ends) > 1000 or not all(re.fullmatch(r"\w+", end) for end in ends):
        raise OverspillError(
            "OVS109",
            "The pattern for LoRA targets cannot be spelled out.",
            field="method.targets",
            value=pattern[:80],
            next_step='List the ends of the names, for example --method.targets q_proj,v_proj, or "all-linear".',
        )
    return ends


def _last_part(pattern: str) -> str:
    """What follows the last dot outside brackets; an escaped dot is one."""
    depth = 0
    start = 0
    for place, sign in enumerate(pattern):
        if sign in "([":
            depth += 1
        elif sign in ")]":
            depth -= 1
        elif sign == "." and depth == 0 and pattern[place + 1 : place + 2] not in ("*", "+", "?"):
            start = place + 1
        elif sign in "*+?" and depth == 0:
            start = max(start, place + 1)
    return pattern[start:].lstrip(".")
