"""Small models of many families of transformers, for tests that run on every one of them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["FAMILIES", "small_model"]

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_PLAIN = {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"}

#: Name of the family: (config class, model class, what differs from the common shape).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _COMMON),
    "mistral": ("MistralConfig", "MistralForCausalLM", _COMMON | {"sliding_window": 16}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _COMMON),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _COMMON | {"head_dim": 16}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        _COMMON
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _COMMON | {"head_dim": 16, "sliding_window": 16}),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", _COMMON | {"head_dim": 16, "sliding_window": 16}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _COMMON | {"pad_token_id": 0}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 512, "n_embd": 64, "n_inner": 128, "n_head": 4, "n_positions": 256},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _PLAIN),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 64,
        },
    ),
    "falcon": ("FalconConfig", "FalconForCausalLM", {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", _COMMON),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _COMMON),
}


def small_model(
    family: str,
    *,
    layers: int = 2,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    checkpointing: str = "none",
    **changes: Any,
) -> Any:
    """A model of the family with ``layers`` layers. checkpointing: "none", "reentrant" or "non-reentrant"."""
    import transformers

    config_name, model_name, shape = FAMILIES[family]
    depth = {"n_layer": layers} if family == "gpt2" else {"num_hidden_layers": layers}
    config = getattr(transformers, config_name)(**{**shape, **depth, **changes}, attn_implementation=attention)
    config.use_cache = False
    model = getattr(transformers, model_name)(config).to(dtype)
    if checkpointing != "none":
        model.activation_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    return model
