"""The bundled catalogue of models: the config keys that a shape follows from, and the parameter count that is stated.

models.jsonl holds one model a line, made by tools/make_model_catalog.py; a lookup finds the line by its name and parses
that one. Here are facts only: what they mean is the model layer's. Where they come from: docs/theory/models.md.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from overspill.errors import OverspillError

__all__ = ["CatalogModel", "every_model", "find_model", "model_names", "nearest_names", "same_shape_by_name"]

_FILE: Final = Path(__file__).with_name("models.jsonl")
_NAME: Final = re.compile(r'^\{"id": "([^"]+)"(?:, "also": \[([^\]]*)\])?', re.MULTILINE)

#: Ends of names that say how a release was quantised, stored or tuned, not what it is.
_MARKS: Final = re.compile(
    r"-(?:gptq|awq|gguf|mlx|fp8|fp16|bf16|nf4|nvfp4|int4|int8|4bit|8bit|bnb|unsloth|hf|base|qat|dynamic"
    r"|(?:instruct|it|chat|thinking|sft|dpo)(?:-[0-9]{4})?)$"
)


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One row.

    config: as in its config.json, keys that change neither shape nor memory left out. source: where it was read;
    confidence: A read there, B recalled. numel: its parameters, tied ones once. figure: where the published count that
    equals it comes from, "" where none is known. published: a published count that is not the same; ``note`` says why.
    also: other hub ids of the same model.
    """

    name: str
    config: dict[str, Any]
    source: str
    confidence: str
    numel: int
    figure: str
    published: int | None
    note: str
    also: tuple[str, ...]


@cache
def _index() -> tuple[str, dict[str, int], tuple[str, ...]]:
    """The file's text; where the line of each lower-case id starts; the ids as they are written."""
    text = _FILE.read_text(encoding="utf-8")
    starts: dict[str, int] = {}
    names: list[str] = []
    for match in _NAME.finditer(text):
        names.append(match[1])
        for name in (match[1], *re.findall(r'"([^"]+)"', match[2] or "")):
            starts[name.lower()] = match.start()
    return text, starts, tuple(names)


def model_names() -> tuple[str, ...]:
    """Hub ids of every model in the catalogue, in its order."""
    return _index()[2]


def find_model(name: str) -> CatalogModel | None:
    """A model by its hub id, in any case, with or without its organisation; None where there is none.

    Raises OverspillError OVS201 for a name without organisation that several have, with their ids.
    """
    text, starts, _ = _index()
    wanted = name.strip().lower()
    start = starts.get(wanted)
    if start is None and "/" not in wanted:
        found = sorted({at: known for known, at in starts.items() if known.rpartition("/")[2] == wanted}.items())
        if len(found) > 1:
            raise OverspillError(
                "OVS201",
                "Several models of the catalogue have this name.",
                field="model",
                value=name,
                limit=", ".join(_row(text, at).name for at, _ in found),
                next_step="Write it with its organisation.",
            )
        start = found[0][0] if found else None
    return None if start is None else _row(text, start)


def same_shape_by_name(name: str) -> CatalogModel | None:
    """The model that ``name`` is a copy, a quantised copy or a tuned release of, going by the name alone; or None.

    ``unsloth/Meta-Llama-3.1-8B-bnb-4bit`` is Llama-3.1-8B: the organisation, the marks of a quantiser and those of an
    instruction-tuned release (or of a base) are left out on both sides. Only where all rows with what remains agree in
    their count. Who uses it says so: a tuned release may have added rows to its vocabulary.
    """
    text, starts, _ = _index()
    wanted = _stem(name)
    rows = [_row(text, at) for at in dict.fromkeys(at for known, at in starts.items() if _stem(known) == wanted)]
    return rows[0] if rows and len({row.numel for row in rows}) == 1 else None


def _stem(name: str) -> str:
    last = name.strip().lower().rpartition("/")[2].removeprefix("meta-")
    while (shorter := _MARKS.sub("", last)) != last:
        last = shorter
    return last


def nearest_names(name: str, count: int = 5) -> tuple[str, ...]:
    """The ids that are spelt most like ``name``, the closest first: by the part behind the organisation."""
    wanted = name.strip().lower().rpartition("/")[2]
    known = {each.rpartition("/")[2].lower(): each for each in model_names()}
    return tuple(known[each] for each in difflib.get_close_matches(wanted, known, n=count, cutoff=0.5))


def every_model() -> Iterator[CatalogModel]:
    """All rows, parsed; a few milliseconds."""
    text, starts, _ = _index()
    for start in dict.fromkeys(starts.values()):
        yield _row(text, start)


def _row(text: str, start: int) -> CatalogModel:
    row = json.loads(text[start : text.index("\n", start)])
    return CatalogModel(
        name=row["id"],
        config=row["config"],
        source=row["source"],
        confidence=row["confidence"],
        numel=row["numel"],
        figure=row.get("figure", ""),
        published=row.get("published"),
        note=row.get("note", ""),
        also=tuple(row.get("also", ())),
    )
