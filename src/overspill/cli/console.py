"""What the commands print through: tables for people, one JSON document for programs, one paragraph for mistakes.

Everything that prints takes ``--json``; JSON goes to standard output, notices to standard error, so that a
pipe stays clean. This file knows nothing of training.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["emit", "is_terminal", "notice", "print_json", "print_table"]


def is_terminal() -> bool:
    """Whether a person watches standard output."""
    return sys.stdout.isatty()


def emit(text: str = "") -> None:
    print(text, flush=True)


def notice(text: str) -> None:
    """Something worth saying once that is no result: to standard error."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value)
    print(text, flush=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """A table for people; the first column is text, the others are aligned right. Plain text in a pipe. Without a
    head where no column has a name."""
    cells = [[str(cell) for cell in row] for row in rows]
    if is_terminal():
        from rich.console import Console
        from rich.table import Table

        table = Table(
            title=title or None,
            title_justify="left",
            title_style="bold",
            box=None,
            pad_edge=False,
            show_header=any(columns),
        )
        for index, name in enumerate(columns):
            table.add_column(name, justify="left" if index == 0 else "right")
        for row in cells:
            table.add_row(*row)
        Console().print(table)
        return
    if title:
        emit(title)
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    for row in [*([list(columns)] if any(columns) else []), *cells]:
        line = "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        emit("  " + line.rstrip())
