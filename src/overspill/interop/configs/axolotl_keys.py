"""axolotl's keys that set no field of a Job: those without effect on memory, and those that are not modelled."""

from __future__ import annotations

from typing import Final

from overspill.interop.configs.reasons import (
    DATA,
    FEW_BYTES,
    GENERATION,
    LAUNCH,
    LEARNING,
    LOADING,
    LOGGING,
    NO_TRAINING,
    OBJECTIVE,
    OFF,
    SAVING,
    SPEED,
    TOKENS,
    group,
)

__all__ = ["IGNORED", "LORA", "NOT_MODELLED"]

#: Keys of adapters, without effect where there is none.
LORA: Final = "lora_r lora_dropout lora_target_modules lora_target_linear lora_modules_to_save peft_use_dora"

#: Key -> what the forecast leaves out; only where the key is on.
NOT_MODELLED: Final[dict[str, str]] = {
    "qat": "quantisation-aware training keeps fake-quantised copies",
    "unfrozen_parameters": "only a part of the weights is trained; the forecast trains all",
    "lisa_n_layers": "LISA trains a few layers at a time; the forecast trains all",
    "relora": "ReLoRA restarts adapters and merges them",
    "relora_cpu_offload": "ReLoRA's merged weights in host memory",
    "layer_offloading": "frozen layers wait in host memory",
    "peft_layers_to_transform": "adapters on some layers only; the forecast gives all layers a pair",
    "peft_layers_pattern": "adapters on some layers only; the forecast gives all layers a pair",
    "peft_layer_replication": "layers that occur twice",
    "lora_rank_pattern": "ranks that differ by module",
    "lora_target_parameters": "pairs on parameters that are no modules",
    "lora_mlp_kernel": "fused LoRA kernels keep fewer activations",
    "lora_qkv_kernel": "fused LoRA kernels keep fewer activations",
    "lora_o_kernel": "fused LoRA kernels keep fewer activations",
    "lora_embedding_kernel": "fused LoRA kernels keep fewer activations",
    "embeddings_skip_upcast": "embeddings stay in the dtype that they were loaded in",
    "fp32_norms": "norms are kept in fp32",
    "use_onebitllms": "weights of one bit, for training",
    "auto_find_batch_size": "the micro-batch is lowered when memory runs out",
    "ddp_bucket_cap_mb": "DDP's buckets have their default size in the forecast",
    "unsloth_lora_mlp": "fused LoRA kernels keep fewer activations",
    "unsloth_lora_qkv": "fused LoRA kernels keep fewer activations",
    "unsloth_lora_o": "fused LoRA kernels keep fewer activations",
    "unsloth_rms_norm": "a fused norm keeps fewer activations",
    "unsloth_rope": "a fused rotary embedding keeps fewer activations",
    "gemma4_hybrid_attn_impl": "attention kernels that differ by layer",
    "deepcompile": "DeepCompile rearranges gathers",
    "kd_trainer": "distillation from recorded log-probabilities",
    "ple_cpu_offload": "embeddings by layer in host memory",
    "scattermoe": "another kernel for experts",
    "spectrum_top_fraction": "Spectrum trains a part of the layers",
    "torch_empty_cache_steps": "the allocator's cache is emptied now and then",
    "gc_steps": "the allocator's cache is emptied now and then",
    "max_memory": "a limit for placing the model at loading",
    "gpu_memory_limit": "a limit for placing the model at loading",
    "diffusion": "a diffusion objective",
    "mora": "MoRA adapters",
    "use_mora": "MoRA adapters",
}

IGNORED: Final[dict[str, str]] = {
    **group(
        DATA,
        "datasets test_datasets shuffle_merged_datasets shuffle_before_merging_datasets dataset_prepared_path "
        "dataset_shard_num dataset_shard_idx skip_prepare_dataset num_dataset_shards_to_save dataset_processes "
        "dataset_num_proc dataset_exact_deduplication dataset_keep_in_memory dataloader_pin_memory "
        "dataloader_prefetch_factor dataloader_drop_last push_dataset_to_hub val_set_size train_on_inputs "
        "group_by_length min_sample_len excess_length_strategy eval_sequence_len sample_packing_group_size "
        "sample_packing_bin_size sample_packing_sequentially sample_packing_mp_start_method eval_sample_packing "
        "pad_to_sequence_len pad_to_multiple_of curriculum_sampling multipack_real_batches batch_flattening use_pose "
        "pose_split_on_token_ids pose_max_context_len pose_num_chunks pretrain_multipack_buffer_size "
        "pretraining_sample_concatenation streaming streaming_multipack_buffer_size remove_unused_columns "
        "preprocess_iterable is_preprocess total_num_tokens total_supervised_tokens sample_packing_eff_est "
        "max_packed_sequence_len max_prompt_len sample_packing_seq_len_multiplier drop_long_sequences "
        "image_size image_resize_algorithm role_boundaries",
    ),
    **group(
        TOKENS,
        "tokenizer_type tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common "
        "processor_type processor_kwargs tokenizer_save_jinja_files special_tokens chat_template chat_template_jinja "
        "chat_template_kwargs eot_tokens default_system_message fix_untrained_tokens",
    ),
    **group(
        FEW_BYTES,
        "resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings tokens added_tokens_overrides "
        "peft_ensure_weight_tying",
    ),
    **group(
        LEARNING,
        "lora_alpha lora_alpha_pattern lora_fan_in_fan_out peft_use_rslora peft_init_lora_weights loraplus_lr_ratio "
        "loraplus_lr_embedding embedding_lr embedding_lr_scale optim_args optim_target_modules lr_scheduler_kwargs "
        "lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor lr_groups adam_epsilon2 adam_beta3 warmup_ratio "
        "jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps relora_steps "
        "relora_warmup_steps relora_anneal_steps relora_prune_ratio relora_prune_method lisa_step_interval "
        "lisa_layers_attribute eaft_alpha eaft_k use_eaft scaling_softmax scaling_softmax_factor scaling_softmax_bias "
        "dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of grokfast_alpha grokfast_lamb "
        "spectrum_model_name",
    ),
    **group(
        OBJECTIVE,
        "center_rewards_coefficient num_labels dpo_use_weighting dpo_label_smoothing dpo_loss_type dpo_loss_weights "
        "dpo_padding_free dpo_norm_loss dpo_beta rpo_alpha orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight "
        "kto_undesirable_weight rl_beta dpo_use_logits_to_keep dpo_generate_during_eval kd_ce_alpha kd_alpha "
        "kd_temperature kd_beta kd_normalize_topk dpo_use_liger_kernel",
    ),
    **group(
        LOADING,
        "base_model_config base_model_ignore_patterns cls_model_config trust_remote_code model_type revision_of_model "
        "type_of_model overrides_of_model_config overrides_of_model_kwargs experimental_skip_move_to_device "
        "gptq_disable_exllama disable_exllama gptq_groupsize gptq_model_v1 "
        "model_quantization_config model_quantization_config_kwargs bnb_config_kwargs lora_model_dir lora_on_cpu "
        "qlora_sharded_model_loading device device_map low_cpu_mem_usage peft peft_autocast_adapter_dtype "
        "peft_trainable_token_indices merge_lora merge_method is_falcon_derived_model is_llama_derived_model "
        "is_mistral_derived_model is_qwen_derived_model hf_use_auth_token resume_from_checkpoint "
        "auto_resume_from_checkpoints trainer_cls freeze_mm_modules rope_scaling llama4_linearized_experts",
    ),
    **group(
        LOGGING,
        "wandb_project wandb_entity wandb_watch wandb_name wandb_run_id wandb_log_model wandb_mode use_wandb "
        "use_tensorboard use_mlflow mlflow_tracking_uri mlflow_experiment_name mlflow_run_name "
        "hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name comet_experiment_key "
        "comet_mode comet_online comet_experiment_config use_trackio trackio_project_name trackio_run_name "
        "trackio_space_id use_swanlab swanlab_project swanlab_experiment_name swanlab_description swanlab_mode "
        "swanlab_workspace swanlab_api_key swanlab_log_model use_otel_metrics otel_metrics_host otel_metrics_port "
        "logging_steps loss_watchdog_threshold loss_watchdog_patience profiler_steps profiler_steps_start "
        "include_tokens_per_second include_tkps evals_per_epoch eval_strategy evaluation_strategy eval_table_size "
        "eval_max_new_tokens early_stopping_patience strict do_causal_lm_eval eval_causal_lm_metrics do_bench_eval "
        "bench_dataset bench_split metric_for_best_model greater_is_better axolotl_config_path gradio_title "
        "gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens gradio_temperature "
        "lm_eval_tasks lm_eval_batch_size lm_eval_post_train lm_eval_model debug",
    ),
    **group(
        SAVING,
        "output_dir hub_model_id hub_strategy hub_revision save_safetensors saves_per_epoch save_strategy "
        "save_total_limit save_first_step save_only_model load_best_model_at_end dynamic_checkpoint push_to_hub "
        "llmcompressor save_compressed",
    ),
    **group(
        LAUNCH,
        "local_rank ddp ddp_timeout ddp_broadcast_buffers ddp_find_unused_parameters accelerator_config use_ray "
        "ray_run_name resources_per_worker capabilities env_capabilities cloud",
    ),
    **group(
        SPEED,
        "tf32 torch_compile_backend torch_compile_mode torch_compile_options flex_attn_compile_kwargs "
        "flash_attn_fuse_mlp flash_attn_fuse_qkv flash_attn_rms_norm flash_optimum sage_attention s2_attention "
        "pretrain_multipack_attn heads_k_stride ring_attn_func use_kernels use_scattermoe use_sonicmoe "
        "experts_implementation expert_backend nonexpert_quantization tiled_mlp_num_shards "
        "tiled_mlp_use_original_mlp chunked_cross_entropy_num_chunks fp8_config fp8_enable_fsdp_float8_all_gather "
        "large_head_attention flash_attn_d512 sdpa_varlen fused_attn_kernel fp32_norm_classes gc_collect_steps "
        "torchdistx_path expert_parallel_backend liger_use_token_scaling liger_rms_norm_gated",
    ),
    **group(
        GENERATION,
        "trl vllm ebft generate_samples num_generation_samples generation_max_new_tokens generation_temperature "
        "generation_top_p generation_top_k generation_prompt_ratio generation_do_sample",
    ),
    **group(NO_TRAINING, "quantization"),
    **group(OFF, "is_file fsdp_transformer_layer_cls_to_wrap"),
}
