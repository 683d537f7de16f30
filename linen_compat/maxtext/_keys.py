"""What each key of a MaxText configuration means to this project: mapped, fixed or ignored.

MAPPED keys become fields of `nnx_pipeline.Config`. FIXED keys change what the model computes or
what its checkpoint holds, and have one behaviour here. Ignored keys say how a run is carried out.
"""

import ast
import re

from linen_compat.maxtext._values import DEFAULTS


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _each(names: str, *accepted: object) -> dict[str, tuple[object, ...]]:
    return dict.fromkeys(names.split(), accepted)


MAPPED = frozenset(DEFAULTS)
_NOTHING: tuple[object, ...] = (None, "", "None", "none", [], {})
# The accepted values of each key; error messages name the first as the one to set.
FIXED: dict[str, tuple[object, ...]] = {
    **_each(
        """
        activations_in_float32 attention_sink checkpoint_is_quantized enable_diloco
        float32_gate_logits float32_logits float32_qk_product fused_mlp fused_qkv logits_dot_in_fp32
        mlp_bias moba moe_quantize_token_all_gather moe_use_megatron_seq_aux_loss rope_pairwise
        scan_layers_per_stage share_kv_projections te_moe_block
        temperature_tuning use_audio use_double_wide_mlp use_dpo use_indexer use_m3_model use_mrope
        use_multimodal use_post_attn_norm use_post_ffw_norm use_qk_clip use_random_routing
        use_untrainable_positional_embedding
        """,
        False,
    ),
    **_each(
        """
        adamw_mask compress_ratios engram_layers moe_quantize_combine_bwd_method quantization
        te_gmm_quantization trainable_parameters_mask weight_sparsity_m weight_sparsity_n
        """,
        *_NOTHING,
    ),
    **_each(
        """
        attention_output_dim global_rope_max_timescale local_rope_max_timescale moe_expert_input_dim
        nope_layer_interval trainable_position_size
        """,
        -1,
    ),
    **_each("capacity_factor mlp_activations_limit ragged_buffer_factor", -1.0),
    **_each("cast_logits_to_fp32 float32_weight_sum qk_norm_with_scale", True),
    **_each(
        """
        chunk_attn_window_size first_num_hash_layers global_head_dim global_num_kv_heads
        hidden_size_per_layer_input mtp_num_layers num_kv_shared_layers sliding_window_size
        vocab_size_per_layer_input
        """,
        0,
    ),
    **_each(
        """
        global_parameter_scale gradient_accumulation_steps inhomogeneous_layer_cycle_interval
        interleave_moe_layer_step mhc_expansion_rate param_scan_axis rope_min_timescale
        """,
        1,
    ),
    "adam_eps_root": (0.0,),
    "z_loss_multiplier": (0.0,),
    "attn_logits_soft_cap": (0.0, None),
    "final_logits_soft_cap": (0.0, None),
    "dense_init_scale": (1.0,),
    "partial_rotary_factor": (1.0,),
    "mlp_activations": (["silu", "linear"],),
    "mu_dtype": ("", None, "float32"),
    "norm_topk_prob": (False, True),  # the same values: a softmax over the chosen adds up to 1
    "use_iota_embed": (False, True),  # the same values, looked up by a product
    "opt_type": ("adamw",),
    "training_objective": ("causal_lm",),
}

# Single keys.
_IGNORED = _words(
    """
    abort_on_inf_loss abort_on_nan_loss act_quantization_calibration_method add_bos add_eos
    allow_split_physical_axes ar_cache_axis_order async_checkpointing attention attention_out
    audio_path audio_placeholder autoregressive_decode_assert base_output_directory
    batch_split_factor blend_cache_dir blend_index_dir block_state_before_run_start
    bwd_quantization_calibration_method causal_block_size chat_template chat_template_path check_vma
    colocated_python_checkpointing colocated_python_data_input communication_overlapping_alpha
    compile_topology compile_topology_num_slices compile_xla_flags compiled_trainstep_file
    compressed_rope_max_timescale compute_axis_order constant_bound_config context
    cost_estimate_flops_bwd cost_estimate_flops_fwd csa_qk_head_chunk_size custom_mesh
    custom_mesh_and_rule custom_mesh_and_rule_for_eval data_sharding data_shuffle_seed
    debug_sharding decoder_layer_input default_prompt defer_small_all_reduces
    dense_fsdp_use_two_stage_all_gather diloco_outer_lr diloco_outer_momentum diloco_sync_period
    dq_reduction_steps drhs_grad_quantization_calibration_method dtype_mm enable_autocheckpoint
    enable_checkpoint_cloud_logger enable_checkpointing enable_continuous_checkpointing
    enable_data_shuffling enable_emergency_checkpoint enable_gcp_goodput_metrics
    enable_gcp_step_deviation_metrics enable_goodput_recording enable_jax_profiler
    enable_llm_inference_pool enable_mhc_lite enable_mllog enable_model_warmup
    enable_multi_tier_checkpointing enable_nnx enable_orbax_v1 enable_padding_causal_mask
    enable_pathways_goodput enable_prefix_caching enable_rampup_batch_size enable_single_controller
    enable_single_replica_ckpt_restoring enable_streaming_diloco enable_tensorboard
    enable_tpu_profiling_options enable_wandb engram eod_mask_loss expansion_factor_real_data
    first_phase_ragged_buffer_factor force_q_layout force_unroll freeze_audio_encoder_params
    freeze_vision_encoder_params gcs_metrics generate_padding_batch_eval
    generate_padding_batch_train generate_slice global_rampup_samples global_rope_proportion
    hardware image_path image_placeholder indexer_cutoff_threshold init_weights_seed
    input_data_sharding_logical_axes internal_compile internal_compile_num_devices jax_cache_dir
    jax_debug_log_modules jax_distributed_initialization_timeout jax_profiler_port key_proj kv_proj
    kv_quant_axis kv_quant_dtype kv_tp_size kv_wa_proj load_from_prefill_dir load_full_state_path
    load_parameters_path local_rope_proportion log_config log_period
    log_required_ragged_buffer_factor log_step_diagnostics logical_axis_rules
    logical_axis_rules_for_eval logits_proj_quant_calibration_method
    matmul_precision max_checkify max_corpus_chars max_inflight_computations
    max_num_checkpoints_to_keep max_num_images_per_example max_prefill_predict_length
    max_segments_per_seq megablox merge_gating_gmm mesh_axes metrics_file mla_kv mla_naive_kvcache
    mla_q mla_qk_head_chunk_size mllog_file mlpwi mlpwi_0 mlpwi_1 mlpwo mmap_eod_id mmap_npy_split
    mmap_split_sentences model_call_mode moe_chunk_barrier moe_dispatch_no_expert_sharding
    moe_dropless_fallback moe_ep_all_gather_sparse_core_id moe_fsdp_all_gather_sparse_core_id
    moe_fsdp_use_two_stage_all_gather moe_log_max_load_ratio moe_mlp_tp_size moe_mlpwi_0 moe_mlpwi_1
    moe_mlpwo moe_pin_sparse_core_all_gathers moe_pin_sparse_core_ep_all_gathers
    moe_pin_sparse_core_fsdp_all_gathers moe_pin_sparse_core_fsdp_all_gathers_fwd_only
    moe_routing_maps moe_topk_before_ep_all_gather moe_use_direct_token_gather moe_x_sorted
    mrope_section mtc_data_parallelism mtp_eval_target_module mtp_loss_scaling_factor
    mtp_reuse_input_embedding multi_sampling num_communication_overlapping_steps
    num_diloco_fragments num_epoch num_moe_emb_chunks num_moe_token_chunks num_slices
    num_vocab_tiling o_groups o_lora_rank optimize_mesh_for_tpu_v6e optimizer_memory_host_offload
    out_proj override_logical_axis_rules override_model_config packing
    packing_max_segments_per_sample parameter_memory_host_offload position_id_per_seconds
    prefill_cache_axis_order prefill_cache_dir prefill_chunk_size prefill_slice prometheus_port
    prompt pure_nnx pure_nnx_decoder qk_clip_threshold qkv_proj quant_cfg_path
    quantization_local_shard_count quantize_kvcache quantize_logits_proj quantize_mtp
    quantize_router_proj query_proj query_wa_proj ragged_block_size record_internal_nn_metrics
    remove_size_one_mesh_axis_from_type replicate_quant_scale reset_attention_mask reshape_q
    retry_dropless_first_steps return_log_prob return_routed_experts reuse_example_batch
    ring_scan_unroll rollout_backend rollout_tensor_parallelism router_topk_matmul_vjp run_name
    save_config_to_gcs save_quantized_params_path scan_layers scan_pipeline_iterations
    scan_pipeline_repeats set_remat_policy_on_layers_per_stage
    set_remat_policy_on_pipeline_iterations sft_train_on_completion_only shard_embed_moe_on_fsdp
    shard_exp_on_fsdp sharding_tolerance shardy sinkhorn_iterations skip_jax_distributed_system
    source_checkpoint_layout sparse_matmul
    stack_prefill_result_cache subslice_shape target_eval_loss te_comm_gemm_overlap
    te_ep_overflow_check_every_n_steps ulysses_context_sharding unquantized_modules
    upload_all_profiler_results use_2d_fsdp_sharding use_audio_in_video use_batch_split_schedule
    use_chat_template use_chunked_prefill use_csa_streamindex_kernel use_custom_sort_vjp
    use_gather_mosaic_kernel use_gmm_v2 use_gmm_v2_heuristic_tiling use_jax_splash use_lineage
    use_manual_quantization use_max_logit_estimate use_mhc_pallas_kernel use_mla_absorbed_mqa
    use_qk_norm_in_gdn use_qwix_quantization use_ragged_attention use_ragged_sort use_raiden_ffi
    use_ring_of_experts use_sequential_layers use_sft use_sliced_mla_proj use_splash_scheduler
    use_stream_chunking use_tokamax_gmm use_tokamax_splash use_truncation use_vertex_tensorboard
    use_weight_converter v_norm_with_scale value_proj video_path video_placeholder
    vocab_tiling_ag_once warm_input_reshard_before_run_start warmup_programs_in_init
    weight_block_size weight_quantization_calibration_method
    weight_sparsity_start_step weight_sparsity_update_step weight_sync_debug write_estimator_result
    """
)
# Whole families of keys, each by a pattern.
_IGNORED_FAMILIES = re.compile(
    r"""
    dcn_bandwidth_\w+
    | \w*checkpoint\w* | \w*profil\w* | \w*tokeniz\w* | \w*dataset\w* | \w*_for_vit
    | \w*_for_audio | vision_\w+ | video_max_\w+ | (hf|grain|olmo)_\w+ | (train|eval)_\w+ | dump_\w+
    | (xprof|wandb|vertex|inference|vllm|block_diffusion|distill|elastic|gdn|engram|indexer)_\w+
    | (local_)?sa_\w+ | local_use_splash_scheduler | experimental_sa_\w+ | (wi|wo)_tile_\w+
    | moba_\w+ | mhc_\w+ | muon_\w+ | ragged_gather_\w+ | decode_sampling_\w+
    | context_\w+ | per_device_batch_size_\w+ | \w*goodput\w* | managed_mldiagnostics\w*
    | lora_\w+ | tpu_num_\w+ | \w*step_deviation\w*
    | \w*step_time_deviation | \w*heartbeat\w* | report_\w+ | multi_tier_\w+ | profile_\w+
    | prefix_caching_\w+
    """,
    re.VERBOSE,
)


# How many devices a mesh axis has within a slice and between slices.
PARALLELISM = re.compile(
    r"""
    (ici|dcn)_(data|fsdp|fsdp_transpose|sequence|context|context_usp_ulysses
    |context_autoregressive|tensor|expert
    |tensor_transpose|tensor_sequence|autoregressive|pipeline|diloco)_parallelism
    """,
    re.VERBOSE,
)


def kind(key: str) -> str | None:
    """The kind of a key: `mapped`, `fixed` or `ignored`, or None when it is not known."""
    if key in MAPPED:
        return "mapped"
    if key in FIXED:
        return "fixed"
    families = (PARALLELISM, _IGNORED_FAMILIES)
    ignored = key in _IGNORED or any(family.fullmatch(key) for family in families)
    return "ignored" if ignored else None


def listed_keys() -> list[str]:
    """Every key that is listed by itself, to find the nearest to an unknown one."""
    return sorted(MAPPED | set(FIXED) | _IGNORED)


def is_accepted(key: str, value: object) -> bool:
    """Whether a fixed key has a value that this project computes with."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = ast.literal_eval(value)  # MaxText writes lists as text into its dumps
        except (ValueError, SyntaxError):
            return False
    plain = list(value) if isinstance(value, tuple) else value
    return any(_same(plain, accepted) for accepted in FIXED[key])


def _same(value: object, accepted: object) -> bool:
    """Whether two values are equal, where a bool equals no number."""
    if isinstance(value, bool) or isinstance(accepted, bool):
        return value is accepted
    return value == accepted
