"""Flags that users of this kind of system know and that do not apply here: name → why, and what to do instead.

A run never ignores a setting: what is in this table is refused with its sentence. The table holds slime's own
arguments and the arguments of Megatron-LM that its users set most.
"""

from __future__ import annotations

_NO_COLOCATE = "trainer and engines are separate services on separate devices; nothing is swapped in and out"
_RANKS = "set actor_num_nodes and actor_num_gpus_per_node"
_MODEL_SHAPE = "the shape of the model is read from config.json of hf_checkpoint"
_TRACKERS = "a run writes metrics.jsonl and TensorBoard files in its directory"
_PARALLEL = (
    "the trainer is parallel over data, tensors (tensor_model_parallel_size) and context (context_parallel_size) only"
)
_CRITIC = "the critic's ranks are on the trainer's host; set critic_num_gpus_per_node"
_PLUGIN = "this hook does not exist; custom code goes in by custom_generate_function_path and custom_rm_path"
_CHECKSUM = "files of weights carry XXH3 checksums of 128 bits, and engines are verified by their own"
_DEBUG = (
    "`tetrarch samples` shows what was generated, `tetrarch export-samples` writes a step to a file and"
    " save_debug_rollout_data every step, and load_debug_rollout_data trains it"
)
_MOE = "experts are read from config.json of hf_checkpoint; the router has no auxiliary loss, and no token is dropped"
_TEACHER = (
    "a teacher is a Hugging Face checkpoint on the ranks (opd_teacher_load), or any engine with SGLang's API"
    " (opd_teacher_url)"
)
_FILTER = (
    "whole groups are filtered (dynamic_sampling_filter_path, buffer_filter_path); a grader may leave a sample unscored"
)
_DATA = "data comes from JSONL or parquet files (prompt_data, prompt_data_mixture, eval_prompt_data)"
_MEMORY = "the trainer chooses its own memory settings"
_ROUTER = "each rollout node runs a router of its own; pass its options as --sglang-router-<name>"
_CHECKPOINT = "checkpoints hold all that a resume needs; set save and save_interval"
_CI = "it serves the tests of another project"

_BY_REASON: dict[str, str] = {
    _NO_COLOCATE: "colocate offload offload_train offload_rollout release_train",
    "node width follows from actor_num_gpus_per_node and rollout_num_gpus_per_engine": "num_gpus_per_node",
    "the only training backend is Megatron-Core": "train_backend",
    "the backend follows from the device: gloo on a CPU, NCCL on GPUs": "distributed_backend",
    "set update_timeout and batch_timeout (seconds)": "distributed_timeout_minutes",
    "results travel over gRPC; there are no senders to distribute": "use_distributed_post http_proxy",
    _RANKS: "world_size nnodes nproc_per_node",
    _PARALLEL: (
        "pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size"
        " virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage sequence_parallel allgather_cp"
        " decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers use_distributed_optimizer"
        " overlap_grad_reduce overlap_param_gather"
    ),
    _MODEL_SHAPE: (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups group_query_attention kv_channels"
        " vocab_size padded_vocab_size make_vocab_size_divisible_by max_position_embeddings seq_length norm_epsilon"
        " normalization rotary_base rotary_percent use_rotary_position_embeddings swiglu disable_bias_linear"
        " add_qkv_bias qk_layernorm untie_embeddings_and_output_weights tokenizer_type tokenizer_model model_name"
        " custom_model_provider_path spec megatron_config_path position_embedding_type num_experts"
    ),
    _CRITIC: "critic_num_nodes",
    "a checkpoint in save holds actor and critic": "critic_save",
    _CHECKSUM: "update_weight_delta_checksum",
    "files of weights become visible by one rename; watch for manifest.json": "custom_update_weight_post_write_path",
    _PLUGIN: (
        "rollout_function_path eval_function_path rollout_sample_hook_path custom_rollout_log_function_path"
        " custom_eval_rollout_log_function_path rollout_data_postprocess_path"
        " custom_pg_loss_reducer_function_path custom_reward_post_process_path"
        " custom_convert_samples_to_train_data_path rollout_all_samples_process_path custom_megatron_init_path"
        " custom_megatron_before_log_prob_hook_path custom_megatron_before_train_step_hook_path data_source_path"
    ),
    _FILTER: "rollout_sample_filter_path",
    "the buffer keeps every finished group by itself, and requests in flight follow pause_mode": (
        "partial_rollout mask_offpolicy_in_partial_rollout"
    ),
    "mismatch metrics between trainer and engine are always computed": "get_mismatch_metrics",
    "the reference model is a Hugging Face checkpoint: set ref_load": "ref_ckpt_step",
    "advantages follow from advantage_estimator": "disable_compute_advantages_and_returns",
    "entropy is always measured": "use_rollout_entropy",
    "the optimizer is AdamW with all its moments; set lr, weight_decay, adam_beta1, adam_beta2, adam_eps": (
        "optimizer reset_optimizer_states use_stateless_adam use_precision_aware_optimizer optimizer_cpu_offload"
        " overlap_cpu_optimizer_d2h_h2d"
    ),
    "set lr_warmup_iters (optimizer steps)": "lr_warmup_fraction lr_warmup_samples lr_warmup_init",
    "the learning rate decays over the whole run; set lr_decay_style and min_lr": (
        "lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_style"
    ),
    _MEMORY: (
        "recompute_granularity recompute_method recompute_num_layers recompute_activations recompute_loss_function"
        " log_probs_chunk_size log_probs_max_tokens_per_gpu data_pad_size_multiplier attention_backend"
        " attention_softmax_in_fp32 accumulate_allreduce_grads_in_fp32 use_flash_attn qwen_gdn_backend transformer_impl"
    ),
    "set bf16; on a CPU training is in float32": "fp16 fp8 fp8_format fp8_recipe fp8_param_gather",
    "dropout would make the trainer's log-probs differ from the engine's; there is none": (
        "attention_dropout hidden_dropout"
    ),
    "micro-batches are balanced by tokens by themselves (use_dynamic_batch_size, max_tokens_per_gpu)": (
        "balance_data balance_by_flops"
    ),
    "all parameters are trained": (
        "only_train_params_name_list freeze_params_name_list freeze_indexer mtp_num_layers mtp_loss_scaling_factor"
        " enable_mtp_training"
    ),
    _CHECKPOINT: "async_save no_save_optim no_save_rng no_load_optim no_load_rng finetune start_rollout_id ckpt_format",
    "run `tetrarch export` for a Hugging Face checkpoint": "save_hf",
    _DATA: (
        "disable_rollout_global_dataset multimodal_keys tool_key eval_tool_key loss_mask_type eval_config"
        " rollout_data_transport"
    ),
    "text is decoded with its special tokens left out": "rollout_skip_special_tokens",
    "engines are started by rollout nodes, which register themselves": (
        "rollout_external_engine_addrs rollout_external prefill_num_servers"
    ),
    "an engine counts from the moment it answers; there is no first wait": "rollout_health_check_first_wait",
    "evaluation before training is a switch of its own: write --no-eval-before-train": "skip_eval_before_train",
    "evaluation samples over all tokens; set eval_temperature, eval_top_p, eval_max_response_len": (
        "eval_top_k eval_max_prompt_len eval_min_new_tokens eval_max_context_len"
    ),
    "a grader returns one number; further scores go to its details": "reward_key eval_reward_key",
    "external reward models are called by a function of yours (custom_rm_path)": "rm_url",
    "the buffer is a service of every run": (
        "rollout_buffer_url fetch_trajectory_retry_times rollout_task_type min_batch_collection_ratio"
    ),
    _TRACKERS: (
        "use_tensorboard tb_project_name tb_experiment_name tensorboard_dir use_wandb disable_wandb_random_suffix"
    ),
    "progress always shows reward, length and pass rate": (
        "log_multi_turn log_passrate log_reward_category log_correct_samples log_interval"
    ),
    _DEBUG: ("load_debug_rollout_data_subsample save_debug_train_data dump_details load_forge_rollout_data"),
    "engines verify the checksums of every weight update": "check_weight_update_equal",
    "it is not built in; use an external profiler": (
        "memory_snapshot_dir memory_snapshot_num_steps memory_recorder record_memory_history profile_target profile"
        " use_pytorch_profiler"
    ),
    "write these settings into the run file": "custom_config_path train_env_vars",
    "steps are counted in rollouts: set num_rollout": "train_iters train_samples",
    "set sglang_router_strategy": "sglang_router_policy router_policy",
    "set max_inflight (groups in flight on a node)": "sglang_server_concurrency",
    "each rollout node starts a router of its own on a free port": "sglang_router_ip sglang_router_port",
    "set generate_timeout (seconds)": "sglang_router_request_timeout_secs",
    "pass server arguments as --sglang-<name>, or under rollout.sglang": "sglang_config",
}

REFUSED: dict[str, str] = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}
"""Reason by key."""

PREFIXES: dict[str, str] = {
    "wandb_": _TRACKERS,
    "opd_": _TEACHER,
    "ci_": _CI,
    "teacher_": _TEACHER,
    "megatron_": "arguments of Megatron-LM do not pass through; the trainer's keys are in docs/flags.md",
    "moe_": _MOE,
    "router_": _ROUTER,
}
"""Reason by the beginning of a key."""

SGLANG_OWNED: dict[str, str] = {
    **dict.fromkeys(("model", "model_path", "tokenizer_path"), "hf_checkpoint names model and tokenizer"),
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel_size"), "set rollout_num_gpus_per_engine"),
    **dict.fromkeys(("dp", "dp_size", "data_parallel_size"), "start more engines with rollout_num_gpus"),
    **dict.fromkeys(
        ("host", "port", "api_key", "admin_api_key"), "engines listen on free loopback ports of their node"
    ),
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr", "base_gpu_id"), "the node places its engines itself"),
    "device": "set rollout.device",
    "context_length": "set rollout_max_context_len",
    "random_seed": "set rollout_seed",
    "weight_version": "versions are the trainer's",
    "skip_tokenizer_init": "graders need the text",
    "skip_server_warmup": "the node decides when an engine is ready",
}
"""Arguments of the SGLang server that a rollout node settles itself."""

ROUTER_OWNED: dict[str, str] = {
    "policy": "set sglang_router_strategy",
    **dict.fromkeys(("host", "port", "ip"), "the router listens on a free loopback port of its node"),
    **dict.fromkeys(
        ("worker_urls", "prometheus_port", "prometheus_host", "pd_disaggregation"), "the rollout node settles it"
    ),
}
"""Arguments of sglang-router that a rollout node settles itself."""


def refusal(name: str) -> str | None:
    """Why a known flag does not apply, or None when the name is not known as such."""
    if name in REFUSED:
        return REFUSED[name]
    if name.startswith("no_") and name[3:] in REFUSED:
        return REFUSED[name[3:]]
    return next((reason for prefix, reason in PREFIXES.items() if name.startswith(prefix)), None)
