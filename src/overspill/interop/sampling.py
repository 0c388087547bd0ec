"""What a drawn answer may be asked for: the ranges of temperature and seed. Known before anything heavy is loaded."""

from __future__ import annotations

from typing import Final

from overspill.errors import OverspillError

__all__ = ["HIGHEST_TEMPERATURE", "LARGEST_SEED", "LOWEST_TEMPERATURE", "refuse_odd_sampling"]

#: Choices: logits divided by less leave fp32's range, and by more they are all alike.
LOWEST_TEMPERATURE: Final = 1e-4
HIGHEST_TEMPERATURE: Final = 1e4
#: As of train.seed; torch takes no more than 64 bits.
LARGEST_SEED: Final = 2**63 - 1


def refuse_odd_sampling(temperature: float, seed: int) -> None:
    """Raises OverspillError OVS101 for a temperature or a seed outside of its range."""
    if temperature != 0 and not LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE:
        raise OverspillError(
            "OVS101",
            "The temperature is out of range.",
            field="--temperature",
            value=temperature,
            limit=f"0, or {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}",
            next_step="Give 0 for the likeliest token each time, or about 1 to draw.",
        )
    if not 0 <= seed <= LARGEST_SEED:
        raise OverspillError(
            "OVS101",
            "The seed is out of range.",
            field="--seed",
            value=seed,
            limit=f"0 to {LARGEST_SEED}",
            next_step="Give a smaller number.",
        )
