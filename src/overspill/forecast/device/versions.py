"""Library versions as tuples, and what is assumed where a job names none."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["NEWEST", "Versions"]

#: The versions that a job without versions is forecast for, and the dates that they were published (PyPI).
NEWEST: dict[str, str] = {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "trl": "1.0.0",
    "peft": "0.19.0",
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "bitsandbytes": "0.50.2",
    "torchtune": "0.6.1",
    "torchtitan": "0.2.0",
    "litgpt": "0.5.12",
}


class Versions:
    """``versions["transformers"] < (4, 46)``; what is not named is the newest, and is listed in `assumed`."""

    def __init__(self, named: Mapping[str, str]) -> None:
        self.named = dict(named)
        self.assumed: list[str] = []

    def __getitem__(self, library: str) -> tuple[int, ...]:
        text = self.named.get(library)
        if text is None:
            text = NEWEST[library]
            if library not in self.assumed:
                self.assumed.append(library)
        return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
