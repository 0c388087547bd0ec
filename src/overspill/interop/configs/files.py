"""Reading the text of a configuration: JSON, YAML, or a command line; and the files that a configuration names.

YAML is read with PyYAML's safe loader, imported only when a file needs it. JSON comes first, since YAML would read it
too, more slowly and with other rules for numbers.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from overspill.errors import OverspillError
from overspill.files import parse_json, refuse_odd_texts
from overspill.interop.configs.core import Draft, refuse

__all__ = ["companion", "nested", "parse_arguments", "read_table"]

_COMMAND_LINES: Final = (".sh", ".txt", ".args")
#: A path in a configuration is often relative to the root of a repository, some folders above the file.
_FOLDERS_UP: Final = 4


def read_table(file: Path) -> dict[str, Any]:
    """The table in a .json, .yaml, .yml or command-line file.

    Raises OverspillError OVS109 for a file that cannot be read, is not what its name says, or holds no table.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise OverspillError(
            "OVS109",
            f"Cannot read the configuration: {error.strerror}.",
            field=str(file),
            next_step="Check the path.",
        ) from None
    except UnicodeDecodeError as error:
        raise OverspillError(
            "OVS109",
            f"The configuration is not UTF-8: {error.reason}.",
            field=str(file),
            next_step="Give a text file: JSON, YAML, or a command line.",
        ) from None
    try:
        data = _parse(file, text)
        refuse_odd_texts(data)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise OverspillError(
            "OVS109",
            f"The configuration cannot be parsed: {why}.",
            field=str(file),
            next_step="Give a text file: JSON, YAML, or a command line.",
        ) from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        refuse("The configuration holds no table with names at its top.", file)
    return dict(data)


def _parse(file: Path, text: str) -> Any:
    suffix = file.suffix.lower()
    if suffix == ".json":
        data = parse_json(text)
        return parse_arguments([str(one) for one in data]) if isinstance(data, list) else data
    if suffix in _COMMAND_LINES:
        return parse_arguments(shlex.split(text.replace("\\\n", " "), comments=True))
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    _refuse_circles(data)
    return data


def _refuse_circles(data: Any) -> None:
    """Raises ValueError where YAML's aliases make a node its own part, or a small file a huge one."""
    waiting: list[tuple[Any, frozenset[int]]] = [(data, frozenset())]
    visits = 0
    while waiting:
        node, above = waiting.pop()
        visits += 1
        if visits > 200_000:
            raise ValueError("its aliases stand for too many values")
        if not isinstance(node, dict | list):
            continue
        if id(node) in above:
            raise ValueError("a value is its own part")
        inner = node.values() if isinstance(node, dict) else node
        waiting += [(one, above | {id(node)}) for one in inner]


def parse_arguments(words: list[str]) -> dict[str, Any]:
    """``--key value`` words as a table; a key alone is true, several values are a list, ``--no_key`` is false.

    Words before the first ``--key`` (``accelerate launch train.py``) are skipped; of a script's launcher and program
    only the options after the last ``*.py`` count.
    """
    last = max((place for place, word in enumerate(words) if word.endswith(".py")), default=-1)
    table: dict[str, Any] = {}
    values: list[str] = []
    key = ""

    def keep() -> None:
        if key:
            table[key] = True if not values else _value(values[0]) if len(values) == 1 else list(map(_value, values))

    for word in words[last + 1 :]:
        if word.startswith("--") and len(word) > 2:
            keep()
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            values = [value] if equals else []
        elif key:
            values.append(word)
    keep()
    return table


def _value(text: str) -> Any:
    """A word of a command line as JSON would read it, or as it is."""
    low = text.lower()
    if low in ("true", "false"):
        return low == "true"
    if low in ("none", "null"):
        return None
    try:
        return parse_json(text)
    except ValueError:
        return text


def companion(draft: Draft, path: str, read: Callable[[Draft], None]) -> bool:
    """Read the file that a configuration names, where it lies beside it; its keys are reported as ``name:key``.

    Looked for beside the configuration and, as a relative path, in the folders above it. False where there is none.
    """
    for file in _places(draft.source, path):
        if file.is_file():
            child = Draft(read_table(file), file, draft.findings, prefix=f"{file.name}:")
            read(child)
            child.close()
            return True
    return False


def _places(source: Path, path: str) -> list[Path]:
    wanted = Path(path).expanduser()
    if wanted.is_absolute():
        return [wanted, source.parent / wanted.name]
    folders = [source.resolve().parent, *list(source.resolve().parents)[1 : _FOLDERS_UP + 1]]
    return [*(folder / wanted for folder in folders), source.parent / wanted.name]


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``{"model.path": 1}`` as ``{"model": {"path": 1}}``."""
    tables: dict[str, Any] = {}
    for name, value in fields.items():
        *path, last = name.split(".")
        here = tables
        for part in path:
            here = here.setdefault(part, {})
        here[last] = value
    return tables
