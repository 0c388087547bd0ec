"""Small files that must outlive a power cut, and what the system says about a disk, as errors with a code.

Not for training state: the store (tiers/disk) has its own system calls, labelled for its power-loss test. A file that
is renamed or made is only as durable as the directory that names it, hence `sync_directory` (as in SQLite and ALICE,
Pillai et al., OSDI 2014).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from overspill.errors import OverspillError

__all__ = [
    "SCRATCH_PREFIX",
    "TOO_MANY_FILES",
    "disk_errors",
    "encodes",
    "make_directory",
    "parse_json",
    "refuse_odd_texts",
    "replace_text",
    "sync_directory",
]

#: A speed test of a disk writes in a directory of this name, which goes when the test ends.
SCRATCH_PREFIX: Final = ".overspill-probe-"

#: What to do where the system gives this process no more file descriptors.
TOO_MANY_FILES: Final = "Raise the limit on open files (`ulimit -n 65536`) and try again."

_CODES = {errno.ENOSPC: "OVS401", errno.EDQUOT: "OVS401", errno.EFBIG: "OVS401", errno.EIO: "OVS403"}


@contextmanager
def disk_errors(
    path: Path, what: str, *, next_step: str = "Free space, or put the run directory on another disk."
) -> Iterator[None]:
    """Within it an OSError is OVS401 (full), OVS403 (the device fails) or else OVS402. ``next_step``: when full."""
    try:
        yield
    except OSError as error:
        code = _CODES.get(error.errno or 0, "OVS402")
        advice = next_step if code == "OVS401" else None
        if error.errno in (errno.EMFILE, errno.ENFILE):
            advice = TOO_MANY_FILES
        raise OverspillError(code, f"{what}: {error.strerror or error}.", field=str(path), next_step=advice) from None


def parse_json(text: str | bytes, *, odd_texts: bool = False) -> Any:
    """``json.loads`` for a file that may be damaged or the user's: whatever is wrong with it is a ValueError that says
    so in a phrase.

    json.loads lets a RecursionError out for deep nesting, and gives texts that no file can hold (half of a surrogate
    pair) or no path (a NUL); those are refused too, but for files of our own (``odd_texts``).
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not odd_texts:
        refuse_odd_texts(data)
    return data


def refuse_odd_texts(data: Any) -> None:
    """Raises ValueError for a text anywhere in plain data that holds a NUL or half of a surrogate pair."""
    waiting = [data]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, str) and ("\0" in one or not encodes(one)):
            raise ValueError(f"the text {one[:40]!a} holds a character that no file can hold")


def encodes(text: str) -> bool:
    """Whether a text is UTF-8: an argument or a path of the system may hold bytes that are none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def sync_directory(directory: Path) -> None:
    """What the directory names now, it names after a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path, mode: int = 0o777) -> None:
    """The directory with the parents that it lacks, each durable in the one above it."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True, mode=mode)
    for path in missing:
        sync_directory(path.parent)


def replace_text(file: Path, text: str) -> None:
    """The file with this text, readable by its owner only: after a crash it holds the old text or the new one."""
    data = text.encode()  # what is no UTF-8 leaves nothing behind
    new = file.with_name(file.name + ".new")
    new.unlink(missing_ok=True)  # a crash may have left it, and a copy by hard links (cp -al) may have it too
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)
    sync_directory(file.parent)
