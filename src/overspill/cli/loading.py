"""Loads torch and transformers when a command needs them, and says which extra to install when they are missing."""

from __future__ import annotations

import importlib
import os

from overspill.errors import OverspillError

__all__ = ["import_training"]


def import_training(command: str) -> None:
    """Import torch, transformers and the compiled core. Raises OverspillError OVS104."""
    # transformers prints bars and advice of its own; the run's output is ours. A user's own setting wins.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and a forked DataLoader worker do not mix
    # oneDNN keeps a compiled kernel for each shape it meets, 1,024 of them: over the lengths of padded text a small
    # bf16 model grew by 900 MiB outside of every budget. With 64 the hot ones stay, and speed was the same.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    # Threads that wait by spinning take cores from the update threads: 1.54 s a step against 1.16 s on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    for module, extra in (("torch", "train"), ("transformers", "hf")):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise OverspillError(
                "OVS104",
                f"`overspill {command}` needs {module}, which is not installed.",
                next_step=f"`pip install 'overspill[{extra}]'`.",
            ) from None
    logging = importlib.import_module("transformers.utils.logging")
    logging.disable_progress_bar()
    try:
        importlib.import_module("overspill._native")
    except ModuleNotFoundError as error:
        if error.name != "overspill._native":
            raise
        raise OverspillError(
            "OVS104",
            "Overspill's compiled core is not built.",
            next_step="Run `make setup` in a checkout, or `pip install .`.",
        ) from None
