"""What a framework's launcher puts into PYTORCH_CUDA_ALLOC_CONF, as facts with sources: launchers.toml."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from importlib import resources

__all__ = ["Launcher", "launcher_of", "launchers"]


@dataclass(frozen=True)
class Launcher:
    """One setting. versions: of the framework, from the first on and below the second; "" is open."""

    framework: str
    versions: tuple[str, str]
    alloc_conf: str
    source: str


@functools.cache
def launchers() -> tuple[Launcher, ...]:
    """Every row of launchers.toml."""
    text = resources.files("overspill.catalog").joinpath("launchers.toml").read_text(encoding="utf-8")
    return tuple(
        Launcher(row["framework"], (row["versions"][0], row["versions"][1]), row["alloc_conf"], row["source"])
        for row in tomllib.loads(text)["launcher"]
    )


def launcher_of(framework: str, version: str | None) -> Launcher | None:
    """What that version's launcher sets; None: nothing. version None: the newest."""
    for one in launchers():
        low, high = one.versions
        if one.framework == framework and (
            (version is None and not high)
            or (version is not None and _tuple(low) <= _tuple(version) and (not high or _tuple(version) < _tuple(high)))
        ):
            return one
    return None


def _tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
