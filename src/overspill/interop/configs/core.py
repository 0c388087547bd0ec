"""What every reader of another framework's configuration shares: the result, and the draft that a reader fills.

A reader walks over one file's keys and gives each a fate: used (it set a field of the Job), ignored (understood, and
without effect on memory, with a reason), or, when nobody asked for it, unknown. Defaults that the framework itself
takes are assumed, each with its reason. Nothing is dropped without a word, and no torch is imported.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from overspill.errors import OverspillError
from overspill.interop.configs.reasons import EMPTY, NOT_MODELLED
from overspill.job import Job

__all__ = ["Assumption", "ConfigReading", "Draft", "Findings", "key_paths", "refuse"]

#: Deeper or larger than any real configuration: a YAML file can name one node a million times.
_DEEPEST: Final = 32
_MOST_KEYS: Final = 20_000

_MISSING: Final = object()


@dataclass(frozen=True)
class Assumption:
    """A value that no file gave, and why it was taken."""

    value: Any
    why: str


@dataclass(frozen=True)
class ConfigReading:
    """What was read from a configuration of another framework.

    Attributes:
        format: accelerate, axolotl, deepspeed, hf, llamafactory, torchtune or trl.
        source: the file.
        job: the Job, or None where something is missing or no training is described.
        trains: False for a file that describes no training job (generation, evaluation, a list of tokens).
        used: key of the file -> fields of the Job that it set, with commas between.
        assumed: field of the Job -> the framework's default, and why.
        ignored: key -> why it has no effect on memory, or that its effect is not modelled.
        unknown: keys that are not understood.
        missing: fields that must be given as flags before there is a Job.
        notes: sentences for the user.
    """

    format: str
    source: str
    job: Job | None
    trains: bool
    used: Mapping[str, str]
    assumed: Mapping[str, Assumption]
    ignored: Mapping[str, str]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, for --json and for the committed results."""
        return {
            "format": self.format,
            "trains": self.trains,
            "used": dict(self.used),
            "assumed": {name: {"value": one.value, "why": one.why} for name, one in self.assumed.items()},
            "ignored": dict(self.ignored),
            "unknown": list(self.unknown),
            "missing": list(self.missing),
            "notes": list(self.notes),
        }


@dataclass
class Findings:
    """What the drafts of one reading write into: one file, and those that it names."""

    flags: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    used: dict[str, list[str]] = field(default_factory=dict)
    assumed: dict[str, Assumption] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trains: bool = True
    spent: set[str] = field(default_factory=set)  # flags that answered an "auto", and set no field themselves


def refuse(message: str, source: Path | str, *, key: str = "", value: Any = None, next_step: str | None = None) -> None:
    """Raises OverspillError OVS109 about a key of a configuration, or about the whole file."""
    where = f"{source}: {key}" if key else str(source)
    shown = None if value is None else repr(value)[:80]
    if next_step is None:
        next_step = "Correct the value there, or take the key out." if key else "Give a configuration that fits."
    raise OverspillError("OVS109", message, field=where, value=shown, next_step=next_step)


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(key, str) for key in value)


def _shown(part: str) -> str:
    return part if re.fullmatch(r"[^.\"\s][^.\"]*", part) else json.dumps(part)


def key_paths(data: Mapping[str, Any], source: Path | str = "") -> list[str]:
    """Every key of nested tables that holds a value, as ``zero_optimization.stage``; a list counts as one value.

    Raises OverspillError OVS109 for a file that is nested too deeply or names too many keys.
    """
    found: list[str] = []
    waiting: list[tuple[str, Any, int]] = [(_shown(key), value, 1) for key, value in reversed(list(data.items()))]
    while waiting:
        path, value, depth = waiting.pop()
        if depth > _DEEPEST or len(found) > _MOST_KEYS:
            refuse("The configuration is nested too deeply, or holds too many keys.", source)
        if _is_table(value):
            waiting += [(f"{path}.{_shown(key)}", inner, depth + 1) for key, inner in reversed(list(value.items()))]
        else:
            found.append(path)
    return found


class Draft:
    """One file on its way to a Job: its keys, and which of them have met their fate."""

    def __init__(self, data: Mapping[str, Any], source: Path, findings: Findings, *, prefix: str = "") -> None:
        self.data = data
        self.source = source
        self.findings = findings
        self.prefix = prefix
        self._paths = key_paths(data, source)
        self._claimed: set[str] = set()

    # Looking -------------------------------------------------------------------------------------------------------

    def peek(self, key: str, default: Any = None) -> Any:
        """The value of ``a.b``, or the default; the key keeps its fate."""
        here: Any = self.data
        for part in key.split("."):
            if not isinstance(here, dict) or part not in here:
                return default
            here = here[part]
        return here

    def word(self, key: str) -> str:
        """The value of ``a.b`` where it is a text, else "": for looking up what may be anything."""
        value = self.peek(key)
        return value if isinstance(value, str) else ""

    def has(self, key: str) -> bool:
        """Whether the file holds a value there that is not null."""
        return self.peek(key) is not None

    def known(self, field_name: str) -> Any:
        """What a flag or this file (or one read before it) says about a field; None where nobody did."""
        flag = self.findings.flags.get(field_name)
        return flag if flag is not None else self.findings.fields.get(field_name)

    def table(self, key: str) -> dict[str, Any]:
        """The table there; {} where there is none. Raises OVS109 where something else stands."""
        value = self.peek(key)
        if value is None or value == {}:
            self.ignore(key, EMPTY)
            return {}
        if not isinstance(value, dict):
            refuse("A table is expected here.", self.source, key=key, value=value)
        return dict(value)

    def inside(self, key: str) -> Draft:
        """A draft of the table there, whose keys are its own and are reported with the key before them."""
        table = self.table(key)
        self._claim(key)
        return Draft(table, self.source, self.findings, prefix=f"{self.prefix}{key}.")

    # Fates ---------------------------------------------------------------------------------------------------------

    def _claim(self, key: str) -> bool:
        """Whether the key is in the file and was free, as were those above and below it; it is taken now."""
        if self.peek(key, _MISSING) is _MISSING or self._taken(key):
            return False
        self._claimed.add(key)
        return True

    def _taken(self, key: str) -> bool:
        parts = key.split(".")
        above = any(".".join(parts[: n + 1]) in self._claimed for n in range(len(parts)))
        return above or any(one.startswith(f"{key}.") for one in self._claimed)

    def use(self, key: str, *fields: str) -> None:
        """The key set these fields (or helped to)."""
        if self._claim(key):
            self.findings.used[self.prefix + key] = list(fields)

    def ignore(self, key: str, reason: str) -> None:
        """The key is understood and does not matter, for this reason."""
        if self._claim(key):
            self.findings.ignored[self.prefix + key] = EMPTY if self.peek(key) is None else reason

    def ignore_all(self, keys: Mapping[str, str], *, under: str = "") -> None:
        """Each of these keys that the file holds is ignored, for its reason."""
        for key, reason in keys.items():
            self.ignore(f"{under}.{key}" if under else key, reason)

    def not_modelled(self, key: str, what: str) -> None:
        """The key matters for memory, and the forecast leaves it out: said beside the key and in a note."""
        if self._claim(key):
            self.findings.ignored[self.prefix + key] = NOT_MODELLED
            self.note(f"{self.prefix}{key}: {what}")

    def set(self, field_name: str, value: Any) -> None:
        self.findings.fields[field_name] = value
        self.findings.assumed.pop(field_name, None)

    def assume(self, field_name: str, value: Any, why: str) -> None:
        """The framework's default, where no file and no flag says otherwise."""
        if self.known(field_name) is None:
            self.findings.assumed[field_name] = Assumption(value, why)

    def need(self, field_name: str, why: str) -> None:
        """There is no Job before a flag gives this field."""
        if self.known(field_name) is None and field_name not in self.findings.missing:
            self.findings.missing.append(field_name)
            self.note(f"{field_name} is missing: {why}")

    def note(self, sentence: str) -> None:
        if sentence not in self.findings.notes:
            self.findings.notes.append(sentence)

    def describes_no_training(self, why: str) -> None:
        """All keys that are left belong to something else than training."""
        self.findings.trains = False
        self.note(f"This file describes no training job: {why}")

    def close(self) -> None:
        """What nobody asked for is unknown."""
        for path in self._paths:
            parts = path.split(".")
            if not any(".".join(parts[: n + 1]) in self._claimed for n in range(len(parts))):
                self.findings.unknown.append(self.prefix + path)

    # Taking with conversion ----------------------------------------------------------------------------------------

    def take(
        self, key: str, field_name: str, read: Callable[[str], Any], *, skip: Iterable[Any] = (), reason: str = EMPTY
    ) -> Any:
        """Set a field from a key; a value in ``skip`` leaves the default and is ignored for ``reason``.

        Returns the value that was set, or None.
        """
        if self.peek(key, _MISSING) is _MISSING or self._taken(key):
            return None
        raw = self.peek(key)
        if raw is None or any(raw is one or (raw == one and type(raw) is type(one)) for one in skip):
            self.ignore(key, reason)
            return None
        value = read(key)
        self.set(field_name, value)
        self.use(key, field_name)
        return value

    def boolean(self, key: str, default: bool = False) -> bool:
        """true or false, also as the text that YAML 1.2 or a command line leaves. Raises OVS109 for another value."""
        value = self.peek(key)
        if value is None:
            return default
        if isinstance(value, str) and value.strip().lower() in _WORDS:
            return _WORDS[value.strip().lower()]
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        refuse("true or false is expected here.", self.source, key=self.prefix + key, value=value)
        return default

    def number(self, key: str) -> float:
        """A finite number, also as text: YAML reads 2e-5 as one. Raises OVS109 for another value."""
        value = self.peek(key)
        try:
            if isinstance(value, bool):
                raise TypeError
            number = float(value)
            if not math.isfinite(number):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            refuse("A number is expected here.", self.source, key=self.prefix + key, value=value)
        return number

    def integer(self, key: str) -> int:
        """A whole number; 5e8 is one. Raises OVS109 for another value."""
        number = self.number(key)
        if number != int(number):
            refuse("A whole number is expected here.", self.source, key=self.prefix + key, value=self.peek(key))
        return int(number)

    def text(self, key: str) -> str:
        """A text. Raises OVS109 for another value."""
        value = self.peek(key)
        if not isinstance(value, str):
            refuse("A text is expected here.", self.source, key=self.prefix + key, value=value)
        return str(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Texts: a list, or one text with commas between. Raises OVS109 for another value."""
        value = self.peek(key)
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            refuse("A list of texts is expected here.", self.source, key=self.prefix + key, value=value)
        return tuple(value or ())


_WORDS: Final = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
