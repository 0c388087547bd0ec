"""Why a key of another framework's configuration has no effect on memory: one sentence for each group of keys."""

from __future__ import annotations

from typing import Final

__all__ = [
    "DATA",
    "EMPTY",
    "FEW_BYTES",
    "GENERATION",
    "LAUNCH",
    "LEARNING",
    "LOADING",
    "LOGGING",
    "NOT_MODELLED",
    "NO_TRAINING",
    "OBJECTIVE",
    "OFF",
    "OVERRULED",
    "POLICY_ONLY",
    "SAVING",
    "SPEED",
    "TOKENS",
    "group",
]

EMPTY: Final = "empty: the framework's default stands"
OFF: Final = "switched off"
OVERRULED: Final = "another key or a flag decides"
DATA: Final = "data: which rows, and how they are prepared; lengths and packing are other keys"
TOKENS: Final = "tokens: tokenizer and template; they change which tokens, not how many are held"
LOGGING: Final = "reporting: what is written down while training"
SAVING: Final = "saving: where and when; a file on disk, not memory of a step"
LEARNING: Final = "learning: numbers of the update rule or its schedule"
OBJECTIVE: Final = "objective: scalars of the loss"
LAUNCH: Final = "launch: how processes are started and find each other"
LOADING: Final = "loading: how weights are found and read, before training"
SPEED: Final = "speed: which kernels or when, with the same bytes"
FEW_BYTES: Final = "few bytes: less than the forecast's resolution"
GENERATION: Final = "generation: sampling, outside the training step"
NO_TRAINING: Final = "this file describes no training job"
NOT_MODELLED: Final = "not modelled: it changes memory, and the forecast leaves it out"

#: Said where a configuration trains a policy by its own samples.
POLICY_ONLY: Final = "Generation, reward and value models are not modelled: the forecast is of the policy's step alone"


def group(reason: str, keys: str) -> dict[str, str]:
    """The keys, written with spaces between, each with the reason."""
    return dict.fromkeys(keys.split(), reason)
