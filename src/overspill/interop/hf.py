"""Find and build a Hugging Face model without its weights: config, empty model, tokenizer.

An empty model has its parameters on the meta device and its buffers (rotary frequencies and the like) real, as the
model's own constructor computes them. `overspill.attach` then gives the parameters their place and
`weights.load_weights` fills them, so the model is never whole in memory twice. Nothing here runs code from a model
directory: models that need ``trust_remote_code`` are refused.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from overspill.errors import OverspillError
from overspill.interop.weights import LoadReport, allocate_parameters, initialise_weights, load_weights

__all__ = [
    "LoadReport",
    "allocate_parameters",
    "build_empty",
    "initialise_weights",
    "load_config",
    "load_tokenizer",
    "load_weights",
    "max_positions",
    "model_directory",
    "torch_dtype",
]

_DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_HUB_ID: Final = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_HUB_PATTERNS: Final = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def torch_dtype(name: str) -> torch.dtype:
    """``"bf16"`` or ``"fp32"`` as a torch dtype. Raises OverspillError OVS206 for others."""
    if name not in _DTYPES:
        raise OverspillError("OVS206", "No kernel takes weights of this dtype.", field="model.dtype", value=name)
    return _DTYPES[name]


def model_directory(path: str | Path) -> Path:
    """The directory that ``path`` names, or to which the hub id ``path`` is downloaded (or was, in the cache).

    Raises OverspillError OVS201 when there is neither.
    """
    text = str(path)
    directory = Path(text).expanduser()
    if text and directory.is_dir():
        return directory
    if isinstance(path, Path) or directory.exists() or not _HUB_ID.match(text):
        raise OverspillError("OVS201", f"There is no model directory {text!r}.", field="model.path", value=text)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(text, allow_patterns=_HUB_PATTERNS))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise OverspillError(
            "OVS201",
            f"{text!r} is no directory, and as a hub id it can be neither downloaded nor found in the local cache: "
            f"{reason}",
            field="model.path",
            value=text,
            next_step="Give a directory with config.json, tokenizer and *.safetensors, or connect to the network.",
        ) from None


def load_config(path: str | Path) -> Any:
    """The model's ``PreTrainedConfig``. Raises OverspillError OVS201, or OVS206 for quantised weights."""
    directory = model_directory(path)
    file = directory / "config.json"
    if not file.is_file():
        raise OverspillError("OVS201", "The model directory has no config.json.", field=str(directory))
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        raise OverspillError(
            "OVS201",
            f"config.json does not describe a model that the installed transformers knows: {reason}",
            field=str(file),
            next_step="Check the file; models that need code of their own (trust_remote_code) are not run.",
        ) from None
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
        raise OverspillError(
            "OVS206",
            f"The weights are quantised ({method}); full training needs bf16 or fp32 weights.",
            field=str(file),
            next_step="Use the model's unquantised directory.",
        )
    return config


def max_positions(config: Any) -> int | None:
    """The longest sequence that the model was built for; None where the config sets no limit."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(found) if found is not None else None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that are registered meanwhile land on meta, before anything is written into them; buffers do not.

    A module's constructor asks for its memory, which the kernel backs with pages only when they are touched.
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # may return a parameter
    try:
        yield
    finally:
        handle.remove()


def build_empty(path_or_config: Any, dtype: str | torch.dtype = "bf16", *, gradient_checkpointing: bool = False) -> Any:
    """A ``PreTrainedModel`` for causal language modelling, ready for `attach`: parameters on meta, buffers real.

    Tied weights are tied (one parameter under several names), ``use_cache`` is off, the model is in train mode.
    Parameters that transformers keeps in fp32 whatever the dtype (``_keep_in_fp32_modules_strict``) are fp32.

    Args:
        path_or_config: a directory, a hub id or a ``PreTrainedConfig`` (which is copied).
        dtype: ``"bf16"``, ``"fp32"`` or the torch dtype.
        gradient_checkpointing: recompute activations in backward (the non-reentrant kind).
    """
    from transformers import AutoModelForCausalLM

    is_path = isinstance(path_or_config, str | os.PathLike)
    config = load_config(path_or_config) if is_path else copy.deepcopy(path_or_config)
    wanted = torch_dtype(dtype) if isinstance(dtype, str) else dtype
    try:
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=wanted, trust_remote_code=False)
    except (ValueError, KeyError, ImportError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise OverspillError(
            "OVS201",
            f"No causal language model can be built from this config: {' '.join(str(error).split())[:300]}",
            field=str(path_or_config) if is_path else type(config).__name__,
        ) from None
    _keep_in_fp32(model, wanted)
    model.config.use_cache = False
    if gradient_checkpointing:
        try:
            if hasattr(model, "activation_checkpointing_enable"):
                model.activation_checkpointing_enable({"use_reentrant": False})
            else:  # the name that older releases of transformers have for it
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError:
            raise OverspillError(
                "OVS504",
                f"{type(model).__name__} cannot recompute its activations.",
                field="model.gradient_checkpointing",
                next_step="Set model.gradient_checkpointing to false.",
            ) from None
    model.train()
    return model


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Do what from_pretrained does for the few modules whose numbers break in bf16 (routers, some norms)."""
    names = tuple(model._get_dtype_plan(dtype))
    if not names:
        return
    pattern = re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in names))
    for name, parameter in list(model.named_parameters()):
        if pattern.search(name) and parameter.dtype != torch.float32:
            owner = model.get_submodule(name.rpartition(".")[0])
            wide = nn.Parameter(parameter.detach().to(torch.float32), requires_grad=parameter.requires_grad)
            setattr(owner, name.rpartition(".")[2], wide)
    model.tie_weights()


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a directory or hub id. Raises OverspillError OVS203, or OVS201 when there is no directory."""
    directory = model_directory(path)
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise OverspillError("OVS203", "The directory holds no tokenizer.", field=str(directory))
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    wrong = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, StrictDataclassError)
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except wrong as error:
        raise OverspillError(
            "OVS203",
            f"The tokenizer cannot be loaded: {' '.join(str(error).split())[:300]}",
            field=str(directory),
        ) from None
