"""Write a Hugging Face model directory, streaming: one tensor at a time, from wherever it lies.

Names, dtypes and shapes are known first, so each file's header is written before its data and no tensor has to wait
in memory for another. Everything goes into a directory beside the final one, is synced and then renamed: a killed
export leaves nothing under the final name. Tied weights are the caller's to give once (`model_tensors` does).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from overspill.checkpoint.contents import COPIED_FILES, refuse_inside_state
from overspill.errors import OverspillError
from overspill.files import disk_errors, parse_json, sync_directory
from overspill.interop.safetensors_file import ITEM_NBYTES, header_bytes
from overspill.interop.weights import TORCH_DTYPES
from overspill.units import GiB, MiB, format_nbytes

__all__ = ["ExportReport", "ExportTensor", "export_safetensors", "model_tensors"]

ExportTensor = tuple[str, torch.dtype, tuple[int, ...], Callable[[], Any]]
"""(name, dtype, shape, read): ``read`` gives the tensor, as torch or numpy, when its turn comes."""

_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_CONFIG_NAMES: Final = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float16: "float16"}
_STOPPED: Final = "The export stopped, and nothing was left under the final name"
_SYNC_EVERY_NBYTES: Final = 64 * MiB  # written pages are synced and given back: inside a cgroup they count


@dataclass(frozen=True)
class ExportReport:
    directory: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int


def model_tensors(model: Any) -> Iterator[ExportTensor]:
    """A model's parameters and persistent buffers, each once: a tied weight under the name that transformers keeps."""
    tied_away = set(getattr(model, "all_tied_weights_keys", None) or {})
    seen: set[int] = set()
    buffers = [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
    named = [*model.named_parameters(remove_duplicate=False), *buffers]
    named.sort(key=lambda pair: pair[0] in tied_away)  # stable: the kept names come first
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.dtype, tuple(tensor.shape), tensor.detach


def export_safetensors(
    tensors: Iterable[ExportTensor],
    directory: str | Path,
    *,
    source_dir: str | Path,
    tokenizer_dir: str | Path | None = None,
    shard_nbytes: int = 2 * GiB,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write the tensors as safetensors shards with their index, and config, tokenizer and generation config.

    Args:
        tensors: see ExportTensor; each ``read`` is called once, in order within a shard, and its result dropped
            before the next.
        directory: the new model directory; it must not exist, or be empty.
        source_dir: the model directory that config.json and the rest are copied from; ``dtype`` in the config
            is set to what is written.
        tokenizer_dir: where the tokenizer files are, when not in source_dir.
        shard_nbytes: largest file, except where one tensor is larger.
        on_progress: called with (bytes written, bytes in all).

    Raises:
        OverspillError: OVS401 for a full disk, OVS402 for a directory that cannot be written, OVS605 for one
            that is not empty or inside a run's state, OVS403 for an I/O error, OVS405 when another export writes
            there, OVS201 without config.json.
    """
    final = Path(directory).absolute()
    refuse_inside_state(final, "OVS605")
    listed = list(tensors)
    _check_tensors(listed)
    total = sum(_nbytes(tensor) for tensor in listed)
    shards = _shards(listed, shard_nbytes)
    with disk_errors(final, _STOPPED, next_step="Free space or give another directory."):
        if final.exists() and (not final.is_dir() or any(final.iterdir())):
            raise OverspillError(
                "OVS605",
                "The export's directory exists already and is not empty.",
                field=str(final),
                next_step="Give another directory, or remove it first.",
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(final.parent).free
        if free < total:
            raise OverspillError(
                "OVS401",
                "The exported weights do not fit on the disk.",
                field=str(final),
                value=format_nbytes(total),
                limit=f"{format_nbytes(free)} free",
                next_step="Free space or give another directory.",
            )
        with _partial_directory(final) as partial:
            _copy_files(Path(source_dir), Path(tokenizer_dir or source_dir), partial, listed)
            done = 0
            for name, members in shards:
                for nbytes in _write_shard(partial / name, members):
                    done += nbytes
                    if on_progress is not None:
                        on_progress(done, total)
            if len(shards) > 1:
                weight_map = {tensor[0]: name for name, members in shards for tensor in members}
                index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
                _write_synced(partial / "model.safetensors.index.json", _json_bytes(index))
            sync_directory(partial)
            partial.rename(final)
            sync_directory(final.parent)
    return ExportReport(final, tuple(name for name, _ in shards), len(listed), total)


def _check_tensors(listed: list[ExportTensor]) -> None:
    names = [tensor[0] for tensor in listed]
    assert len(names) == len(set(names)), "a tensor is given twice"
    for name, dtype, _, _ in listed:
        if dtype not in _NAMES:
            raise OverspillError("OVS206", "Tensors of this dtype are not exported.", field=name, value=dtype)


def _nbytes(tensor: ExportTensor) -> int:
    return math.prod(tensor[2]) * ITEM_NBYTES[_NAMES[tensor[1]]]


def _shards(listed: list[ExportTensor], shard_nbytes: int) -> list[tuple[str, list[ExportTensor]]]:
    groups: list[list[ExportTensor]] = [[]]
    filled = 0
    for tensor in listed:
        if groups[-1] and filled + _nbytes(tensor) > shard_nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += _nbytes(tensor)
    for group in groups:  # wide dtypes first, so that every tensor is aligned to its own item
        group.sort(key=lambda tensor: -ITEM_NBYTES[_NAMES[tensor[1]]])
    if len(groups) == 1:
        return [("model.safetensors", groups[0])]
    count = len(groups)
    return [(f"model-{number:05d}-of-{count:05d}.safetensors", group) for number, group in enumerate(groups, 1)]


def _write_shard(file: Path, members: list[ExportTensor]) -> Iterator[int]:
    """Write one file, yielding the bytes of each tensor as they are handed to the system."""
    head = header_bytes([(name, _NAMES[dtype], shape) for name, dtype, shape, _ in members], {"format": "pt"})
    with file.open("wb", buffering=0) as stream:
        descriptor = stream.fileno()
        at = _write_all(descriptor, memoryview(head))
        synced = 0
        for tensor in members:
            memory = _memory(tensor)
            piece = memory
            for begin in range(0, len(memory), _SYNC_EVERY_NBYTES):
                piece = memory[begin : begin + _SYNC_EVERY_NBYTES]
                at += _write_all(descriptor, piece)
                if at - synced >= _SYNC_EVERY_NBYTES:
                    os.fdatasync(descriptor)
                    os.posix_fadvise(descriptor, synced, at - synced, os.POSIX_FADV_DONTNEED)
                    synced = at
                yield len(piece)
            del memory, piece  # or the next tensor is read while this one is still held
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _memory(tensor: ExportTensor) -> memoryview:
    """What ``read`` gave, as bytes; a tensor that is not on the CPU or not contiguous is copied, alone."""
    name, dtype, shape, read = tensor
    value = read()
    if isinstance(value, torch.Tensor):
        assert value.dtype == dtype and tuple(value.shape) == tuple(shape), f"{name}: not what was announced"
        value = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    array: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    assert array.nbytes == _nbytes(tensor), f"{name}: {array.nbytes} bytes instead of {_nbytes(tensor)}"
    return memoryview(array)


def _write_all(descriptor: int, memory: memoryview) -> int:
    left = memory
    while len(left):
        left = left[os.write(descriptor, left) :]
    return len(memory)


def _copy_files(source: Path, tokenizer: Path, target: Path, listed: list[ExportTensor]) -> None:
    config_file = source / "config.json"
    try:
        config = parse_json(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise OverspillError("OVS201", "The source directory has no readable config.json.", field=str(source)) from None
    # from_pretrained loads in the dtype that the config names, whatever the file holds.
    by_dtype: dict[torch.dtype, int] = {}
    for tensor in listed:
        by_dtype[tensor[1]] = by_dtype.get(tensor[1], 0) + _nbytes(tensor)
    main_dtype = max(by_dtype, key=lambda dtype: by_dtype[dtype]) if by_dtype else None
    if main_dtype in _CONFIG_NAMES:
        config.pop("torch_dtype", None)
        config["dtype"] = _CONFIG_NAMES[main_dtype]
    _write_synced(target / "config.json", _json_bytes(config))
    for directory in (source, tokenizer):  # the tokenizer's own files win
        for name in COPIED_FILES:
            if (directory / name).is_file():
                _write_synced(target / name, (directory / name).read_bytes())


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _write_synced(file: Path, data: bytes) -> None:
    with file.open("wb", buffering=0) as stream:
        _write_all(stream.fileno(), memoryview(data))
        os.fsync(stream.fileno())


@contextmanager
def _partial_directory(final: Path) -> Iterator[Path]:
    """``.NAME.partial`` beside the final directory, locked and emptied of what a killed export left there."""
    partial = final.parent / f".{final.name}.partial"
    partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OverspillError(
                "OVS405",
                "Another process is exporting there.",
                field=str(final),
                next_step="Wait for it, or give another directory.",
            ) from None
        for left in partial.iterdir():
            left.unlink()
        try:
            yield partial
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)
