"""Reads config.json keys: a size that decides the shape is never guessed, the rest has the config class's default.

Published files leave out what equals the default of their configuration class, the nested ones of vision-language
models most of all. Those defaults are data (config_defaults.json, made by tools/make_config_defaults.py); so are the
other names that a class takes for a key. Nothing here knows a family.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from overspill.errors import OverspillError

__all__ = ["Config", "known_defaults"]

#: Limits far above every model that there is: a mistyped number is refused before it is multiplied out.
_LARGEST_LAYERS: Final = 10_000
_LARGEST_SIZE: Final = 1 << 31
_LAYER_KEYS: Final = frozenset(
    {
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "depth", "encoder_layers",
        "decoder_layers",
    }
)  # fmt: skip
#: Keys that every config.json states; where one is missing, the file is not what it should be.
_STATED: Final = frozenset(
    {"hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "d_model", "n_embd", "ffn_dim", "d_ff"}
) | (_LAYER_KEYS - {"num_decoder_layers"})


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("config_defaults.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def known_defaults(model_type: str) -> dict[str, Any]:
    """What the configuration class of a model_type takes for keys that are left out; ``_aliases`` maps other names."""
    return _defaults().get(model_type, {})


class Config:
    """One config.json, or a table in it. nested: it stands in another one, so a size may be the class's default."""

    def __init__(self, data: dict[str, Any], model_type: str, *, nested: bool = False, path: str = "") -> None:
        self._data = data
        self._defaults = known_defaults(model_type)
        self._aliases: dict[str, str] = self._defaults.get("_aliases", {})
        self._nested = nested
        self._path = path
        self.model_type = model_type

    def number(self, key: str) -> int:
        """A positive whole number. Raises OverspillError OVS201 where the key is missing or holds another thing."""
        value = self._stated(key)
        if value is None and (self._nested or key not in _STATED):
            value = self._default(key)
        limit = _LARGEST_LAYERS if key in _LAYER_KEYS or "heads" in key or key == "n_head" else _LARGEST_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise OverspillError(
                "OVS201",
                f"The model's config.json needs a positive whole number for {key!r}.",
                field=f"config.json: {self._path}{key}",
                value=str(value)[:40],
                limit=limit,
                next_step="Use the config.json that came with the weights.",
            )
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """A value; where the file leaves it out, the class's default; where that is none, ``default``.

        A null counts as none, as for the class: Mistral's ``"sliding_window": null`` is no window.
        """
        value = self._stated(key) if self.says(key) else self._default(key)
        return default if value is None else value

    def says(self, key: str) -> bool:
        """Whether the file itself has the key, be it null."""
        return any(name in self._data for name in self._names(key))

    def integer(self, key: str, default: int = 0, *, minimum: int = 0) -> int:
        """A whole number, from ``minimum`` up. Raises ValueError or TypeError for anything else."""
        value = int(self.get(key, default))
        if not minimum <= value <= _LARGEST_SIZE:
            raise ValueError(f"{self._path}{key} must be {minimum} to {_LARGEST_SIZE}, not {value}")
        return value

    def ratio(self, key: str, default: float = 0.0) -> float:
        return float(self.get(key, default))

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, default))

    def text(self, key: str, default: str) -> str:
        return str(self.get(key, default))

    def child(self, key: str, model_type: str) -> Config:
        """The table under ``key``; model_type where the table does not say its own."""
        table = self._stated(key)
        table = table if isinstance(table, dict) else {}
        return Config(table, str(table.get("model_type") or model_type), nested=True, path=f"{self._path}{key}.")

    def flattened(self, model_type: str) -> Config:
        """This same table, read as a config of another family: older files do not nest their text model."""
        return Config(self._data, model_type, nested=True, path=self._path)

    def typed(self, model_type: str) -> Config:
        """This table with the defaults of another class: some files give a nested table its parent's model_type."""
        return Config(self._data, model_type, nested=self._nested, path=self._path)

    def _names(self, key: str) -> tuple[str, ...]:
        """A key and the other names that its class has for it."""
        own = self._aliases.get(key, key)
        others = tuple(other for other, named in self._aliases.items() if named == own and other != key)
        return (key, *others) if own == key else (key, own, *others)

    def _stated(self, key: str) -> Any:
        return next((self._data[name] for name in self._names(key) if self._data.get(name) is not None), None)

    def _default(self, key: str) -> Any:
        return next((self._defaults[name] for name in self._names(key) if name in self._defaults), None)
