"""Which optimizers a framework has, as facts with sources: framework_optimizers.toml."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources

__all__ = ["FrameworkOptimizers", "optimizers_of"]


@dataclass(frozen=True)
class FrameworkOptimizers:
    """names: as in a job's optimizer.name; source: where they were read."""

    names: tuple[str, ...]
    source: str


@functools.cache
def _by_framework() -> dict[str, FrameworkOptimizers]:
    text = resources.files("overspill.catalog").joinpath("framework_optimizers.toml").read_text(encoding="utf-8")
    return {
        framework: FrameworkOptimizers(tuple(row["names"]), row["source"])
        for row in tomllib.loads(text).values()
        for framework in row["frameworks"]
    }


def optimizers_of(framework: str) -> FrameworkOptimizers | None:
    """What ``framework`` (a job's framework.name) has; None where any class may be given."""
    return _by_framework().get(framework)
