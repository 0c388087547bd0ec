"""Writes what transformers' configuration classes take for keys that a config.json leaves out.

    python tools/make_config_defaults.py [--check]

For every model_type that src/overspill/model/families knows, and for the nested ones it reads: the class's scalar
defaults and its other names for keys (attribute_map), read off the dataclass fields, so that a default that the class
derives from other keys is not taken for a constant. `--check` fails when the file differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "src"))
TARGET = REPOSITORY / "src" / "overspill" / "model" / "config_defaults.json"

#: Keys of every class, of generation and of initialisation: they change no shape and no memory.
SKIPPED = frozenset(
    {
        "transformers_version", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
        "is_encoder_decoder", "problem_type", "initializer_range", "use_cache", "pad_token_id", "bos_token_id",
        "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "pretraining_tp", "rms_norm_eps",
        "layer_norm_eps", "layer_norm_epsilon", "layernorm_eps", "norm_eps", "initializer_factor",
        "decoder_start_token_id", "forced_eos_token_id", "image_token_id", "video_token_id", "image_token_index",
        "video_token_index", "vision_start_token_id", "vision_end_token_id", "boi_token_index", "eoi_token_index",
        "router_aux_loss_coef", "output_router_logits", "rope_theta", "time_step_min", "time_step_max",
        "time_step_scale", "time_step_floor",
    }
)  # fmt: skip
#: Families that transformers has no class for.
OTHERS = {"llmfoundry_mpt"}


def defaults_of(model_type: str) -> dict[str, Any]:
    import transformers

    cls: Any = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        value = field.default
        if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if field.name in SKIPPED or value is None or value is dataclasses.MISSING:
            continue
        if isinstance(value, tuple):
            value = list(value)
        if isinstance(value, (bool, int, float, str)) or (
            isinstance(value, list) and all(isinstance(item, (bool, int, float, str, list, tuple)) for item in value)
        ):
            found[field.name] = value
    aliases = {other: own for other, own in sorted((cls.attribute_map or {}).items()) if other not in SKIPPED}
    return dict(sorted(found.items())) | ({"_aliases": aliases} if aliases else {})


def page() -> str:
    from overspill.model.families import FAMILIES
    from overspill.model.families.multimodal import NESTED

    rows = [f"{json.dumps(name)}: {json.dumps(defaults_of(name))}" for name in sorted({*FAMILIES, *NESTED} - OTHERS)]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail when the file differs, and write nothing")
    arguments = parser.parse_args()
    text = page()
    if arguments.check:
        same = TARGET.exists() and TARGET.read_text(encoding="utf-8") == text
        print("up to date" if same else f"{TARGET.name} differs; run {Path(__file__).name}")
        return 0 if same else 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"{TARGET.relative_to(REPOSITORY)}: {text.count(chr(10)) - 2} classes, {len(text)} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
