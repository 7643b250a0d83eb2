"""What the plugin expects of SGLang, all in one place: functions it patches (`HOOKED`), functions it overrides or calls
(`RELIED_ON`), names it reads (`READ`), server arguments (`ARGUMENTS`).

Functions are checked in the installed SGLang when the plugin registers. Everything is checked in the sources of every
supported version (``tests/wheels``). Nothing here goes by a version's number: what moved or came later is looked for.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ..names import GDN, MAMBA2
from .records import Names, Surface


def _same(path: str, parameters: str, *former: str) -> Surface:
    return Surface(path, (tuple(parameters.split()),), former)


def _either(path: str, *parameters: str) -> Surface:
    return Surface(path, tuple(tuple(names.split()) for names in parameters))


def _read(owner: str, names: str) -> tuple[Names]:
    return (Names(owner, tuple(names.split())),)


def _first_of(*alternatives: tuple[str, str]) -> tuple[Names, ...]:
    return tuple(Names(owner, tuple(names.split())) for owner, names in alternatives)


_ATTENTION = "sglang.srt.layers.attention"
_HL = f"{_ATTENTION}.hybrid_linear_attn_backend"
_GDN = f"{_ATTENTION}.linear.gdn_backend"
_METADATA = f"{_ATTENTION}.mamba.mamba2_metadata"
_BASE_BACKEND = f"{_ATTENTION}.base_attn_backend:AttentionBackend"
_SIZING = "sglang.srt.mem_cache.kv_cache_configurator"
_KVC = f"{_SIZING}:KVCacheConfigurator"
_POOLS = "sglang.srt.mem_cache.memory_pool"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_COMPONENTS = "sglang.srt.mem_cache.unified_cache.components"
_COMPONENT = "cache int8_ckpt_pool _commit_int8_checkpoint _free_mamba_value"
_RADIX = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
_HOST_COPIES = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController"
_CHECKPOINTS = "sglang.srt.mem_cache.mamba_checkpoint_pool"
_DECODE = "sglang.srt.disaggregation.decode"
_CONTROLLER = "sglang.srt.managers.cache_controller"
_STATES_TO_HOST = (
    "full_layer_mapping mamba_layer_mapping load_cache_event storage_backend use_mla host_mamba_evict_fn "
    "device_mamba_evict_fn prefetch_threshold model_name storage_backend_extra_config enable_storage_metrics"
)
_SCHEDULE = "sglang.srt.managers.schedule_batch"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor"
_RUNNER = "sglang.srt.model_executor.model_runner_components"
_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter"
_OVERRIDES = "sglang.srt.arg_groups.overrides"
_CONTEXT = "sglang.srt.runtime_context"
_FORWARD = "sglang.srt.model_executor.forward_batch_info"
_ARGUMENTS = "sglang.srt.server_args:ServerArgs"
_REGISTRY = "sglang.srt.plugins.hook_registry"


#: Surfaces that the hooks patch, by a short name.
HOOKED: dict[str, Surface] = {
    "add_cli_args": _same(f"{_ARGUMENTS}.add_cli_args", "parser"),
    "from_cli_args": _same(f"{_ARGUMENTS}.from_cli_args", "cls args"),
    "check_server_args": _same(f"{_ARGUMENTS}.check_server_args", "self"),
    "handle_ngram": _same("sglang.srt.arg_groups.speculative_hook:_handle_ngram", "server_args"),
    "handle_linear_attn": Surface(
        "sglang.srt.arg_groups.attention_hook:handle_linear_attn_backend",
        (("self",), ("server_args",)),
        (f"{_ARGUMENTS}._handle_linear_attn_backend",),
    ),
    "prepare_for_extend": _same(f"{_SCHEDULE}:ScheduleBatch.prepare_for_extend", "self"),
    "track_entry": _same(f"{_SCHEDULE}:ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend", "self req"),
    "pad_inputs": _same(f"{_FORWARD}:ForwardBatch._pad_inputs_to_size", "self model_runner num_tokens bs"),
    "attn_backend_wrapper": _same(f"{_ATTENTION}.attention_registry:attn_backend_wrapper", "runner full_attn_backend"),
    "init_attention_backends": _same(
        "sglang.srt.model_executor.model_runner:ModelRunner.init_attention_backends", "self"
    ),
    "build_request_pool": _same(f"{_KVC}._build_hybrid_req_pool", "self max_num_reqs extra_max_context_len"),
    "build_decode_pool": _same(
        f"{_KVC}._build_hybrid_mamba_decode_req_pool", "self max_num_reqs extra_max_context_len pre_alloc_size"
    ),
    "size_mamba_pool": _same(f"{_KVC}._handle_max_mamba_cache", "self total_rest_memory"),
    "prepare_for_caching": _same(
        f"{_COMPONENTS}.mamba:MambaComponent.prepare_for_caching_req",
        "self req insert_params token_ids_len is_finished",
        f"{_COMPONENTS}.mamba_component:MambaComponent.prepare_for_caching_req",
    ),
    "cleanup_after_caching": _same(
        f"{_COMPONENTS}.mamba:MambaComponent.cleanup_after_caching_req",
        "self req is_finished insert_result insert_params",
        f"{_COMPONENTS}.mamba_component:MambaComponent.cleanup_after_caching_req",
    ),
    "slots_per_request": _same(f"{_KVC}._calculate_mamba_ratio", "self"),
    "accept_grammar": _same(f"{_RESULTS}._accept_grammar_tokens", "self req tokens"),
    "prefill_result": _same(f"{_RESULTS}.process_batch_result_prefill", "self batch result"),
    "can_cache_finished": Surface(
        f"{_RESULTS}._mamba_can_cache_finished_req", (("self", "req", "result", "i"),), later=True
    ),
    "release": _either(
        "sglang.srt.mem_cache.common:release_kv_cache", "req tree_cache is_insert", "req tree_cache checkpoint"
    ),
    "lazy_prepare": _same(
        f"{_SCHEDULE}:ScheduleBatch.mamba_lazy_spec_prepare", "self mamba_track_interval max_draft_tokens"
    ),
    "track_indices": _same(f"{_SCHEDULE}:set_mamba_track_indices_from_reqs", "batch track_positions"),
    "metrics_reporter": _same(f"{_REPORTER}.__post_init__", "self"),
    "report_decode_stats": _either(
        f"{_REPORTER}.report_decode_stats",
        "self can_run_cuda_graph running_batch num_correct_drafts",
        "self can_run_cuda_graph running_batch num_generated_tokens",
    ),
    "states_leave": _same(f"{_HOST_COPIES}.start_writing", "self"),
    "states_arrive": _same(f"{_HOST_COPIES}.start_loading", "self"),
    "host_pools": _either(
        "sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler:build_hybrid_mamba_stack",
        f"params server_args kv_pool mamba_pool {_STATES_TO_HOST}",
        f"params kv_pool mamba_pool {_STATES_TO_HOST}",
        f"params decls mamba_pool {_STATES_TO_HOST}".replace("use_mla", "use_mla qsa_pool"),
        f"params decls mamba_pool {_STATES_TO_HOST}".replace("use_mla", "use_mla qsa_pool").replace(
            "mamba_layer_mapping", "start_layer"
        ),
    ),
    "checkpoint_stored": _same(
        f"{_CHECKPOINTS}:MambaCheckpointPool.store_from_active", "self active_mamba_pool active_slots ckpt_slots"
    ),
    "checkpoint_loaded": _same(
        f"{_CHECKPOINTS}:MambaCheckpointPool.load_to_active", "self active_mamba_pool ckpt_slots active_slots"
    ),
    "back_up": _same(f"{_RADIX}._execute_and_commit_kv_backup", "self action write_back"),
    "slots_freed": _same(
        f"{_POOLS}:HybridReqToTokenPool.free_mamba_cache", "self req mamba_ping_pong_track_buffer_to_keep"
    ),
    "preallocated": _same(
        f"{_DECODE}:DecodePreallocQueue._pre_alloc", "self req prefix_indices prefix_len total_prefix_len"
    ),
    "transferred": _same(f"{_DECODE}:DecodeTransferQueue._commit_transfer_to_req", "self decode_req"),
    "update_running": _same("sglang.srt.managers.scheduler:Scheduler.update_running_batch", "self batch"),
    "mixed": _same(f"{_SCHEDULE}:ScheduleBatch.mix_with_running", "self running_batch"),
    "run_batch": _same("sglang.srt.managers.scheduler:Scheduler.run_batch", "self batch pp_proxy_tensors"),
    "load_back": _same(f"{_RADIX}.load_back", "self node_id mem_quota req"),
    "release_memory": _same(f"{_UPDATER}.release_memory_occupation", "self recv_req"),
    "resume_memory": _same(f"{_UPDATER}.resume_memory_occupation", "self recv_req"),
    "log_stats": _same("sglang.srt.observability.metrics_collector:SchedulerMetricsCollector.log_stats", "self stats"),
    "internal_state": _same("sglang.srt.managers.scheduler:Scheduler.get_internal_state", "self recv_req"),
    "plan_stream": _same("sglang.srt.speculative.spec_utils:get_plan_stream", "device"),
    "verify_block": _either(
        "sglang.srt.speculative.dflash_info:DFlashVerifyInput.prepare_for_verify",
        "self batch target_worker",
        "self batch target_worker defer_metadata_init",
    ),
    "commit_block": _either(
        "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2._update_target_mamba_state_after_verify",
        "self batch seq_lens_pre_verify commit_lens",
        "self batch seq_lens_pre_verify seq_lens_post_verify commit_lens",
    ),
    "commit": _same(
        f"{_HL}:HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        "self last_correct_step_indices mamba_track_indices mamba_steps_to_track model req_pool_indices",
    ),
}

#: Surfaces that are overridden, called or stood in for: not patched, but they must be what we think they are.
RELIED_ON: tuple[Surface, ...] = (
    _same(f"{_BASE_BACKEND}.init_forward_metadata_in_graph", "self forward_batch"),
    _same(f"{_HL}:MambaAttnBackendBase.__init__", "self model_runner"),
    _same(f"{_HL}:MambaAttnBackendBase._forward_metadata", "self forward_batch"),
    _same(f"{_HL}:MambaAttnBackendBase.init_forward_metadata", "self forward_batch"),
    _same(f"{_HL}:MambaAttnBackendBase.init_forward_metadata_out_graph", "self forward_batch in_capture"),
    _same(f"{_HL}:MambaAttnBackendBase.update_verify_buffers_to_fill_after_draft", "self spec_info cuda_graph_bs"),
    _same(f"{_HL}:Mamba2AttnBackend.__init__", "self model_runner"),
    _same(f"{_HL}:Mamba2AttnBackend.init_forward_metadata", "self forward_batch"),
    _same(f"{_HL}:Mamba2AttnBackend.init_forward_metadata_out_graph", "self forward_batch in_capture"),
    _same(
        f"{_HL}:Mamba2AttnBackend.forward",
        "self mixer hidden_states output layer_id forward_batch mup_vector use_triton_causal_conv",
    ),
    _same(f"{_GDN}:GDNAttnBackend.__init__", "self model_runner"),
    _same(f"{_GDN}:GDNAttnBackend.init_forward_metadata", "self forward_batch"),
    _same(f"{_GDN}:GDNAttnBackend.forward_extend", "self layer forward_batch mixed_qkv a b kwargs"),
    _same(f"{_METADATA}:Mamba2Metadata.prepare_mixed", "cls forward_metadata chunk_size forward_batch"),
    _same(
        f"{_ATTENTION}.linear.kernels.gdn_flashinfer:maybe_build_flashinfer_checkpoint_plan",
        "forward_batch forward_metadata device",
    ),
    _same(
        f"{_POOLS}:MambaPool.__init__",
        "self size spec_state_size cache_params mamba_layer_ids device enable_memory_saver "
        "speculative_num_draft_tokens speculative_eagle_topk enable_linear_replayssm linear_replayssm_cache_len "
        "envelope_layout enable_linear_replayssm_spec",
    ),
    _same(f"{_POOLS}:MambaPool.clear_slots", "self indices"),
    _same(f"{_POOLS}:MambaPool.copy_from", "self src_indices dst_indices"),
    _same(f"{_POOLS}:MambaPool.get_cpu_copy", "self indices"),
    _same(f"{_POOLS}:MambaPool.load_cpu_copy", "self mamba_cache_cpu indices"),
    _same(f"{_POOLS}:HybridReqToTokenPool._alloc_ping_pong_buffer", "self req"),
    _same(f"{_POOLS}:HybridReqToTokenPool.free_mamba_cache", "self req mamba_ping_pong_track_buffer_to_keep"),
    _same(f"{_POOLS}:HybridReqToTokenPool.mamba2_layer_index", "self layer_id"),
    _same(f"{_POOLS}:HybridReqToTokenPool.get_mamba_indices", "self req_indices"),
    _same(f"{_SCHEDULE}:mamba_lazy_spec_in_window", "req mamba_track_interval max_draft_tokens"),
    _same(f"{_CONTEXT}:RuntimeContext.override", "self source fields"),
    _same(f"{_CONTEXT}:ParallelContext.override", "self kwargs"),
    _same(
        f"{_COMPONENTS}.mamba:MambaComponent.finalize_match_result_in_cache",
        "self params result",
        f"{_COMPONENTS}.mamba_component:MambaComponent.finalize_match_result_in_cache",
    ),
    _either(f"{_CONTEXT}:publish", "server_args role hf_config", "server_args role hf_config ranks"),
    _same(
        f"{_RUNNER}.spec_aux_hidden_state:resolve_spec_aux_hidden_state_config",
        "server_args model_config spec_algorithm is_draft_worker",
    ),
    _same("sglang.srt.configs.hybrid_arch:mambaish_config", "model_config"),
    _same("sglang.srt.configs.model_config:ModelConfig.get_total_num_kv_heads", "self"),
    _same("sglang.srt.speculative.adaptive_spec_params:resolve_candidate_steps_from_config", "cfg_path"),
    _same("sglang.srt.model_loader.utils:get_model_architecture", "model_config"),
    _same("sglang.srt.speculative.spec_utils:prepare_mamba_track_for_verify", "batch"),
    _same("sglang.srt.managers.scheduler:Scheduler._advance_pending_grammar", "self"),
    _same("sglang.srt.utils.common:rank0_log", "msg"),
    _same(f"{_REGISTRY}:HookRegistry.register", "cls target hook hook_type source"),
    _same(f"{_REGISTRY}:HookRegistry.apply_hooks", "cls"),
    _same(f"{_REGISTRY}:_propagate_patch", "original wrapped source_module"),
)

#: Names that are read, set or called as they are. Of several owners in a row the first that has all its names is used
#: and those before it have none of theirs; empty names say what is done without.
READ: tuple[tuple[Names, ...], ...] = (
    # loading
    _read("sglang.srt.plugins", "load_plugins"),
    _read(_REGISTRY, "HookRegistry HookType"),
    _read(f"{_REGISTRY}:HookType", "BEFORE AFTER AROUND"),
    _read("sglang.benchmark.one_batch", "cli_main load_model prepare_synthetic_inputs_for_latency_test np"),
    _read(
        "sglang.kernels.ops.mamba.triton_ops.ssu_dispatch",
        "_mamba_ssu_backend initialize_mamba_selective_state_update_backend",
    ),
    # arguments and the model
    _read("sglang.srt.server_args", "ServerArgs"),
    _read(_OVERRIDES, "resolved_view"),
    _first_of((_OVERRIDES, "declare_resolution"), (_ARGUMENTS, "speculative_eagle_topk speculative_num_steps")),
    _first_of((_ARGUMENTS, "get_model_config"), ("sglang.srt.arg_groups.model_override_base", "model_config_of")),
    _read("sglang.srt.configs.hybrid_arch", "hybrid_gdn_config mamba2_config hybrid_lightning_config mambaish_config"),
    _first_of(
        ("sglang.srt.configs.hybrid_arch", "hybrid_kda_config"),
        ("sglang.srt.configs.hybrid_arch", "kimi_linear_config"),
    ),
    _read("sglang.srt.configs.qwen3_next:Qwen3NextConfig", "mamba2_cache_params full_attention_layer_ids"),
    _read("sglang.srt.configs.nemotron_h:NemotronHConfig", "mamba2_cache_params full_attention_layer_ids"),
    _read("sglang.srt.configs.mamba_utils:Mamba2CacheParams", "shape layers"),
    _read("sglang.srt.configs.mamba_utils:Mamba2StateShape", "conv temporal num_k_heads_per_tp"),
    _read("sglang.srt.configs.model_config", "ModelConfig"),
    _read(
        "sglang.srt.configs.model_config:ModelConfig",
        "dtype vocab_size head_dim v_head_dim num_hidden_layers num_attention_heads from_server_args",
    ),
    _read("sglang.srt.environ", "envs"),
    _read("sglang.srt.environ:Envs", "SGLANG_FLASHINFER_WORKSPACE_SIZE"),
    _read("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm"),
    _read("sglang.srt.speculative.spec_info:SpeculativeAlgorithm", "NONE is_ngram from_string"),
    # schedulers that are Ray's actors
    _read("sglang.srt.ray.engine", "SchedulerActor"),
    _read("sglang.srt.ray.scheduler_actor", "SchedulerActor"),
    # a server that is not started
    _read("sglang.srt.arg_groups.speculative_hook", "_handle_dflash"),
    _read(_SIZING, "KVCacheConfigurator"),
    _read(
        _KVC,
        "device gpu_id model_config server_args kv_cache_dtype kv_cache_dtype_str model_dtype page_size spec_algorithm "
        "is_draft_worker post_capture_kv_active spec_aux_config is_hybrid_swa is_hybrid_swa_compress use_mla_backend "
        "layer_info",
    ),
    _first_of((_KVC, "attn_dp_size pp_size"), (_KVC, "ps")),
    _read(f"{_RUNNER}.layer_setup:ModelLayerInfo", "start_layer end_layer num_effective_layers"),
    _read(f"{_RUNNER}.layer_setup", "ModelLayerInfo"),
    _read(f"{_RUNNER}.spec_aux_hidden_state", "resolve_spec_aux_hidden_state_config"),
    _first_of((_ARGUMENTS, "resolve_once"), (_ARGUMENTS, "")),
    _first_of((_CONTEXT, "SpawnRanks"), (_CONTEXT, "")),
    _first_of((f"{_CONTEXT}:ParallelContext", "override_permanently"), (f"{_CONTEXT}:ParallelContext", "")),
    # pools and their sizes
    _read(_SIZING, "get_schedule get_memory get_context"),
    _first_of((_SIZING, "max_speculative_num_draft_tokens"), (_ARGUMENTS, "max_speculative_num_draft_tokens")),
    _read(_KVC, "is_draft_worker model_config server_args spec_algorithm"),
    _first_of((_KVC, "ps"), (_KVC, "attn_dp_size")),
    _read(_POOLS, "MambaPool HybridReqToTokenPool"),
    _read(
        f"{_POOLS}:MambaPool",
        "size device mamba_cache num_mamba_layers memory_saver_adapter enable_custom_mem_pool custom_mem_pool",
    ),
    _read(f"{_POOLS}:MambaPool.State", "conv temporal"),
    _read(f"{_POOLS}:MambaPool.SpeculativeState", "intermediate_ssm intermediate_conv_window"),
    _read(
        f"{_POOLS}:HybridReqToTokenPool",
        "mamba_pool_cls mamba_pool req_to_token enable_mamba_extra_buffer mamba_ping_pong_track_buffer_size size",
    ),
    # sleep
    _read("sglang.srt.constants", "GPU_MEMORY_TYPE_KV_CACHE"),
    _read("sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter", "region"),
    _read(_UPDATER, "tp_worker"),
    _read("sglang.srt.managers.io_struct:ReleaseMemoryOccupationReqInput", "tags"),
    _read("sglang.srt.managers.io_struct:ResumeMemoryOccupationReqInput", "tags"),
    # backends
    _read(
        "sglang.srt.model_executor.model_runner:ModelRunner",
        "is_draft_worker model_config server_args spec_algorithm model dtype req_to_token_pool attn_backend "
        "decode_attn_backend_group device gpu_id max_running_requests kv_cache_dtype kv_cache_configurator",
    ),
    _read(_HL, "Mamba2AttnBackend"),
    _read(_GDN, "GDNAttnBackend"),
    _read(f"{_HL}:HybridLinearAttnBackend", "linear_attn_backend full_attn_backend attn_backend_list"),
    _read(
        f"{_HL}:MambaAttnBackendBase",
        "device topk req_to_token_pool forward_metadata conv_states_shape retrieve_next_token_list "
        "retrieve_next_sibling_list",
    ),
    _read(f"{_GDN}:GDNAttnBackend", "kernel_dispatcher conv_states_shape"),
    _read(f"{_GDN}:GDNKernelDispatcher", "extend_uses_state_checkpoints"),
    _read(f"{_ATTENTION}.mamba.mamba", "MambaMixer2"),
    _read(
        f"{_ATTENTION}.mamba.mamba:MambaMixer2",
        "in_proj out_proj norm conv1d activation A D dt_bias tp_size intermediate_size conv_dim num_heads n_groups "
        "head_dim ssm_state_size",
    ),
    _read(
        "sglang.srt.layers.radix_linear_attention:RadixLinearAttention",
        "layer_id conv_weights bias activation A_log dt_bias q_dim k_dim v_dim num_q_heads num_k_heads num_v_heads "
        "head_q_dim head_k_dim head_v_dim",
    ),
    _read("sglang.srt.speculative.dflash_worker_v2", "DFlashWorkerV2"),
    _read("sglang.srt.models.qwen3_next:Qwen3NextForCausalLM", "set_dflash_layers_to_capture"),
    # a forward
    _read("sglang.srt.speculative.eagle_info", "EagleVerifyInput"),
    _read(
        "sglang.srt.speculative.eagle_info:EagleVerifyInput",
        "draft_token_num retrieve_next_token retrieve_next_sibling",
    ),
    _read(
        "sglang.srt.speculative.ngram_info:NgramVerifyInput",
        "draft_token_num retrieve_next_token retrieve_next_sibling",
    ),
    _read("sglang.srt.speculative.dflash_info:DFlashVerifyInput", "draft_token_num"),
    _read(
        f"{_FORWARD}:ForwardBatch",
        "forward_mode spec_info req_pool_indices extend_prefix_lens extend_prefix_lens_cpu extend_seq_lens_cpu "
        "mamba_track_mask mamba_track_indices",
    ),
    _first_of(
        (f"{_FORWARD}:ForwardBatch", "mamba_prefill_track_mask_cpu mamba_track_seqlens_cpu"),
        (f"{_SCHEDULE}:_MambaRadixCacheV2TrackEntry", "track_mask track_seqlen"),
    ),
    _read(f"{_FORWARD}:ForwardMode", "is_extend is_idle is_mixed is_target_verify is_draft_extend_v2"),
    _read(
        f"{_METADATA}:ForwardMetadata",
        "mamba_cache_indices mamba_track_indices retrieve_next_token retrieve_next_sibling has_mamba_track_mask "
        "mamba_track_mask_indices conv_states_mask_indices track_conv_indices track_ssm_h_src track_ssm_h_dst "
        "track_ssm_final_src track_ssm_final_dst state_checkpoint_cu_starts num_state_checkpoints "
        "state_checkpoint_every_n_tokens",
    ),
    _first_of(
        (
            f"{_METADATA}:ForwardMetadata",
            "track_chunk_idx track_ssm_h_batch_src track_ssm_seq_idx track_ssm_end_locs track_ssm_recompute_dst",
        ),
        (f"{_METADATA}:ForwardMetadata", ""),
    ),
    _read(f"{_METADATA}:Mamba2Metadata", "mixed_metadata num_decodes"),
    _read(
        f"{_METADATA}:Mamba2Metadata.MixedMetadata",
        "has_initial_states prep_initial_states chunk_size chunk_indices chunk_offsets",
    ),
    _first_of((_CONTEXT, "mamba_cache_chunk_size"), (_ARGUMENTS, "mamba_cache_chunk_size")),
    _first_of((_OVERRIDES, "mamba_cache_chunk_size"), (_ARGUMENTS, "mamba_cache_chunk_size")),
    _read(_CONTEXT, "get_server_args get_parallel"),
    _first_of((f"{_HL}:MambaAttnBackendBase", "mamba_chunk_size"), (f"{_HL}:MambaAttnBackendBase", "")),
    # requests and the radix cache
    _read(
        f"{_SCHEDULE}:ScheduleBatch",
        "reqs req_pool_indices decoding_reqs forward_mode spec_algorithm mamba_track_mask mamba_track_indices "
        "mamba_lazy_spec_track_positions_cpu",
    ),
    _read(
        f"{_SCHEDULE}:Req",
        "skip_radix_cache_insert finished is_retracted seqlen get_fill_ids origin_input_ids output_ids_through_stop "
        "grammar",
    ),
    _read("sglang.srt.mem_cache.base_prefix_cache:InsertParams", "key value mamba_value prev_prefix_len"),
    _read("sglang.srt.mem_cache.base_prefix_cache:InsertResult", "mamba_exist"),
    _read("sglang.srt.mem_cache.radix_cache:RadixKey", "__getitem__"),
    _read(_RADIX, "insert req_to_token_pool components mamba_evictable_size"),
    _first_of((f"{_SCHEDULE}:Req", "kv_committed_len"), (f"{_SCHEDULE}:ReqKvInfo", "kv_committed_len")),
    _first_of((f"{_SCHEDULE}:Req", "owned_kv_len"), (f"{_SCHEDULE}:Req", "effective_kv_committed_len")),
    _first_of((f"{_SCHEDULE}:Req", "mamba_pool_idx"), (f"{_SCHEDULE}:ReqKvInfo", "mamba_pool_idx")),
    _first_of(
        (f"{_SCHEDULE}:Req", "mamba_ping_pong_track_buffer mamba_next_track_idx mamba_last_track_seqlen"),
        (f"{_SCHEDULE}:ReqKvInfo", "mamba_ping_pong_track_buffer mamba_next_track_idx mamba_last_track_seqlen"),
    ),
    _read(_RESULTS, "tree_cache"),
    _read(_RADIX, "enable_mamba_extra_buffer supports_mamba"),
    # states in int8
    _read(f"{_CHECKPOINTS}:MambaCheckpointPool", "estimate_mem_usage_bytes"),
    # copies to the host and back
    _read(_HOST_COPIES, "mem_pool_host write_queue load_queue ack_load_queue"),
    _read("sglang.srt.mem_cache.unified_cache.cache_action:BackupKV", "node_ids"),
    _first_of(
        (f"{_CONTROLLER}:CacheOperation", "pool_transfers"),
        ("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller:CacheOperation", "pool_transfers"),
    ),
    _read(f"{_CONTROLLER}:HiCacheAck", "finish_event"),
    _read("sglang.srt.mem_cache.hicache_storage", "PoolName"),
    _read("sglang.srt.mem_cache.hicache_storage:PoolName", "MAMBA"),
    _read(_COMPONENTS, "ComponentType"),
    _read("sglang.srt.mem_cache.unified_cache.component_type:ComponentType", "MAMBA"),
    _read(f"{_SCHEDULE}:Req", "last_node"),
    _read("sglang.srt.mem_cache.hicache_storage:PoolTransfer", "name device_indices"),
    _first_of(
        ("sglang.srt.mem_cache.pool_host.group:HostPoolGroup", "entry_map"),
        ("sglang.srt.mem_cache.memory_pool_host:HostPoolGroup", "entry_map"),
    ),
    _first_of(
        ("sglang.srt.mem_cache.pool_host.group:PoolEntry", "device_pool"),
        ("sglang.srt.mem_cache.memory_pool_host:PoolEntry", "device_pool"),
    ),
    _first_of(
        (f"{_SCHEDULE}:Req", "mamba_cow_src_index mamba_needs_clear"),
        (f"{_SCHEDULE}:ReqKvInfo", "mamba_cow_src_index mamba_needs_clear"),
    ),
    _first_of(
        (f"{_COMPONENTS}.mamba:MambaComponent", _COMPONENT),
        (f"{_COMPONENTS}.mamba_component:MambaComponent", _COMPONENT),
    ),
    _first_of(
        (f"{_COMPONENTS}.mamba:MambaComponent", "_select_finished_checkpoint"),
        (f"{_COMPONENTS}.mamba:MambaComponent", ""),
    ),
    # statistics
    _read(
        _REPORTER,
        "scheduler metrics_collector spec_num_forward_ct spec_num_accept_tokens is_stats_logging_rank "
        "current_scheduler_metrics_enabled",
    ),
    _read("sglang.srt.managers.scheduler:Scheduler", "tp_worker running_batch metrics_reporter"),
    # prefill and decode servers
    _read("sglang.srt.managers.scheduler", "TEST_RETRACT TEST_RETRACT_INTERVAL"),
    _read(
        "sglang.srt.managers.scheduler:Scheduler",
        "result_queue last_batch forward_ct process_batch_result req_to_token_pool disaggregation_mode",
    ),
    _read(f"{_SCHEDULE}:ScheduleBatch", "check_decode_mem"),
    _read(f"{_DECODE}:DecodePreallocQueue", "req_to_token_pool"),
    _read(f"{_DECODE}:DecodeTransferQueue", "scheduler"),
    _read(f"{_DECODE}:DecodeRequest", "req"),
    _read("sglang.srt.managers.tp_worker:TpModelWorker", "model_runner"),
    _read("sglang.srt.observability.metrics_collector:SchedulerMetricsCollector", "labels"),
    _read("sglang.srt.managers.io_struct:GetInternalStateReqOutput", "internal_state"),
)

#: Server arguments that are read or decided, beside those of the guards.
ARGUMENTS: tuple[str, ...] = (
    "model_path",
    "speculative_algorithm",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "speculative_adaptive",
    "speculative_adaptive_config",
    "max_running_requests",
    "max_mamba_cache_size",
    "linear_attn_backend",
    "linear_attn_decode_backend",
    "linear_attn_verify_backend",
    "mamba_full_memory_ratio",
    "disable_radix_cache",
    # of a server that is not started
    "device",
    "dtype",
    "skip_tokenizer_init",
    "mamba_ssm_dtype",
    "context_length",
    "trust_remote_code",
    "disable_overlap_schedule",
    "mamba_radix_cache_strategy",
    "uses_mamba_radix_cache",
    "mamba_track_interval",
    "speculative_draft_model_path",
    "enable_linear_replayssm_spec",
    "enable_hierarchical_cache",
    "disaggregation_mode",
    "disaggregation_decode_extra_slots",
    "use_ray",
)


def backend_name(family: str) -> tuple[ModuleType, str]:
    """The module and the name by which `attn_backend_wrapper` imports the backend of ``family``."""
    path, name = {GDN: (_GDN, "GDNAttnBackend"), MAMBA2: (_HL, "Mamba2AttnBackend")}[family]
    return importlib.import_module(path), name
