"""Builds the emulated accelerator's C++ once and keeps it, keyed by its sources, torch, Python and flags.

Run as ``python -m testing.emulated_accelerator._build`` it builds into a directory and exits: the build happens in a
process of its own, so that a caller who only wants it built never loads it (loading registers the device for good).
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

__all__ = ["EXTENSION_NAME", "BuildError", "build", "has_compiler", "load_extension"]

EXTENSION_NAME = "emulated_accelerator_C"
FLAGS = ["-O1", "-std=c++20", "-Wno-interference-size"]
SOURCES = Path(__file__).parent / "csrc"
REPOSITORY = Path(__file__).resolve().parents[2]


class BuildError(RuntimeError):
    """The extension cannot be built here; the message is the compiler's first error."""


def build(*, cache: Path | None = None) -> Path:
    """The built extension's path; builds it if these sources were not built before (20 s on two free cores)."""
    directory = (cache or _cache_directory()) / _key()
    library = directory / f"{EXTENSION_NAME}.so"
    if library.exists():
        return library
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The kernel frees this lock when its holder dies, so a killed build never blocks the next one.
    with Path(f"{directory}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build_into(directory)
    return library


def has_compiler() -> bool:
    """Whether a C++ compiler is here: the one that CXX names, else the one that PyTorch would take."""
    return shutil.which(shlex.split(os.environ.get("CXX", "c++"))[0]) is not None


def load_extension(library: Path) -> ModuleType:
    """Loads the built extension: from here on this process has the device."""
    loader = importlib.machinery.ExtensionFileLoader(EXTENSION_NAME, str(library))
    spec = importlib.util.spec_from_file_location(EXTENSION_NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _build_into(directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent) as name:
        # ninja and the compiler may be installed beside this Python without being on the path.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", __spec__.name, name]
        ran = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        built = Path(name) / f"{EXTENSION_NAME}.so"
        if ran.returncode != 0 or not built.exists():
            raise BuildError(_first_error(ran.stdout + ran.stderr))
        directory.mkdir(exist_ok=True)
        shutil.copy(built, directory / "partial")
        (directory / "partial").rename(directory / built.name)


def _first_error(output: str) -> str:
    lines = output.splitlines()
    for mark in (" error:", "Error: ", "not found"):
        for line in lines:
            if mark in line:
                return line.strip()
    return lines[-1] if lines else "the build said nothing"


def _key() -> str:
    import torch

    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _cache_directory() -> Path:
    if os.access(REPOSITORY, os.W_OK):
        return REPOSITORY / "build" / "emulated_accelerator"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "overspill" / "emulated_accelerator"


def _main(directory: str) -> None:
    from torch.utils.cpp_extension import load

    load(
        EXTENSION_NAME,
        sources=[str(source) for source in sorted(SOURCES.glob("*.cpp"))],
        extra_cflags=FLAGS,
        build_directory=directory,
        with_cuda=False,
        verbose=True,
    )


if __name__ == "__main__":
    _main(sys.argv[1])
