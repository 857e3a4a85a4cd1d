"""What may leave this machine in a report: values that are known to be harmless, and of all else the names alone."""

from __future__ import annotations

import functools
import os
import pathlib
import re
import sys
from typing import Any

NOT_SHOWN = "<not shown>"

# Keys of a run's file, at any depth, whose numbers, switches and words a bug report shows. Not one of them holds a
# path, a name that a user gives, or an account.
_KEYS = {
    *("seq_len", "packing"),  # of data
    # of training
    *("max_steps", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size", "learning_rate"),
    *("gradient_accumulation_steps", "gradient_checkpointing", "use_reentrant", "auto_find_batch_size", "optim"),
    *("activation_checkpointing", "every_n_layers", "offload"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "lr_scheduler_type"),
    *("warmup_steps", "warmup_ratio", "bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval", "use_cpu", "seed"),
    *("data_seed", "full_determinism", "logging_steps", "logging_strategy", "save_steps", "save_strategy"),
    *("save_total_limit", "save_only_model", "eval_steps", "eval_strategy", "eval_on_start", "eval_accumulation_steps"),
    *("batch_eval_metrics", "load_best_model_at_end", "dataloader_num_workers", "dataloader_drop_last"),
    *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor", "ddp_backend"),
    *("ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_broadcast_buffers", "ddp_timeout", "torch_compile"),
    *("torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps", "label_smoothing_factor"),
    *("neftune_noise_alpha", "average_tokens_across_devices", "include_num_input_tokens_seen", "use_liger_kernel"),
    *("remove_unused_columns", "ignore_data_skip", "report_to", "push_to_hub", "disable_tqdm", "fsdp"),
    # of FSDP, accelerate and DeepSpeed
    *("version", "fsdp_version", "reshard_after_forward", "auto_wrap_policy"),
    *("activation_checkpointing", "cpu_ram_efficient_loading", "cpu_offload", "offload_params", "state_dict_type"),
    *("sync_module_states", "min_num_params", "split_batches", "dispatch_batches", "even_batches", "non_blocking"),
    *(
        "use_seedable_sampler",
        "stage",
        "overlap_comm",
        "contiguous_gradients",
        "reduce_scatter",
        "allgather_partitions",
    ),
    *("reduce_bucket_size", "allgather_bucket_size", "enabled", "loss_scale", "initial_scale_power", "device"),
    *("pin_memory", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_param_persistence_threshold"),
    *("stage3_prefetch_bucket_size", "stage3_gather_16bit_weights_on_model_save", "zero_allow_untested_optimizer"),
    # of model
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings", "hidden_act", "sliding_window", "layer_types"),
    *("use_sliding_window", "max_window_layers", "rope_theta", "rope_type", "factor", "tie_word_embeddings", "dtype"),
    *("attention_dropout", "attention_bias", "mlp_bias", "rms_norm_eps", "initializer_range", "use_cache"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "output_router_logits", "router_aux_loss_coef", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_embd", "n_head", "n_layer", "n_positions"),
}
# Keys that hold such keys.
_SECTIONS = {
    *("model", "data", "training", "rope_parameters", "rope_scaling", "text_config", "full_attention"),
    *("sliding_attention", "fsdp_config", "accelerator_config", "gradient_checkpointing_kwargs", "deepspeed"),
    "activation_checkpointing_kwargs",
    *("zero_optimization", "offload_optimizer", "offload_param", "bf16", "fp16"),
}
# Environment variables whose value is shown where it is a number, a switch or a word.
_VARIABLES = {
    *("RINGTILE_CPU_ISA", "RINGTILE_CUDA_ISA", "RINGTILE_SELF_TEST", "RINGTILE_SHARED_MEMORY", "OMP_NUM_THREADS"),
    *("OMP_PROC_BIND", "OMP_PLACES", "OMP_DYNAMIC", "MKL_NUM_THREADS", "MKL_DYNAMIC", "KMP_AFFINITY", "KMP_BLOCKTIME"),
    *("GOMP_CPU_AFFINITY", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "NCCL_DEBUG"),
    *("NCCL_DEBUG_SUBSYS", "NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"),
    *("NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    *("TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "TORCHDYNAMO_DISABLE"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "ACCELERATE_USE_FSDP"),
    *("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "FSDP_VERSION"),
    *("FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_RESHARD_AFTER_FORWARD", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
    *("TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY", "TOKENIZERS_PARALLELISM", "WANDB_MODE", "WANDB_DISABLED"),
    *("PYTHONHASHSEED", "PYTHONUNBUFFERED", "PYTHONOPTIMIZE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NNODES"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_CPUS_PER_TASK", "SLURM_NTASKS_PER_NODE"),
}
_WORD = re.compile(r"[A-Za-z0-9_.,:+-]{0,80}")  # no path, no address, no text
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,79}")
# Of a training's own report: the values of TrainingArguments' keys that are named like secrets.
_SECRET = re.compile("(^|_)(token|api_key|password|secret)$", re.IGNORECASE)


def without_secrets(value: Any, key: str = "") -> Any:
    """The same with "<hub_token>" for the value of hub_token, and so on."""
    if value is not None and _SECRET.search(key):
        return f"<{key}>"
    if isinstance(value, dict):
        return {name: without_secrets(each, str(name)) for name, each in value.items()}
    return [without_secrets(each) for each in value] if isinstance(value, list) else value


def known(mapping: dict[Any, Any]) -> dict[str, Any]:
    """A run's file with the values of known keys, and NOT_SHOWN for all others."""
    return {_name(key): _known(str(key), value) for key, value in mapping.items()}


def _known(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return known(value) if key in _SECTIONS else NOT_SHOWN
    if key not in _KEYS | _own_keys():
        return NOT_SHOWN
    return [_harmless(each) for each in value] if isinstance(value, list) else _harmless(value)


@functools.cache
def _own_keys() -> frozenset[str]:
    from ringtile.config import Config  # which needs pydantic; the doctor does not

    return frozenset(Config.model_fields.keys())


def _harmless(value: Any) -> Any:
    is_plain = value is None or isinstance(value, bool | int | float)
    return value if is_plain or (isinstance(value, str) and _WORD.fullmatch(value)) else NOT_SHOWN


def _name(key: Any) -> str:
    return key if isinstance(key, str) and _NAME.fullmatch(key) else NOT_SHOWN


def variable(name: str, value: str | None) -> str | None:
    """The value of an environment variable, for a report that others read."""
    return _harmless(value) if name in _VARIABLES or value is None else NOT_SHOWN


def without_paths(text: str) -> str:
    """A message of a library without the paths in it, which hold names of users."""
    folders = {str(pathlib.Path(__file__).parents[2]), sys.prefix, os.getcwd(), os.path.expanduser("~")}
    for folder in sorted(folders - {"/"}, key=len, reverse=True):
        text = text.replace(folder, "/")
    return re.sub(r"[^\s'\"()]*[/\\][^\s'\"()]*", "<path>", text)
