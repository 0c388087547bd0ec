"""What a run makes in its directory, so that nothing else is deleted with it, and nothing else is written into it.

The names are those of tiers/disk (state), train/data (data) and interop/export (export); whoever adds a file to a run
adds its name here, or `overspill runs rm` asks for --force.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from overspill.errors import OverspillError
from overspill.files import SCRATCH_PREFIX

__all__ = ["COPIED_FILES", "first_stranger", "first_stranger_elsewhere", "refuse_inside_state"]

COPIED_FILES: Final = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
    "LICENSE.txt",
)
"""What an export takes along from the model's directory, beside config.json and the weights."""

_COPIED: Final = "|".join(map(re.escape, COPIED_FILES))
_SLOTS: Final = r"slots/(f\d{8}\.bin|probe\.tmp)|checkpoints/[^/]+/(f\d{8}\.bin|manifest\.json)"
_STORE: Final = rf"lock|manifest\.json|manifest\.next\.json|creating\.json|reserve\.bin|owner\.json(\.new)?|{_SLOTS}"
_OURS: Final = re.compile(
    r"(run\.json|job\.toml|summary\.json|metrics\.jsonl)(\.new)?|crash\.txt"
    r"|(data|\.data\.partial)/(tokens\.bin|counted\.bin|offsets\.bin|index\.json)"
    rf"|state/({_STORE})"
    rf"|export/[^/]+/(config\.json|model[0-9of-]*\.safetensors|model\.safetensors\.index\.json|{_COPIED})"
    rf"|(.*/)?{re.escape(SCRATCH_PREFIX)}[^/]*/.*"
)
_OURS_ELSEWHERE: Final = re.compile(_STORE)


def first_stranger(run: Path, roots: Iterable[Path] = ()) -> Path | None:
    """The first file or link that no run makes, in its resolved directory. Its state in ``roots`` is passed by."""
    return next(_strangers(run, _OURS, {root.resolve() for root in roots}), None)


def first_stranger_elsewhere(roots: Iterable[Path]) -> Path | None:
    """The same for the directories on other disks."""
    return next((file for root in roots for file in _strangers(root, _OURS_ELSEWHERE, set())), None)


def _strangers(place: Path, ours: re.Pattern[str], passing_by: set[Path]) -> Iterator[Path]:
    for folder, directories, names in os.walk(place):
        here = Path(folder)
        links = [name for name in directories if (here / name).is_symlink()]
        directories[:] = sorted(name for name in directories if here / name not in passing_by)
        for name in sorted([*names, *links]):
            if not ours.fullmatch((here / name).relative_to(place).as_posix()):
                yield here / name


def refuse_inside_state(path: Path, code: str) -> None:
    """Raises OverspillError ``code`` for a path inside the state of a run, where only its store makes and removes."""
    with suppress(OSError, RuntimeError, ValueError):  # a path that cannot be followed is its writer's to refuse
        for place in (path.resolve(), *path.resolve().parents):
            store = [place / name for name in ("reserve.bin", "owner.json", "slots")]
            if (place / "lock").is_file() and any(entry.exists() for entry in store):
                raise OverspillError(
                    code,
                    "This path lies inside the state of a run, where only Overspill's store writes and removes.",
                    field=str(path),
                    next_step=f"Give a path outside of {place}.",
                )
