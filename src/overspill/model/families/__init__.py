"""Every model family whose shapes are known, by config.json's model_type.

A family is a function from a config to every parameter (name and shape, in the order of the transformers module) and to
the facts of facts.py. No torch, no transformers: a forecast must work where neither is installed. A unit test holds
each family equal to the real module on the meta device. How to add one: docs/howto/add-a-model-family.md.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from overspill.errors import OverspillError
from overspill.model.build import Built
from overspill.model.config import Config

__all__ = ["FAMILIES", "build_family"]

#: Which file of this folder builds which families; a file is imported when one of its families is asked for.
_BY_FILE: Final = {
    "styles": """
        llama mistral ministral ministral3 qwen2 qwen3 smollm3 gemma gemma2 gemma3_text phi3 olmo olmo2
        olmo3 granite seed_oss exaone4 ernie4_5 helium nemotron stablelm starcoder2 phi cohere cohere2 glm
        glm4 mixtral qwen2_moe qwen3_moe olmoe granitemoe granitemoeshared phimoe minimax_m2 gpt_oss
        glm4_moe deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa minicpm3 llama4_text qwen3_next
        qwen3_5_text qwen3_5_moe_text
    """,
    "classic": """
        gpt2 gpt_bigcode gpt_neo gptj gpt_neox opt bloom mpt llmfoundry_mpt falcon
    """,
    "encoders": """
        bert roberta xlm-roberta distilbert deberta-v2 vit
    """,
    "seq2seq": """
        t5 bart mamba falcon_mamba
    """,
    "multimodal": """
        llava mistral3 gemma3 paligemma internvl qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen3_5
        qwen3_5_moe llama4 clip siglip
    """,
}
#: Every known family → the file that builds it. That file's BUILDERS has a function for each.
FAMILIES: Final = {name: file for file, names in _BY_FILE.items() for name in names.split()}


def build_family(config: dict[str, Any]) -> Built | None:
    """What ``config`` describes, or None for a family that is not known.

    Raises OverspillError OVS201 for a config that lacks a size or holds another kind of value where one is read.
    """
    family = str(config.get("model_type", ""))
    file = FAMILIES.get(family)
    if file is None:
        return None
    build = importlib.import_module(f"overspill.model.families.{file}").BUILDERS[family]
    try:
        built: Built = build(Config(config, family))
        return built
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        # A key that is read with a default holds something of another kind; which one, the sentence says.
        raise OverspillError(
            "OVS201",
            f"The model's config.json describes no {family}: {error}.",
            field="config.json",
            next_step="Use the config.json that came with the weights.",
        ) from None
