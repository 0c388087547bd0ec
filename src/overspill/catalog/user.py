"""The user's own facts: cards, optimizers and architectures from TOML files beside the job or in the home directory.

Read in this order, a later one winning by name: every *.toml in ~/.config/overspill (or $XDG_CONFIG_HOME/overspill), by
name, then overspill.toml in the job's folder. docs/howto/extend-the-catalogue.md is the recipe.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from overspill.catalog.accelerators import Accelerator, Price, accelerator, usable_of
from overspill.catalog.names import squeeze
from overspill.errors import OverspillError
from overspill.files import refuse_odd_texts
from overspill.schema import BytesPerSecond, Frozen, Nbytes

__all__ = [
    "UserAccelerator",
    "UserArchitecture",
    "UserCatalogue",
    "UserOptimizer",
    "find_accelerator",
    "read_user_catalogue",
]

FILE_NAME = "overspill.toml"


class UserAccelerator(Frozen):
    """A card. With ``like`` everything that is left out is that card's."""

    like: str | None = Field(default=None, description="A card of the catalogue that gives what is left out.")
    memory: Nbytes | None = Field(default=None, description="What its name says.")
    usable: Nbytes | None = Field(default=None, description="What the runtime offers; else memory, less the driver's.")
    bandwidth: BytesPerSecond | None = Field(default=None, description="Of its memory.")
    tflops: dict[Literal["fp32", "tf32", "fp16", "bf16", "fp8"], float] = Field(
        default_factory=dict, description="Dense peak by dtype, in 10^12 operations a second."
    )
    compute_capability: str | None = Field(default=None, description='As "8.9".')
    tdp_watts: float | None = Field(default=None, gt=0)
    host_link: BytesPerSecond | None = Field(default=None, description="To the host, one direction.")
    gpu_link: BytesPerSecond | None = Field(default=None, description="To other cards, one direction.")
    price_usd: float | None = Field(default=None, ge=0)
    aliases: tuple[str, ...] = Field(default=(), description="Other names that find it.")

    @model_validator(mode="after")
    def _enough_is_known(self) -> Self:
        if self.like is None and (self.memory is None or self.bandwidth is None):
            raise ValueError("A card needs memory and bandwidth, or like = the name of a card of the catalogue")
        if self.usable is not None and self.memory is not None and self.usable > self.memory:
            raise ValueError("usable is more than memory")
        return self


class UserOptimizer(Frozen):
    """An optimizer, by what it holds for each trained parameter."""

    state_bytes_per_parameter: float = Field(ge=0, description="Kept between steps, without a master copy.")
    step_bytes_per_parameter: float = Field(default=0.0, ge=0, description="Temporaries at the step's peak.")
    master: Literal["none", "fp32"] = Field(default="none", description="A separate copy of the weights.")
    fixed: Nbytes = Field(default=0, description="Kept whatever the model.")
    in_backward: bool = Field(default=False, description="Updates in backward; gradients go at once.")


class UserArchitecture(Frozen):
    """A model's shape: a config.json-like table, or sizes and the bytes that a token leaves in each layer."""

    config: dict[str, Any] | None = Field(default=None, description="As config.json of a family that is known.")
    parameters: int | None = Field(default=None, ge=1, description="In all.")
    embedding_parameters: int = Field(default=0, ge=0, description="Of them, in embeddings and head.")
    layers: int | None = Field(default=None, ge=1)
    hidden_size: int | None = Field(default=None, ge=1, description="Width of what passes between layers.")
    vocab_size: int | None = Field(default=None, ge=1)
    activation_bytes_per_token_per_layer: float | None = Field(
        default=None, ge=0, description="Kept for backward without checkpointing."
    )

    @model_validator(mode="after")
    def _one_way_or_the_other(self) -> Self:
        sizes = (self.parameters, self.layers, self.hidden_size, self.activation_bytes_per_token_per_layer)
        if self.config is not None and any(one is not None for one in sizes):
            raise ValueError("An architecture is either config, or sizes; not both")
        if self.config is None and any(one is None for one in sizes):
            raise ValueError(
                "An architecture needs config, or all of parameters, layers, hidden_size and "
                "activation_bytes_per_token_per_layer"
            )
        if self.parameters is not None and self.embedding_parameters > self.parameters:
            raise ValueError("embedding_parameters is more than parameters")
        return self


class _Tables(Frozen):
    """One file."""

    accelerator: dict[str, UserAccelerator] = Field(default_factory=dict)
    optimizer: dict[str, UserOptimizer] = Field(default_factory=dict)
    architecture: dict[str, UserArchitecture] = Field(default_factory=dict)


@dataclass(frozen=True)
class UserCatalogue:
    """What the user's files hold, by name, and the file that each name came from."""

    accelerators: Mapping[str, Accelerator]
    optimizers: Mapping[str, UserOptimizer]
    architectures: Mapping[str, UserArchitecture]
    sources: Mapping[str, Path]


def read_user_catalogue(folder: Path | str | None = None, *, home: Path | None = None) -> UserCatalogue:
    """The user's facts: those of the home directory, then those beside the job.

    Args:
        folder: the job's folder; None: only the home directory's.
        home: the directory of *.toml files; default $XDG_CONFIG_HOME/overspill or ~/.config/overspill.

    Raises:
        OverspillError: OVS111 for a file that cannot be read, OVS101 or OVS102 for a wrong key or value, OVS110 for
            a ``like`` that names no card.
    """
    files = sorted((home or _home()).glob("*.toml"))
    if folder is not None and (Path(folder) / FILE_NAME).exists():
        files.append(Path(folder) / FILE_NAME)
    cards: dict[str, Accelerator] = {}
    optimizers: dict[str, UserOptimizer] = {}
    architectures: dict[str, UserArchitecture] = {}
    sources: dict[str, Path] = {}
    for file in files:
        tables = _read(file)
        for name, card in tables.accelerator.items():
            cards[name] = _card(name, card, file)
        optimizers |= tables.optimizer
        architectures |= tables.architecture
        for kind in ("accelerator", "optimizer", "architecture"):
            sources |= dict.fromkeys((f"{kind}.{name}" for name in getattr(tables, kind)), file)
    return UserCatalogue(cards, optimizers, architectures, sources)


def _home() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "overspill"


def _read(file: Path) -> _Tables:
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        refuse_odd_texts(data)
    except OSError as error:
        raise OverspillError("OVS111", f"Cannot read it: {error.strerror}.", field=str(file)) from None
    except (ValueError, RecursionError) as error:
        raise OverspillError("OVS111", f"It is no valid TOML: {error}.", field=str(file)) from None
    return _Tables.read(data, source=str(file))


def _card(name: str, card: UserAccelerator, file: Path) -> Accelerator:
    """The card as the catalogue has cards; what the user gave is stated, the rest is that of ``like``."""
    base = accelerator(card.like) if card.like is not None else None
    memory = card.memory if card.memory is not None else base.memory_nbytes if base is not None else 0
    if card.usable is not None:
        low = usable = high = card.usable
        rule = "stated"
    elif base is not None:
        share = memory / base.memory_nbytes
        usable, low, high = (
            round(one * share) for one in (base.usable_nbytes, base.usable_low_nbytes, base.usable_high_nbytes)
        )
        rule = f"the share of {base.name}"
    else:
        usable, low, high = usable_of(memory)
        rule = "memory, less the driver's"
    given: dict[str, Any] = {
        "name": name,
        "memory_nbytes": memory,
        "seen_nbytes": memory,
        "usable_nbytes": usable,
        "usable_low_nbytes": low,
        "usable_high_nbytes": high,
        "usable_rule": rule,
        "source": str(file),
        "aliases": card.aliases,
        "recalled": "",
        "confidence": "user",
        "cloud_per_hour": None,
        "price": Price(card.price_usd, str(file)) if card.price_usd is not None else None,
    }
    if card.tflops:
        given["flops_per_s"] = {dtype: value * 1e12 for dtype, value in card.tflops.items()}
    for field, value in (
        ("bandwidth_bytes_per_s", card.bandwidth),
        ("compute_capability", card.compute_capability),
        ("tdp_watts", card.tdp_watts),
        ("host_bytes_per_s", card.host_link),
        ("gpu_bytes_per_s", card.gpu_link),
    ):
        if value is not None:
            given[field] = value
    return dataclasses.replace(base or _blank(), **given)


def _blank() -> Accelerator:
    """A card of which nothing is known yet."""
    return Accelerator(
        name="", vendor="", arch="", memory_nbytes=0, seen_nbytes=0, usable_nbytes=0, usable_low_nbytes=0,
        usable_high_nbytes=0, usable_rule="", memory_kind="", bandwidth_bytes_per_s=0.0, flops_per_s={},
        measured_bf16_flops_per_s=None, compute_capability=None, tdp_watts=None, host_link="", host_bytes_per_s=None,
        gpu_link="", gpu_bytes_per_s=None, year=0, price=None, cloud_per_hour=None, source="", confidence="",
        recalled="", notes="", aliases=(),
    )  # fmt: skip


def find_accelerator(name: str, user: UserCatalogue, *, memory_nbytes: int | None = None) -> Accelerator:
    """The user's card of that name or alias, else the catalogue's. Raises OverspillError OVS110 as `accelerator`."""
    wanted = squeeze(name)
    for own, card in user.accelerators.items():
        if wanted in {squeeze(own), *map(squeeze, card.aliases)}:
            return card
    return accelerator(name, memory_nbytes=memory_nbytes)
