"""The cards in this machine, without torch: what nvidia-smi or rocm-smi say, where one is installed.

Each call starts the tool once and waits a few seconds at most; a tool that is missing, hangs or fails means that
nothing was found, since a forecast must come without a GPU too.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
from typing import Any, Final

from pydantic import Field

from overspill.catalog.accelerators import Accelerator
from overspill.catalog.user import UserCatalogue, find_accelerator
from overspill.errors import OverspillError
from overspill.schema import Frozen, Nbytes
from overspill.units import MiB

__all__ = ["Gpu", "card_of", "find_gpus"]

_WAIT_SECONDS: Final = 5.0
_NVIDIA: Final = ("index", "name", "memory.total", "memory.used", "driver_version")


class Gpu(Frozen):
    """One card as its driver names it."""

    index: int = Field(ge=0)
    name: str
    vendor: str
    memory_nbytes: Nbytes = Field(default=0, description="As the tool shows it; 0: it does not say (unified memory).")
    held_nbytes: Nbytes = Field(default=0, description="Held now, by other processes and the display.")
    driver: str = ""


def find_gpus() -> tuple[Gpu, ...] | None:
    """The cards that this process may use; None where there are none.

    CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES for AMD) leaves out the others, where it lists numbers.
    """
    found = _visible(_nvidia(), "CUDA_VISIBLE_DEVICES") or _visible(_amd(), "HIP_VISIBLE_DEVICES")
    return found or None


def card_of(gpu: Gpu, user: UserCatalogue | None = None) -> Accelerator | None:
    """The catalogue's card for a driver's name; None for one that it does not know."""
    own = user or UserCatalogue({}, {}, {}, {})
    try:
        return find_accelerator(gpu.name, own, memory_nbytes=gpu.memory_nbytes or None)
    except OverspillError:
        return None


def _visible(found: tuple[Gpu, ...], variable: str) -> tuple[Gpu, ...]:
    listed = os.environ.get(variable)
    if listed is None:
        return found
    words = [word.strip() for word in listed.split(",") if word.strip()]
    if not all(word.isdigit() for word in words):  # names of devices or of MIG slices: which, only the driver knows
        return found
    return tuple(gpu for word in words for gpu in found if gpu.index == int(word))


def _run(tool: str, *arguments: str) -> str:
    """What the tool prints; "" where it is missing, fails or takes too long."""
    path = shutil.which(tool)
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=_WAIT_SECONDS, check=False, errors="replace"
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _nvidia() -> tuple[Gpu, ...]:
    text = _run("nvidia-smi", f"--query-gpu={','.join(_NVIDIA)}", "--format=csv,noheader,nounits")
    found = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(_NVIDIA) or not row[0].strip().isdigit():
            continue
        index, name, total, used, driver = (cell.strip() for cell in row)
        found.append(
            Gpu(
                index=int(index),
                name=name,
                vendor="NVIDIA",
                memory_nbytes=_mib(total),
                held_nbytes=_mib(used),
                driver=driver,
            )
        )
    return tuple(found)


def _mib(cell: str) -> int:
    """A cell in MiB; 0 for "[N/A]", which unified memory gives."""
    return int(cell) * MiB if cell.isdigit() else 0


def _amd() -> tuple[Gpu, ...]:
    text = _run("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json")
    try:
        cards: Any = json.loads(text) if text else {}
    except ValueError:
        return ()
    found = []
    for key in sorted(cards if isinstance(cards, dict) else {}):
        facts = cards[key]
        if not key.startswith("card") or not key[4:].isdigit() or not isinstance(facts, dict):
            continue
        by_name = {str(name).lower(): str(value) for name, value in facts.items()}
        found.append(
            Gpu(
                index=int(key[4:]),
                name=by_name.get("card series") or by_name.get("card model") or by_name.get("device name") or "AMD GPU",
                vendor="AMD",
                memory_nbytes=_count(by_name.get("vram total memory (b)")),
                held_nbytes=_count(by_name.get("vram total used memory (b)")),
            )
        )
    return tuple(sorted(found, key=lambda gpu: gpu.index))


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
