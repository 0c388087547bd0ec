"""Token files: what tokenising gave, kept in the run's directory, so that a resume need not do it again.

    index.json     what the files hold, and the key of what they were made from; written last
    tokens.bin     uint16, or int32 for vocabularies above 65,536; one sequence behind the other
    counted.bin    one byte a token: whether the loss counts it
    offsets.bin    int64, first token of each sequence and the end

A directory is written beside its final name and renamed when everything is on disk; one without index.json, or
with another key, is not believed and made anew. index.json holds a checksum (xxh3) of each file and of itself, so
that a flipped bit does not train something else.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import xxhash

from overspill.files import disk_errors, parse_json, sync_directory
from overspill.train.data.pack import Sequence

__all__ = ["DataFacts", "TokenWriter", "damaged_file", "file_digest", "read_facts", "token_dtype"]

FORMAT: Final = 1
_INDEX: Final = "index.json"
_NAMES: Final = ("tokens.bin", "counted.bin", "offsets.bin")
_BLOCK_NBYTES: Final = 1 << 20
_WHAT: Final = "The token files cannot be written"


@dataclass(frozen=True)
class DataFacts:
    """What was made of the files, and what was left out.

    key: of everything that the tokens depend on; settings_key: of all of it but the text files.
    dropped_tokens: of the last, incomplete sequence (packing), or cut off from documents that are too long.
    unlabelled_tokens: of sequences in which the loss would count nothing.
    skipped_rows: rows without text or without an answer; skipped_by_kind: of which kind they are.
    cut_rows: conversations and answers longer than ``seq_len`` (no packing); unlabelled_rows: of those, and of others,
        the ones without a token that the loss would count.
    digests: checksum of each file; empty where an earlier version made them.
    """

    key: str
    settings_key: str
    seq_len: int
    packing: bool
    pad_token: int
    token_dtype: str
    sequences: int
    tokens: int
    counted_tokens: int
    rows: int
    rows_by_kind: dict[str, int]
    skipped_rows: int
    dropped_tokens: int
    unlabelled_tokens: int
    skipped_by_kind: dict[str, int] = field(default_factory=dict)
    cut_rows: int = 0
    unlabelled_rows: int = 0
    digests: dict[str, str] = field(default_factory=dict)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def file_digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_NBYTES):
            digest.update(block)
    return digest.hexdigest()


def read_facts(directory: Path, key: str) -> DataFacts | None:
    """The facts of a finished directory with this key; None where there is none, or one of another origin, or where
    index.json is damaged. It says nothing of the other files: see `damaged_file`."""
    try:
        index = parse_json((directory / _INDEX).read_text(encoding="utf-8"))
        checksum = index.pop("checksum", None)
        if checksum is not None and checksum != _index_digest(index):
            return None
        if index.pop("format") != FORMAT or index["key"] != key:
            return None
        facts = DataFacts(**index)
        np.dtype(facts.token_dtype)
        return facts
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def damaged_file(directory: Path, facts: DataFacts) -> tuple[Path, str] | None:
    """The first token file that is not as it was written, and what is wrong with it; None where all are whole."""
    expected = {
        "tokens.bin": facts.tokens * np.dtype(facts.token_dtype).itemsize,
        "counted.bin": facts.tokens,
        "offsets.bin": (facts.sequences + 1) * 8,
    }
    for name, nbytes in expected.items():
        file = directory / name
        try:
            found = file.stat().st_size
            if found != nbytes:
                return file, f"it has {found} bytes, not {nbytes}"
            if name in facts.digests and file_digest(file) != facts.digests[name]:
                return file, "its checksum is not the one that was written down"
        except OSError as error:
            return file, error.strerror or str(error)
    return None


def _index_digest(index: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(index, sort_keys=True).encode())


class TokenWriter:
    """Appends sequences to the files of a directory in the making; `finish` gives it its name."""

    def __init__(self, directory: Path, dtype: np.dtype[Any]) -> None:
        self._final = directory
        self._partial = directory.parent / f".{directory.name}.partial"
        self._dtype = dtype
        self._files: list[IO[bytes]] = []
        self._digests = [xxhash.xxh3_128() for _ in _NAMES]
        self.sequences = 0
        self.tokens = 0
        self.counted_tokens = 0

    def __enter__(self) -> TokenWriter:
        with disk_errors(self._final, _WHAT):
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
            self._files = [(self._partial / name).open("wb", buffering=_BLOCK_NBYTES) for name in _NAMES]
            self._write(2, np.int64(0).tobytes())
        return self

    def append(self, sequence: Sequence) -> None:
        tokens, counted = sequence
        self.sequences += 1
        self.tokens += len(tokens)
        self.counted_tokens += int(counted[1:].sum())
        with disk_errors(self._final, _WHAT):
            self._write(0, tokens.astype(self._dtype).tobytes())
            self._write(1, counted.astype(np.uint8).tobytes())
            self._write(2, np.int64(self.tokens).tobytes())

    def _write(self, which: int, data: bytes) -> None:
        self._files[which].write(data)
        self._digests[which].update(data)

    @property
    def digests(self) -> dict[str, str]:
        """Of what was written so far, by file."""
        return {name: digest.hexdigest() for name, digest in zip(_NAMES, self._digests, strict=True)}

    def finish(self, facts: DataFacts) -> None:
        with disk_errors(self._final, _WHAT):
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
            with (self._partial / _INDEX).open("wb") as index:
                content = {"format": FORMAT, **asdict(facts)}
                content["checksum"] = _index_digest(content)
                index.write((json.dumps(content, indent=1) + "\n").encode())
                index.flush()
                os.fsync(index.fileno())
            sync_directory(self._partial)
            if self._final.exists():
                shutil.rmtree(self._final)
            self._partial.rename(self._final)
            sync_directory(self._final.parent)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        for file in self._files:
            try:
                file.close()
            except OSError:  # a full disk; append or finish has said so already
                continue
        shutil.rmtree(self._partial, ignore_errors=True)
