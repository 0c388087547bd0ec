"""torchtune's model builders, as the models of the catalogue: `qlora_llama2_70b` is Llama-2-70b, LoRA on an NF4 base.

Builders: torchtune/models/*/_model_builders.py (0.6, and qwen3 and llama4 of the main branch). Names at the right are
those of the weights that torchtune's own recipes download, or the base model of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MODELS", "Builder", "builder"]


@dataclass(frozen=True)
class Builder:
    """What a builder's name says: a model of the catalogue ("" for one built by its sizes), and how it is trained."""

    model: str
    lora: bool
    quantised: bool


MODELS: Final[dict[str, str]] = {
    "code_llama2_7b": "codellama/CodeLlama-7b-hf",
    "code_llama2_13b": "codellama/CodeLlama-13b-hf",
    "code_llama2_70b": "codellama/CodeLlama-70b-hf",
    "gemma_2b": "google/gemma-2b",
    "gemma_7b": "google/gemma-7b",
    "gemma2_2b": "google/gemma-2-2b",
    "gemma2_9b": "google/gemma-2-9b",
    "gemma2_27b": "google/gemma-2-27b",
    "llama2_7b": "meta-llama/Llama-2-7b-hf",
    "llama2_13b": "meta-llama/Llama-2-13b-hf",
    "llama2_70b": "meta-llama/Llama-2-70b-hf",
    "llama3_8b": "meta-llama/Meta-Llama-3-8B",
    "llama3_70b": "meta-llama/Meta-Llama-3-70B",
    "llama3_1_8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama3_1_70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama3_1_405b": "meta-llama/Meta-Llama-3.1-405B",
    "llama3_2_1b": "meta-llama/Llama-3.2-1B",
    "llama3_2_3b": "meta-llama/Llama-3.2-3B",
    "llama3_2_vision_11b": "meta-llama/Llama-3.2-11B-Vision-Instruct",
    "llama3_2_vision_90b": "meta-llama/Llama-3.2-90B-Vision-Instruct",
    "llama3_3_70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama4_scout_17b_16e": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "llama4_maverick_17b_128e": "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    "mistral_7b": "mistralai/Mistral-7B-v0.1",
    "phi3_mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi4_14b": "microsoft/phi-4",
    "qwen2_0_5b": "Qwen/Qwen2-0.5B",
    "qwen2_1_5b": "Qwen/Qwen2-1.5B",
    "qwen2_7b": "Qwen/Qwen2-7B",
    "qwen2_5_0_5b": "Qwen/Qwen2.5-0.5B",
    "qwen2_5_1_5b": "Qwen/Qwen2.5-1.5B",
    "qwen2_5_3b": "Qwen/Qwen2.5-3B",
    "qwen2_5_7b": "Qwen/Qwen2.5-7B",
    "qwen2_5_14b": "Qwen/Qwen2.5-14B",
    "qwen2_5_32b": "Qwen/Qwen2.5-32B",
    "qwen2_5_72b": "Qwen/Qwen2.5-72B",
    "qwen3_0_6b": "Qwen/Qwen3-0.6B",
    "qwen3_1_7b": "Qwen/Qwen3-1.7B",
    "qwen3_4b": "Qwen/Qwen3-4B",
    "qwen3_8b": "Qwen/Qwen3-8B",
    "qwen3_14b": "Qwen/Qwen3-14B",
    "qwen3_32b": "Qwen/Qwen3-32B",
}


def builder(dotted: str) -> Builder:
    """``torchtune.models.qwen3.lora_qwen3_4b_instruct`` -> Qwen3-4B with LoRA; other names give an empty model."""
    name = dotted.rpartition(".")[2]
    quantised, lora = name.startswith("qlora_"), name.startswith(("lora_", "qlora_"))
    plain = name.removeprefix("qlora_").removeprefix("lora_")
    for ending in ("_base", "_instruct"):
        plain = plain.removesuffix(ending)
    return Builder(MODELS.get(plain, ""), lora, quantised)
