"""Read the training files: .txt (a whole document each) and .jsonl (a row each). No tokens yet.

A .jsonl row holds one of: ``text``; ``prompt`` and ``completion``; ``question`` and ``answer``; ``instruction``
(with ``input``, if any) and ``output``; or ``messages`` (a list of {"role", "content"}). Every mistake names its
file and line (OVS204).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from overspill.errors import OverspillError
from overspill.files import parse_json

__all__ = ["Row", "data_files", "read_rows", "unusable"]

_BLOCK_CHARS: Final = 1 << 15
_PAIRS: Final = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
_KEYS_HELP: Final = (
    '"text", "prompt" and "completion", "question" and "answer", "instruction" and "output", or "messages"'
)


@dataclass(frozen=True)
class Row:
    """One document or example. ``blocks`` gives plain text in pieces; ``messages`` a conversation.

    pair_of_task: the two texts came as question/answer or instruction/output, which says what they are (a user's
    turn and the model's) but not how they are joined.
    """

    file: Path
    line: int | None
    kind: Literal["text", "completion", "chat"]
    blocks: Callable[[], Iterator[str]] | None = None
    prompt: str = ""
    completion: str = ""
    pair_of_task: bool = False
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.line is not None else str(self.file)


def unusable(message: str, where: str | Path, next_step: str | None = None) -> NoReturn:
    raise OverspillError("OVS204", message, field=str(where), next_step=next_step)


def data_files(path: str | tuple[str, ...]) -> list[Path]:
    """The files of ``data.path``; all must exist, hold something and be .txt or .jsonl."""
    files = [Path(path)] if isinstance(path, str) else [Path(name) for name in path]
    if not files:
        unusable("No data file is named.", "data.path")
    for file in files:
        if not file.is_file():
            unusable("The data file does not exist." if not file.exists() else "This is no file.", file)
        if file.suffix.lower() not in (".txt", ".jsonl"):
            unusable("Data files are .txt or .jsonl.", file, "Convert it: one JSON object a line, or plain text.")
        try:
            with file.open("rb") as stream:
                empty = not stream.read(1)
        except OSError as error:
            unusable(f"The data file cannot be read: {error.strerror}.", file)
        if empty:
            unusable("The data file is empty.", file)
    return files


def read_rows(files: list[Path], kind: Literal["auto", "text", "completion", "chat"]) -> Iterator[Row]:
    """All rows in order. ``kind`` other than auto says what .jsonl rows must hold."""
    for file in files:
        if file.suffix.lower() == ".txt":
            yield Row(file, None, "text", blocks=_text_blocks(file))
            continue
        for line, text in _lines(file):
            if text.strip():
                yield _jsonl_row(file, line, text, kind)


def _not_utf8(file: Path, error: UnicodeDecodeError, line: int | None = None) -> NoReturn:
    where = f"{file}:{line}" if line is not None else file
    unusable(f"The data file is not UTF-8: {error.reason}.", where, "Convert it with `iconv -t UTF-8`.")


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with file.open(encoding="utf-8-sig") as stream:
            for number, text in enumerate(stream, 1):
                yield number, text
    except UnicodeDecodeError as error:
        _not_utf8(file, error, number + 1)
    except OSError as error:
        unusable(f"The data file cannot be read: {error.strerror}.", file)


def _text_blocks(file: Path) -> Callable[[], Iterator[str]]:
    def blocks() -> Iterator[str]:
        try:
            with file.open(encoding="utf-8-sig") as stream:
                while block := stream.read(_BLOCK_CHARS):
                    yield block
        except UnicodeDecodeError as error:
            _not_utf8(file, error)
        except OSError as error:
            unusable(f"The data file cannot be read: {error.strerror}.", file)

    return blocks


def _jsonl_row(file: Path, line: int, text: str, kind: str) -> Row:
    where = f"{file}:{line}"
    try:
        row = parse_json(text)
    except ValueError as error:
        unusable(f"The line is no JSON that can be read: {error}.", where)
    if not isinstance(row, dict):
        unusable("The line is no JSON object.", where, f"A row holds {_KEYS_HELP}.")
    if kind in ("auto", "chat") and "messages" in row:
        return _chat_row(file, line, row["messages"])
    pair = next((pair for pair in _PAIRS if pair[0] in row and pair[1] in row), None)
    if kind in ("auto", "completion") and pair is not None:
        prompt, completion = _text(row, pair[0], where), _text(row, pair[1], where)
        if pair[0] == "instruction" and row.get("input"):
            prompt = f"{prompt}\n\n{_text(row, 'input', where)}"
        return Row(file, line, "completion", prompt=prompt, completion=completion, pair_of_task=pair[0] != "prompt")
    if kind in ("auto", "text") and "text" in row:
        content = _text(row, "text", where)
        return Row(file, line, "text", blocks=lambda: iter((content,)))
    found = ", ".join(sorted(str(key) for key in row)) or "nothing"
    wanted = {"text": '"text"', "completion": _KEYS_HELP.split(", or")[0].partition(", ")[2], "chat": '"messages"'}
    unusable(
        f"The row has no text to train on: it holds {found}.", where, f"A row holds {wanted.get(kind, _KEYS_HELP)}."
    )


def _text(row: dict[str, Any], key: str, where: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        unusable(f'"{key}" is no text.', where)
    return value


def _chat_row(file: Path, line: int, messages: Any) -> Row:
    where = f"{file}:{line}"
    if not isinstance(messages, list) or not messages:
        unusable('"messages" is no list of messages.', where)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            unusable('A message is an object with "role" and "content".', where)
    if not any(message["role"] == "assistant" for message in messages):
        unusable("The conversation has no assistant's turn, so there is nothing to train on.", where)
    return Row(file, line, "chat", messages=tuple(messages))
