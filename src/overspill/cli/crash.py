"""Where the traceback of an unexpected exception goes: the run's crash.txt, or a temporary file.

A short message on the terminal is no reason to lose the evidence. Nothing here handles user mistakes.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from overspill import __version__

__all__ = ["crashes_go_to", "save_traceback"]

_run: ContextVar[Path | None] = ContextVar("overspill_run", default=None)


@contextlib.contextmanager
def crashes_go_to(run: Path) -> Iterator[None]:
    """Within this block an unexpected exception is written to ``run/crash.txt``."""
    token = _run.set(run)
    yield
    _run.reset(token)  # not in a finally: after an exception the place must still be known


def save_traceback(fault: BaseException) -> Path:
    """Write the traceback with the versions it needs to be read with; returns the file."""
    text = "".join(traceback.format_exception(fault))
    head = f"overspill {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
    torch = sys.modules.get("torch")
    head += f"torch {torch.__version__}\n" if torch is not None else ""
    head += f"command: {' '.join(sys.argv)}\n\n"
    run = _run.get()
    if run is not None and run.is_dir():
        file = run / "crash.txt"
        try:
            file.write_text(head + text, encoding="utf-8", errors="backslashreplace")
        except OSError:
            pass  # a full or read-only disk may be the very cause: the temporary directory is the second choice
        else:
            return file
    with tempfile.NamedTemporaryFile(
        "w", prefix="overspill-crash-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
    ) as out:
        out.write(head + text)
    return Path(out.name)
