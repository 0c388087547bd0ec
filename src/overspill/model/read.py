"""From what a user writes to a model's config: a file, a directory, a catalogue name, or the hub's local cache.

Looked for in that order, and the answer says which it was. Nothing is downloaded here: that is for who knows whether
the network may be used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from overspill.catalog.models import CatalogModel, every_model, find_model, nearest_names, same_shape_by_name
from overspill.errors import OverspillError
from overspill.files import parse_json
from overspill.model.shape import ModelShape

__all__ = ["FoundModel", "read_config", "read_model", "trainable_families"]


@dataclass(frozen=True)
class FoundModel:
    """A model's config and where it was found.

    where: a path, or the catalogue's id with the source of its values. note: what to know about that, "" if nothing.
    """

    name: str
    source: Literal["file", "directory", "catalogue", "hub cache"]
    where: str
    config: dict[str, Any]
    note: str = ""

    @cached_property
    def shape(self) -> ModelShape:
        """Its shape. Raises OverspillError OVS201 for a family that is not known."""
        return ModelShape.from_config(self.config)


def read_model(name_or_path: str | Path) -> FoundModel:
    """The model that ``name_or_path`` means: a config.json, a directory with one, a catalogue name, a cached hub id.

    Last, a catalogue model that the name is a copy, a quantised copy or a tuned release of; ``note`` then says so.

    Raises OverspillError OVS201: nothing of that name (nearest names offered), or a config that cannot be read.
    """
    name = str(name_or_path)
    path = Path(name).expanduser()
    if path.is_file():
        return FoundModel(name, "file", str(path), _config_in(path))
    if path.is_dir():
        return FoundModel(name, "directory", str(path), _config_in(path / "config.json"))
    listed = find_model(name)
    if listed is not None:
        return _listed(listed, listed.note)
    cached = _cached_snapshot(name)
    if cached is not None:
        return FoundModel(name, "hub cache", str(cached), _config_in(cached / "config.json"))
    # What is written as a path is meant as one: a missing directory is not somebody else's model.
    alike = None if name.startswith((".", "/", "~")) or name.count("/") > 1 else same_shape_by_name(name)
    if alike is not None:
        return _listed(alike, f"{name} is taken for a copy or a tuned release of {alike.name}, by its name.")
    near = nearest_names(name)
    raise OverspillError(
        "OVS201",
        "There is no such file or directory, no such model in the catalogue, and none in the local hub cache.",
        field="model",
        value=name,
        next_step=f"Did you mean {', '.join(near)}?" if near else "Give the path of its config.json.",
    )


def _listed(model: CatalogModel, note: str) -> FoundModel:
    where = f"{model.name}, values from {model.source}"
    return FoundModel(model.name, "catalogue", where, model.config, note)


def read_config(path: str) -> dict[str, Any]:
    """config.json of a model directory, or of a hub id that is in the local cache. Downloads nothing.

    Raises OverspillError OVS201 naming where it looked.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        cached = _cached_snapshot(path)
        if cached is None:
            raise OverspillError(
                "OVS201", "There is no such model directory, and no hub model of that name in the local cache.",
                field="model.path", value=path,
            )  # fmt: skip
        directory = cached
    return _config_in(directory / "config.json")


def _config_in(file: Path) -> dict[str, Any]:
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise OverspillError("OVS201", f"Cannot read the model's config: {error.strerror}.", field=str(file)) from None
    except ValueError as error:
        raise OverspillError("OVS201", f"The model's config is not valid JSON: {error}.", field=str(file)) from None
    if not isinstance(config, dict):
        raise OverspillError("OVS201", "The model's config holds no table at its top.", field=str(file))
    return config


def _cached_snapshot(hub_id: str) -> Path | None:
    """Where huggingface_hub keeps a model: models--OWNER--NAME/snapshots/COMMIT, the commit named by refs/main."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    model = hub / ("models--" + hub_id.replace("/", "--"))
    reference = model / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = model / "snapshots" / reference.read_text(encoding="utf-8").strip()
    return snapshot if snapshot.is_dir() else None


def trainable_families() -> tuple[str, ...]:
    """Families of the catalogue whose activations on a CPU are known: what `overspill train` takes."""
    found: dict[str, bool] = {}
    for model in every_model():
        family = str(model.config["model_type"])
        if not found.get(family):
            found[family] = ModelShape.from_config(model.config).decoder is not None
    return tuple(sorted(family for family, known in found.items() if known))
