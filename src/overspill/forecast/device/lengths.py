"""Lengths in tokens of the rows of a data file: of the longest batch is what memory depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from overspill.errors import OverspillError

__all__ = ["CHARACTERS_PER_TOKEN", "token_lengths"]

#: Of English text in the vocabularies of current models: 4.0 to 4.6 (OpenAI's and Hugging Face's documentation). The
#: smaller one counts more tokens.
CHARACTERS_PER_TOKEN = 4
_MOST_ROWS = 1_000_000


def token_lengths(file: Path, model: str, longest: int) -> tuple[list[int], str]:
    """(lengths, cut at ``longest``; how they were counted). Raises OverspillError OVS204."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OverspillError(
            "OVS204", f"The data file cannot be read: {error}.", field="--data", value=str(file)
        ) from None
    rows = [_text_of(line) for line in text.splitlines()[:_MOST_ROWS] if line.strip()]
    if file.suffix == ".txt":
        rows = [text]
    if not any(rows):
        raise OverspillError("OVS204", "The data file holds no text.", field="--data", value=str(file))
    count, how = _counter(model)
    return [max(1, min(longest, count(row))) for row in rows], how


def _text_of(line: str) -> str:
    try:
        row = json.loads(line)
    except ValueError:
        return line
    return _joined(row)


def _joined(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "\n".join(_joined(one) for one in value.values())
    if isinstance(value, list):
        return "\n".join(_joined(one) for one in value)
    return ""


def _counter(model: str) -> tuple[Any, str]:
    tokenizer = Path(model) / "tokenizer.json"
    if tokenizer.is_file():
        try:
            from tokenizers import Tokenizer
        except ImportError:
            pass
        else:
            loaded = Tokenizer.from_file(str(tokenizer))
            return (lambda text: len(loaded.encode(text).ids)), "counted with the model's tokenizer"
    return (lambda text: -(-len(text) // CHARACTERS_PER_TOKEN)), f"{CHARACTERS_PER_TOKEN} characters taken as a token"
