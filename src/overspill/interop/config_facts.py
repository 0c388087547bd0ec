"""What of a model's config.json decides its numbers, so that a run notices when the file is edited.

Each commit holds these facts as JSON text. Two are compared as the installed transformers reads both: a key at its
default equals a key left out, and a new release that knows more keys changes nothing. Shapes and dtypes are no
business of this file (the store compares those), nor is the tokenizer (the token files' key does).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from overspill.errors import OverspillError
from overspill.files import parse_json

__all__ = ["config_facts", "refuse_changed_config"]

#: Keys that say where a config comes from, or how a model is started, asked or labelled; not what it computes.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "architectures",
        "auto_map",
        "bos_token_id",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_NAMED: Final = 3


def config_facts(directory: Path) -> str:
    """The facts of ``directory``'s config.json as JSON text in one form. Raises OverspillError OVS201."""
    file = directory / "config.json"
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise OverspillError("OVS201", f"Cannot read the model's config: {error.strerror}.", field=str(file)) from None
    except ValueError as error:
        raise OverspillError("OVS201", f"The model's config is not valid JSON: {error}.", field=str(file)) from None
    return json.dumps(_relevant(config), sort_keys=True)


def refuse_changed_config(then: str, now: str, config: Any, *, file: Path, next_step: str) -> None:
    """Raises OverspillError OVS602 naming the first keys that differ, with both values.

    Args:
        then, now: of `config_facts`.
        config: the ``PreTrainedConfig`` of now, whose class reads both.
        file: of now.
    """
    if then == now:
        return
    before, after = (_flat(_as_read(json.loads(text), config)) for text in (then, now))
    differ = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    if not differ:
        return
    named = "; ".join(f"{key}: {_word(before, key)} then, {_word(after, key)} now" for key in differ[:_NAMED])
    more = f"; and {len(differ) - _NAMED} more keys" if len(differ) > _NAMED else ""
    raise OverspillError(
        "OVS602",
        f"The model's config has changed since the run began, and with it what the model computes: {named}{more}.",
        field=str(file),
        next_step=next_step,
    )


def _relevant(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _relevant(one) for key, one in value.items() if key not in _WITHOUT_EFFECT}
    return [_relevant(one) for one in value] if isinstance(value, list | tuple) else value


def _as_read(facts: dict[str, Any], config: Any) -> dict[str, Any]:
    """With the defaults of the config's class; as they are, where it cannot read them."""
    from huggingface_hub.errors import StrictDataclassError

    if facts.get("model_type") != config.model_type:
        return facts
    try:
        read = type(config).from_dict(dict(facts)).to_dict()
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
        return facts
    plain: dict[str, Any] = json.loads(json.dumps(_relevant(read), default=str))
    return plain


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, one in value.items():
        flat |= _flat(one, f"{prefix}{key}.") if isinstance(one, dict) and one else {f"{prefix}{key}": one}
    return flat


def _word(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key])[:60] if key in values else "not set"
