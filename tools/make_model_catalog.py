"""Makes src/overspill/catalog/models/models.jsonl from a directory of facts.

    python tools/make_model_catalog.py FACTS --collected 2026-11-29 [--check]

FACTS holds models.csv (a row a model: hf_id, n_params_exact, published_figure, match, source, confidence, notes, and
the sizes in columns) and models_build_configs.json (the config values that each count was made from). A model is taken
when the count that follows from its config here is the stated one, to the unit. more_models.json adds to them. What is
left out is printed with the reason. `--check` writes nothing and fails when the file would differ.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "src"))
#: Models beside those of the facts, in the form of the target's lines.
MORE = REPOSITORY / "tools" / "more_models.json"
TARGET = REPOSITORY / "src" / "overspill" / "catalog" / "models" / "models.jsonl"

from overspill.errors import OverspillError  # noqa: E402
from overspill.model import FAMILIES, ModelShape  # noqa: E402
from overspill.model.config import known_defaults  # noqa: E402

#: Keys that change neither a shape nor what a layer keeps.
UNREAD = frozenset(
    {
        "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache",
        "rope_theta", "rope_scaling", "torch_dtype", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon",
        "layernorm_epsilon", "norm_eps", "output_router_logits", "router_aux_loss_coef", "image_token_id",
        "video_token_id", "vision_start_token_id", "vision_end_token_id", "pretraining_tp", "scale_attn_weights",
        "scale_attention_softmax_in_fp32", "attention_softmax_in_fp32", "summary_activation",
        "summary_first_dropout", "summary_type", "summary_proj_to_labels", "summary_use_proj", "tokenizer_class",
        "rotary_emb_base", "ep_size", "seq_aux", "scoring_func", "topk_method", "routed_scaling_factor",
        "norm_topk_prob", "language_model_only", "aux_loss_alpha", "model_type",
    }
)  # fmt: skip
#: Sizes that every config.json states; a row that leaves one out means its class's default.
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "n_embd", "n_layer",
    "n_head", "d_model", "d_ff", "num_layers", "ffn_dim", "n_layers", "n_heads", "dim", "hidden_dim", "encoder_layers",
    "decoder_layers", "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
#: Columns that say the same as a config key, for rows whose values stand in the table alone.
COLUMNS = {
    "hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "vocab_size": "vocab_size", "max_positions": "max_position_embeddings",
}  # fmt: skip
#: Models that the hub lists under a second name (renamed there; the old id redirects).
RENAMED = {
    "meta-llama/Meta-Llama-3.1-8B": ["meta-llama/Llama-3.1-8B"],
    "meta-llama/Meta-Llama-3.1-8B-Instruct": ["meta-llama/Llama-3.1-8B-Instruct"],
    "meta-llama/Meta-Llama-3.1-70B": ["meta-llama/Llama-3.1-70B"],
    "meta-llama/Meta-Llama-3.1-405B": ["meta-llama/Llama-3.1-405B"],
    "meta-llama/Meta-Llama-3-8B": ["meta-llama/Llama-3-8B"],
    "openai-community/gpt2": ["gpt2"],
    "openai-community/gpt2-medium": ["gpt2-medium"],
    "openai-community/gpt2-large": ["gpt2-large"],
    "openai-community/gpt2-xl": ["gpt2-xl"],
    "google-bert/bert-base-uncased": ["bert-base-uncased"],
    "zai-org/glm-4-9b-hf": ["THUDM/glm-4-9b-hf"],
}
#: A quantised copy's config that a row was read from: the same shape under the original's name.
READ_FROM_COPY = {
    "Qwen/Qwen3.6-27B": "nvidia/Qwen3.6-27B-NVFP4",
    "Qwen/Qwen3.6-35B-A3B": "nvidia/Qwen3.6-35B-A3B-NVFP4",
}


def cleaned(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: cleaned(value) | ({"model_type": value["model_type"]} if "model_type" in value else {})
        if isinstance(value, dict)
        else value
        for key, value in config.items()
        if key not in UNREAD
    }


def config_of(row: dict[str, str], built: dict[str, Any]) -> dict[str, Any]:
    """The row's config with the sizes that its class's defaults, or the table's columns, give."""
    family = built["built_as"] if built["built_as"] in FAMILIES else "llama"
    stated = cleaned(built.get("config") or {})
    if family != built["built_as"]:  # remote code of the same shape as Llama, its sizes in the table alone
        stated = {key: int(row[column]) for column, key in COLUMNS.items() if row[column]} | {
            "tie_word_embeddings": row["tied_embeddings"] == "True"
        }
    defaults = known_defaults(family)
    aliases: dict[str, str] = defaults.get("_aliases", {})
    said = {aliases.get(key, key) for key in stated} | set(stated)
    sizes = {key: defaults[key] for key in SIZES if key in defaults and key not in said}
    return {"model_type": family, **sizes, **stated}


def reason_to_leave_out(row: dict[str, str], built: dict[str, Any] | None) -> str | None:
    if " " in row["hf_id"]:
        return "its name is no hub id"
    if built is None:
        return "no config"
    known = built["built_as"] in FAMILIES or (row["built_with"] == "LlamaForCausalLM" and not built.get("config"))
    if not known:
        return f"family {built['built_as']} is not known"
    if not row["n_params_exact"]:
        return "no exact count"
    if row["match"] == "differs" and row["confidence"] != "A":
        return "two figures differ and the shape itself was recalled"
    if row["match"] == "differs" and "unsure" not in row["published_source"]:
        return "two figures differ"
    return None


def plain(text: str) -> str:
    """A source or a note without the collector's own marks; what was recalled and not read is called so."""
    text = re.sub(r"\s*\(stored (?:public )?file id \d+\)", "", text)
    text = re.sub(r"stored (?:public )?file id \d+:\s*", "", text)
    for old, new in (
        ("memory of the model card / config.json", "recalled: model card and config.json"),
        ("from recalled:", "recalled:"),
        ("memory-sourced", "recalled"),
        ("from memory", "recalled"),
        ("remembered", "recalled"),
        ("memory", "recalled"),
    ):
        text = text.replace(old, new)
    return text


def with_prediction_layer(shape: ModelShape) -> dict[int, str]:
    """Counts of a file that holds what transformers leaves out → what that is.

    A multi-token-prediction layer is a layer with experts, a projection of two hidden vectors to one, and three norms;
    some files repeat embeddings and head in it. Each router has a correction bias that transformers keeps as a buffer.
    """
    assert shape.facts is not None
    kinds = [kind for kind in shape.facts.text.kinds if kind.moe is not None]
    hidden, found = shape.facts.hidden, {}
    for kind in kinds:
        assert kind.moe is not None
        biases = (sum(each.count for each in kinds) + 1) * kind.moe.experts
        count = shape.total_numel + kind.numel + 2 * hidden * hidden + 3 * hidden + biases
        one = "the published figure counts one layer for multi-token prediction"
        rest = "and router biases that transformers keeps as buffers; equal to the unit with them"
        found[count] = f"{one} {rest}"
        found[count + 2 * shape.facts.vocab * hidden] = f"{one}, with its copy of embeddings and head, {rest}"
    return found


def note_of(row: dict[str, str], shape: ModelShape) -> str:
    if row["match"] == "differs-mtp":
        return with_prediction_layer(shape)[int(row["published_figure"])]
    parts = [plain(row["notes"])] if row["notes"] else []
    if row["match"] == "differs":
        parts.append("taken with the count of its config, which was read in the source; the other figure was recalled")
    if row["hf_id"] in READ_FROM_COPY:
        parts.append(f"config read from {READ_FROM_COPY[row['hf_id']]}")
    return "; ".join(parts)


def rows_of(facts: Path) -> Iterator[tuple[dict[str, str], dict[str, Any] | None]]:
    builds = json.loads((facts / "models_build_configs.json").read_text(encoding="utf-8"))
    with (facts / "models.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield row, builds.get(READ_FROM_COPY.get(row["hf_id"], row["hf_id"]))


def catalogue(facts: Path, collected: str) -> tuple[str, dict[str, list[str]]]:
    lines = [json.dumps({"catalogue": "models", "collected": collected})]
    left_out: dict[str, list[str]] = {}
    for row, built in rows_of(facts):
        reason = reason_to_leave_out(row, built)
        if reason is None:
            assert built is not None
            config, stated = config_of(row, built), int(row["n_params_exact"])
            try:
                shape = ModelShape.from_config(config)
            except OverspillError as error:
                reason = str(error)
            else:
                numel = shape.total_numel
                reason = None if numel == stated else f"the config gives {numel}, and {stated} is stated"
                published = int(row["published_figure"] or 0)
                if row["match"] == "differs-mtp" and published not in with_prediction_layer(shape):
                    reason = "published with a layer for multi-token prediction that is not built"
        if reason is not None:
            left_out.setdefault(reason, []).append(row["hf_id"])
            continue
        line: dict[str, Any] = {"id": row["hf_id"]}
        if row["hf_id"] in RENAMED:
            line["also"] = RENAMED[row["hf_id"]]
        line |= {"config": config, "source": plain(row["source"]), "confidence": row["confidence"], "numel": stated}
        published = int(row["published_figure"]) if row["published_figure"] else None
        if published == stated:
            line["figure"] = plain(row["published_source"])
        elif published is not None:
            line["published"] = published
        note = note_of(row, shape)
        lines.append(json.dumps(line | ({"note": note} if note else {}), ensure_ascii=False))
    for line in json.loads(MORE.read_text(encoding="utf-8")):
        if ModelShape.from_config(line["config"]).total_numel != line["numel"]:
            raise SystemExit(f"{MORE.name}: {line['id']} states {line['numel']}")
        lines.append(json.dumps(line, ensure_ascii=False))
    return "\n".join(lines) + "\n", left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("facts", type=Path, help="directory with models.csv and models_build_configs.json")
    parser.add_argument("--collected", required=True, help="date of the facts, as 2026-11-29")
    parser.add_argument("--check", action="store_true", help="fail when the file would differ, and write nothing")
    arguments = parser.parse_args()
    text, left_out = catalogue(arguments.facts, arguments.collected)
    for reason, names in sorted(left_out.items(), key=lambda item: -len(item[1])):
        print(f"left out, {reason}: {', '.join(names)}")
    print(f"{text.count(chr(10)) - 1} models, {len(text.encode())} bytes")
    if arguments.check:
        return 0 if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
