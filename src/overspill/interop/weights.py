"""Fill a model's parameters in place: from safetensors files, or with random numbers.

The parameters already have their memory (the session's pool, or an ordinary model); bytes go from the file into
it, with a bounce buffer of some MiB only where the dtype differs. So the peak above the model is one buffer; where
transformers stores a tensor in another shape than it computes with (stacked experts), it is that one tensor.
Pickles (pytorch_model.bin) are never read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from overspill.errors import OverspillError
from overspill.files import parse_json
from overspill.interop.safetensors_file import PIECE_NBYTES, TensorEntry, read_entries, read_pieces

__all__ = [
    "TORCH_DTYPES",
    "LoadReport",
    "allocate_parameters",
    "checkpoint_entries",
    "initialise_weights",
    "load_weights",
]

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
_SINGLE_NAME: Final = "model.safetensors"
_INDEX_NAME: Final = "model.safetensors.index.json"
_PICKLE_NAMES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class LoadReport:
    """What was loaded. ``unused`` names the file's tensors for which the model has no place."""

    tensors: int
    nbytes: int
    unused: tuple[str, ...]


def checkpoint_entries(directory: Path) -> dict[str, TensorEntry]:
    """All tensors of a model directory by name, from its index or its one file. Raises OverspillError OVS202."""
    index = directory / _INDEX_NAME
    if index.is_file():
        return _indexed_entries(directory, index)
    single = directory / _SINGLE_NAME
    if single.is_file():
        return read_entries(single)
    pickles = [name for name in _PICKLE_NAMES if (directory / name).is_file()]
    if pickles:
        raise OverspillError(
            "OVS202",
            f"The weights are in {pickles[0]} only, a pickle, which could run code when it is read.",
            field=str(directory),
            next_step="Convert it once, where you trust it: `AutoModelForCausalLM.from_pretrained(OLD)"
            ".save_pretrained(NEW)` writes safetensors.",
        )
    raise OverspillError("OVS202", f"The model directory has no {_SINGLE_NAME}.", field=str(directory))


def _indexed_entries(directory: Path, index: Path) -> dict[str, TensorEntry]:
    try:
        weight_map = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise OverspillError("OVS202", f"{_INDEX_NAME} is damaged: it has no weight_map.", field=str(index)) from None
    found: dict[str, TensorEntry] = {}
    for file_name in sorted(set(names.values())):
        file = directory / file_name
        if Path(file_name).name != file_name or not file.is_file():
            raise OverspillError("OVS202", f"The weights file {file_name!r} is missing.", field=str(directory))
        entries = read_entries(file)
        for name in (name for name, where in names.items() if where == file_name):
            if name not in entries:
                raise OverspillError(
                    "OVS202", f"{file_name} lacks tensor {name!r}, which the index names there.", field=str(file)
                )
            found[name] = entries[name]
    return found


@dataclass
class _Plan:
    """Which tensor of the file goes where: straight into one of the model, or with others through a converter."""

    direct: list[tuple[TensorEntry, str]] = field(default_factory=list)
    converted: dict[str, tuple[Any, list[tuple[TensorEntry, str]]]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)


def load_weights(
    model: nn.Module, path: str | Path, *, on_progress: Callable[[int, int], None] | None = None
) -> LoadReport:
    """Fill the model's parameters and persistent buffers from a model directory (or hub id), in place.

    Dtypes are converted as ``Tensor.copy_`` does (round to nearest even), the same numbers as from_pretrained.

    Args:
        model: its parameters have memory; tied ones are one parameter.
        path: directory with model.safetensors, or with an index and shards.
        on_progress: called with (bytes read, bytes in all).

    Raises:
        OverspillError: OVS202 for a missing or damaged file or tensor, or another shape, each by name;
            OVS504 when a parameter is still on meta.
    """
    from overspill.interop.hf import model_directory

    entries = checkpoint_entries(model_directory(path))
    targets = _targets(model)
    plan = _plan(model, entries, targets)
    total = sum(entry.nbytes for entry in entries.values() if entry.name not in set(plan.unused))
    done = 0
    filled: dict[int, str] = {}
    _check_complete(plan, targets, next(iter(entries.values()), None), Path(path))

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if on_progress is not None:
            on_progress(done, total)

    with torch.no_grad():
        for entry, name in plan.direct:
            target = targets[name]
            _check(entry, name, target)
            if id(target) in filled:  # a second name of a tied weight
                _check_equal(entry, target, filled[id(target)])
            else:
                _fill(entry, target, advance)
                filled[id(target)] = name
        for name, (converter, sources) in plan.converted.items():
            for target_name, value in _convert(model, converter, name, sources, targets, advance).items():
                if value.shape != targets[target_name].shape:
                    _wrong_shape(sources[0][0], target_name, tuple(value.shape), targets[target_name])
                targets[target_name].copy_(value)
    return LoadReport(tensors=len(entries) - len(plan.unused), nbytes=total, unused=tuple(plan.unused))


def _targets(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under every name that they have; tied ones appear more than once."""
    targets: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                targets[f"{prefix}.{name}" if prefix else name] = buffer
    on_meta = next((name for name, tensor in targets.items() if tensor.is_meta), None)
    if on_meta is not None:
        raise OverspillError(
            "OVS504",
            "The model's parameters have no memory yet.",
            field=on_meta,
            next_step="Attach the model first (or call `allocate_parameters(model)`), then load its weights.",
        )
    return targets


def _plan(model: nn.Module, entries: dict[str, TensorEntry], targets: dict[str, torch.Tensor]) -> _Plan:
    """Match the file's names to the model's with transformers' own rules (prefixes, renamings, converters)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model) if hasattr(model, "config") else []
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)
    plan = _Plan()
    for source in sorted(entries, key=dot_natural_key):
        entry = entries[source]
        name, pattern = (
            (source, None)
            if source in targets and not rules
            else _renamed(rename_source_key, source, renamings, converters, prefix, targets)
        )
        if name not in targets:
            plan.unused.append(source)
        elif pattern is None:
            plan.direct.append((entry, name))
        else:
            fresh: tuple[Any, list[tuple[TensorEntry, str]]] = (copy.deepcopy(converter_by_pattern[pattern]), [])
            plan.converted.setdefault(name, fresh)[1].append((entry, pattern))
    # In file order, so that the disk reads forward.
    plan.direct.sort(key=lambda pair: (pair[0].file.name, pair[0].begin))
    return plan


def _renamed(
    rename: Callable[..., tuple[str, str | None]],
    source: str,
    renamings: list[Any],
    converters: list[Any],
    prefix: str | None,
    targets: dict[str, torch.Tensor],
) -> tuple[str, str | None]:
    name, pattern = rename(source, renamings, converters, prefix, targets)
    if name not in targets and source in targets:  # already in the model's own form
        return source, None
    return name, pattern


def _check_complete(plan: _Plan, targets: dict[str, torch.Tensor], any_entry: TensorEntry | None, path: Path) -> None:
    """Every tensor of the model must come from the file, under one of its names."""
    given = {id(targets[name]) for _, name in plan.direct}
    for name, (converter, _) in plan.converted.items():
        given |= {id(targets[other]) for other in _outputs(converter, name) if other in targets}
    missing = [name for name, tensor in targets.items() if id(tensor) not in given and isinstance(tensor, nn.Parameter)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        where = any_entry.file if any_entry is not None else path
        raise OverspillError(
            "OVS202",
            f"The weights in {where.parent if any_entry else where} lack tensor {missing[0]!r}{more}.",
            field=str(where),
            next_step="Check that config.json belongs to these weights, or download them again.",
        )


def _outputs(converter: Any, name: str) -> list[str]:
    """The names that a converter fills, from the name of its first target."""
    first = converter.target_patterns[0]
    return [name.replace(first, other) for other in converter.target_patterns]


def _convert(
    model: nn.Module,
    converter: Any,
    name: str,
    sources: list[tuple[TensorEntry, str]],
    targets: dict[str, torch.Tensor],
    advance: Callable[[int], None],
) -> dict[str, torch.Tensor]:
    """Run one of transformers' converters (stack experts, split or join projections) on tensors read whole."""
    for entry, pattern in sources:
        part = torch.empty(entry.shape, dtype=targets[name].dtype)
        _check_dtype(entry, part)
        _fill(entry, part, advance)
        converter.add_tensor(name, entry.name, pattern, part)
    realised = converter.convert(name, model=model, config=model.config)
    return {key: value[0] if isinstance(value, list) else value for key, value in realised.items()}


def _check(entry: TensorEntry, name: str, target: torch.Tensor) -> None:
    if entry.shape != tuple(target.shape):
        _wrong_shape(entry, name, entry.shape, target)
    _check_dtype(entry, target)


def _wrong_shape(entry: TensorEntry, name: str, shape: tuple[int, ...], target: torch.Tensor) -> None:
    raise OverspillError(
        "OVS202",
        f"Tensor {entry.name!r} in {entry.file.name} has another shape than the model's {name!r}.",
        field=str(entry.file),
        value=list(shape),
        limit=list(target.shape),
        next_step="Check that config.json belongs to these weights.",
    )


def _check_dtype(entry: TensorEntry, target: torch.Tensor) -> None:
    source = TORCH_DTYPES.get(entry.dtype)
    if source is None or (source != target.dtype and not (_is_floating(source) and _is_floating(target.dtype))):
        raise OverspillError(
            "OVS206",
            f"Tensor {entry.name!r} in {entry.file.name} holds {entry.dtype}, not converted to {target.dtype}.",
            field=str(entry.file),
            next_step="Use unquantised weights in bf16, fp16 or fp32.",
        )


def _is_floating(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's own memory, as bytes."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _fill(entry: TensorEntry, target: torch.Tensor, advance: Callable[[int], None]) -> None:
    if entry.numel == 0:
        return
    same = TORCH_DTYPES[entry.dtype] == target.dtype
    if same and target.device.type == "cpu" and target.is_contiguous():
        memory = _as_bytes(target)
        pieces = ((at, memory[at : at + PIECE_NBYTES]) for at in range(0, entry.nbytes, PIECE_NBYTES))
        for nbytes in read_pieces(entry, pieces):
            advance(nbytes)
        return
    contiguous = target.is_contiguous()
    flat = target.view(-1) if contiguous else torch.empty(entry.numel, dtype=target.dtype, device=target.device)
    for at, piece in _bounced(entry, advance):
        flat[at : at + piece.numel()].copy_(piece)
    if not contiguous:
        target.copy_(flat.view(target.shape))


def _bounced(entry: TensorEntry, advance: Callable[[int], None]) -> Iterator[tuple[int, torch.Tensor]]:
    """The tensor in pieces of its own dtype: (first element, piece); each is valid until the next."""
    dtype = TORCH_DTYPES[entry.dtype]
    step = PIECE_NBYTES // dtype.itemsize
    bounce = torch.empty(min(step, entry.numel), dtype=dtype)
    ranges = [(at, min(step, entry.numel - at)) for at in range(0, entry.numel, step)]
    pieces = ((at * dtype.itemsize, _as_bytes(bounce[:length])) for at, length in ranges)
    for (at, length), nbytes in zip(ranges, read_pieces(entry, pieces), strict=True):
        yield at, bounce[:length]
        advance(nbytes)


def _check_equal(entry: TensorEntry, target: torch.Tensor, first: str) -> None:
    flat = target.reshape(-1)
    for at, piece in _bounced(entry, lambda nbytes: None):
        if not torch.equal(flat[at : at + piece.numel()].cpu(), piece.to(flat.dtype)):
            raise OverspillError(
                "OVS202",
                f"The config ties {entry.name!r} to {first!r}, but {entry.file.name} holds different values for them.",
                field=str(entry.file),
                next_step='Set "tie_word_embeddings": false in config.json.',
            )


def allocate_parameters(model: nn.Module) -> None:
    """Give each parameter on meta ordinary CPU memory, uninitialised; tied ones stay one, buffers stay as they are.

    For a model that no session holds. (``Module.to_empty`` would throw the buffers' values away.)
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    memory = torch.empty_like(parameter, device="cpu")
                    made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]


def initialise_weights(model: Any, seed: int) -> None:
    """Fill the parameters with random numbers in place, by the model's own ``_init_weights``.

    The numbers are those of ``torch.manual_seed(seed); model.initialize_weights()`` on a model that has its memory.
    They are not those of ``from_config`` under the same seed: that draws first for torch's own initialisation, which
    it then overwrites. The global RNG is left as it was.
    """
    _targets(model)
    places = [(name, parameter, parameter.data_ptr()) for name, parameter in model.named_parameters()]
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.initialize_weights()
    for name, parameter, place in places:
        if parameter.data_ptr() != place or model.get_parameter(name) is not parameter:
            raise OverspillError(
                "OVS504",
                f"{type(model).__name__} replaces this parameter when it is initialised, instead of filling it.",
                field=name,
                next_step='Save random weights with transformers first and load them (model.init = "pretrained").',
            )
