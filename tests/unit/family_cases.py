"""Small configurations of every model family, for tests that build the transformers module beside its shape.

(family, class name or None for the causal language model, config). Sizes are chosen so that no two widths of a model
are equal and a transposed or mistaken shape shows.
"""

from __future__ import annotations

from typing import Any

Case = tuple[str, str | None, dict[str, Any]]

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LINE = TOKENS | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 136,
}  # fmt: skip
GQA = LINE | {"num_key_value_heads": 2}
WIDE = GQA | {"head_dim": 24}
MOE = GQA | {"num_hidden_layers": 4, "num_experts_per_tok": 2}
LOCAL = MOE | {"num_local_experts": 6}
MANY = MOE | {"num_experts": 6, "moe_intermediate_size": 40}
MLA = MOE | {
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 40,
    "kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
INDEXED = MLA | {"index_n_heads": 2, "index_head_dim": 12, "index_topk": 16}
DELTA = MANY | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
    "shared_expert_intermediate_size": 56, "head_dim": 24,
}  # fmt: skip
GPT2 = {
    "n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 136, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPT = TOKENS | {
    "hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 136,
    "word_embed_proj_dim": 64, "max_position_embeddings": 32,
}  # fmt: skip
FALCON = TOKENS | {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 136}
MPT = {"d_model": 64, "n_heads": 4, "n_layers": 3, "vocab_size": 136, "max_seq_len": 32}
BERT = LINE | {"max_position_embeddings": 40}
T5 = {
    "d_model": 64,
    "d_ff": 96,
    "d_kv": 20,
    "num_heads": 4,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "vocab_size": 136,
}
BART = TOKENS | {
    "d_model": 64, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 80, "vocab_size": 136, "max_position_embeddings": 32,
    "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
MAMBA = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 136, "state_size": 12, "conv_kernel": 3}
EYE = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
QWEN_EYE = {
    "depth": 3, "hidden_size": 48, "intermediate_size": 80, "num_heads": 4, "patch_size": 7, "out_hidden_size": 64,
}  # fmt: skip
DEEP = QWEN_EYE | {"num_position_embeddings": 16}


def seeing(vision: dict[str, Any], text: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"vision_config": vision, "text_config": text, **more}


CASES: list[Case] = [
    ("llama", None, GQA),
    ("llama", None, LINE | {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True}),
    ("mistral", None, GQA),
    ("mistral", None, WIDE | {"sliding_window": None}),
    ("ministral", None, WIDE),
    ("ministral3", None, WIDE),
    ("qwen2", None, GQA | {"tie_word_embeddings": True}),
    ("qwen2", None, GQA | {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}),
    ("qwen3", None, WIDE),
    ("qwen3", None, GQA | {"attention_bias": True}),
    ("smollm3", None, GQA),
    ("smollm3", None, GQA | {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    ("gemma", None, WIDE),
    ("gemma2", None, WIDE),
    ("gemma3_text", None, WIDE | {"num_hidden_layers": 7}),
    ("phi3", None, GQA),
    ("phi", None, GQA),
    ("phi", None, GQA | {"qk_layernorm": True}),
    ("olmo", None, GQA),
    ("olmo2", None, GQA),
    ("olmo3", None, GQA | {"num_hidden_layers": 5}),
    ("granite", None, GQA | {"attention_bias": True, "mlp_bias": True, "embedding_multiplier": 12.0}),
    ("seed_oss", None, WIDE),
    ("exaone4", None, WIDE | {"num_hidden_layers": 5}),
    ("ernie4_5", None, WIDE | {"use_bias": True}),
    ("helium", None, GQA | {"head_dim": 16}),
    ("nemotron", None, WIDE | {"attention_bias": True, "mlp_bias": True}),
    ("stablelm", None, GQA),
    ("stablelm", None, GQA | {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
    ("starcoder2", None, GQA),
    ("starcoder2", None, GQA | {"use_bias": False, "tie_word_embeddings": False}),
    ("cohere", None, GQA | {"use_qk_norm": True}),
    ("cohere2", None, GQA | {"num_hidden_layers": 5}),
    ("glm", None, WIDE),
    ("glm4", None, WIDE | {"attention_bias": False}),
    ("mixtral", None, LOCAL),
    ("qwen2_moe", None, MANY | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1]}),
    ("qwen2_moe", None, MANY | {"shared_expert_intermediate_size": 56, "qkv_bias": False}),
    ("qwen3_moe", None, MANY | {"decoder_sparse_step": 2}),
    ("olmoe", None, MANY),
    ("granitemoe", None, LOCAL),
    ("granitemoeshared", None, LOCAL | {"shared_intermediate_size": 56}),
    ("granitemoeshared", None, LOCAL),
    ("phimoe", None, LOCAL | {"attention_bias": True, "lm_head_bias": True}),
    ("minimax_m2", None, LOCAL | {"head_dim": 24}),
    ("gpt_oss", None, LOCAL | {"head_dim": 24}),
    ("glm4_moe", None, MLA | {"num_key_value_heads": 2, "head_dim": 24, "attention_bias": True, "use_qk_norm": True}),
    ("deepseek_v2", None, MLA),
    ("deepseek_v2", None, MLA | {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True}),
    ("deepseek_v3", None, MLA),
    ("deepseek_v3", None, MLA | {"q_lora_rank": None}),
    ("deepseek_v32", None, INDEXED),
    ("glm_moe_dsa", None, INDEXED),
    ("glm_moe_dsa", None, INDEXED | {"index_topk_freq": 2, "index_skip_topk_offset": 1, "num_hidden_layers": 5}),
    ("minicpm3", None, {key: value for key, value in MLA.items() if "expert" not in key} | {"scale_emb": 3}),
    ("llama4_text", None, LOCAL | {"head_dim": 24, "intermediate_size_mlp": 112, "interleave_moe_layer_step": 2}),
    ("qwen3_next", None, DELTA | {"num_hidden_layers": 5}),
    ("qwen3_next", None, DELTA | {"mlp_only_layers": [1]}),
    ("qwen3_5_text", None, DELTA),
    ("qwen3_5_moe_text", None, DELTA),
    ("gpt2", None, GPT2),
    ("gpt2", None, GPT2 | {"n_inner": 100, "tie_word_embeddings": False}),
    ("gpt_bigcode", None, GPT2),
    ("gpt_bigcode", None, GPT2 | {"multi_query": False, "n_inner": 100}),
    ("gpt_neo", None, {"hidden_size": 64, "num_heads": 4, "num_layers": 4, "vocab_size": 136,
                       "attention_types": [[["global", "local"], 2]], "max_position_embeddings": 32}),
    ("gptj", None, GPT2 | {"rotary_dim": 8}),
    ("gpt_neox", None, LINE),
    ("gpt_neox", None, LINE | {"attention_bias": False, "tie_word_embeddings": True}),
    ("opt", None, OPT),
    ("opt", None, OPT | {"word_embed_proj_dim": 32, "enable_bias": False}),
    ("opt", None, OPT | {"do_layer_norm_before": False, "layer_norm_elementwise_affine": False}),
    ("bloom", None, {"hidden_size": 64, "n_head": 4, "n_layer": 3, "vocab_size": 136}),
    ("bloom", None, {"n_embed": 64, "num_attention_heads": 4, "n_layer": 3, "vocab_size": 136}),
    ("mpt", None, MPT),
    ("mpt", None, MPT | {"expansion_ratio": 3, "tie_word_embeddings": False}),
    ("falcon", None, FALCON),
    ("falcon", None, FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("falcon", None, FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("falcon", None, FALCON | {"multi_query": False, "parallel_attn": False, "alibi": True, "ffn_hidden_size": 100}),
    ("bert", "BertModel", BERT),
    ("bert", "BertForMaskedLM", BERT | {"architectures": ["BertForMaskedLM"]}),
    ("bert", "BertForSequenceClassification", BERT | {"architectures": ["BertForSequenceClassification"]}),
    ("roberta", "RobertaModel", BERT),
    ("roberta", "RobertaForMaskedLM", BERT | {"architectures": ["RobertaForMaskedLM"]}),
    ("roberta", "RobertaForSequenceClassification", BERT | {
        "architectures": ["RobertaForSequenceClassification"], "id2label": {0: "a", 1: "b", 2: "c"}}),
    ("xlm-roberta", "XLMRobertaModel", BERT),
    ("xlm-roberta", "XLMRobertaForMaskedLM", BERT | {"architectures": ["XLMRobertaForMaskedLM"]}),
    ("distilbert", "DistilBertModel", {"dim": 64, "hidden_dim": 96, "n_heads": 4, "n_layers": 3, "vocab_size": 136}),
    ("distilbert", "DistilBertForMaskedLM", {
        "dim": 64, "hidden_dim": 96, "n_heads": 4, "n_layers": 3, "vocab_size": 136,
        "architectures": ["DistilBertForMaskedLM"]}),
    ("deberta-v2", "DebertaV2Model", BERT | {
        "relative_attention": True, "position_buckets": 12, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0}),
    ("deberta-v2", "DebertaV2Model", BERT | {
        "relative_attention": True, "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 2,
        "conv_kernel_size": 3}),
    ("vit", "ViTModel", EYE),
    ("t5", "T5ForConditionalGeneration", T5),
    ("t5", "T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": None}),
    ("bart", "BartForConditionalGeneration", BART),
    ("mamba", None, MAMBA),
    ("mamba", None, MAMBA | {
        "use_bias": True, "use_conv_bias": False, "time_step_rank": 5, "tie_word_embeddings": False}),
    ("falcon_mamba", None, MAMBA),
    ("llava", "LlavaForConditionalGeneration", seeing(
        EYE | {"model_type": "clip_vision_model"}, GQA | {"model_type": "llama"})),
    ("llava", "LlavaForConditionalGeneration", seeing(
        EYE | {"model_type": "siglip_vision_model"}, GQA | {"model_type": "qwen2", "tie_word_embeddings": True},
        multimodal_projector_bias=False, vision_feature_layer=[-2, -1])),
    ("mistral3", "Mistral3ForConditionalGeneration", seeing(
        EYE | {"model_type": "pixtral", "head_dim": 12}, WIDE | {"model_type": "mistral"}, tie_word_embeddings=True)),
    ("gemma3", "Gemma3ForConditionalGeneration", seeing(
        EYE | {"model_type": "siglip_vision_model", "vision_use_head": False}, WIDE | {"model_type": "gemma3_text"},
        mm_tokens_per_image=4)),
    ("paligemma", "PaliGemmaForConditionalGeneration", seeing(
        EYE | {"model_type": "siglip_vision_model", "projection_dim": 64, "vision_use_head": False},
        WIDE | {"model_type": "gemma"}, projection_dim=64)),
    ("internvl", "InternVLForConditionalGeneration", seeing(
        EYE | {"image_size": [28, 28], "patch_size": [7, 7]}, GQA | {"model_type": "qwen2"},
        tie_word_embeddings=False)),
    ("qwen2_vl", "Qwen2VLForConditionalGeneration", seeing(
        {"depth": 3, "embed_dim": 48, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 3, "patch_size": 7}, GQA)),
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", seeing(
        QWEN_EYE | {"fullatt_block_indexes": [1], "window_size": 14}, GQA, tie_word_embeddings=True)),
    ("qwen3_vl", "Qwen3VLForConditionalGeneration", seeing(DEEP | {"deepstack_visual_indexes": [0, 2]}, WIDE)),
    ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", seeing(
        DEEP | {"deepstack_visual_indexes": [1]}, MANY | {"head_dim": 24})),
    ("qwen3_5", "Qwen3_5ForConditionalGeneration", seeing(DEEP, DELTA)),
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", seeing(DEEP, DELTA, tie_word_embeddings=True)),
    ("llama4", "Llama4ForConditionalGeneration", seeing(
        EYE | {"intermediate_size": 192, "vision_output_dim": 72, "projector_input_dim": 72,
               "projector_output_dim": 72},
        LOCAL | {"head_dim": 24, "intermediate_size_mlp": 112})),
    ("clip", "CLIPModel", seeing(EYE, LINE | {"max_position_embeddings": 20}, projection_dim=40)),
    ("siglip", "SiglipModel", seeing(EYE, LINE | {"max_position_embeddings": 20})),
]  # fmt: skip
