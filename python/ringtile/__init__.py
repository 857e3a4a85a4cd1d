"""ringtile: train on sequences that do not fit one device; the loss curve does not change.

What needs more than torch and ringtile's own kernels is loaded when it is first asked for: the Trainer layer
(`enable`, `restore`, callbacks, `tile_mlps`, `tile_norms`, `offload_activations`) needs transformers, `Config` PyYAML,
the layer of plain PyTorch DTensors and FlexAttention, recurrent layers and tiles torch's compiler, whose import takes
as long as torch's.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ringtile.errors import (
    BuildError,
    ConfigError,
    InputError,
    LayoutError,
    MaskNotExpressibleError,
    MissingPackageError,
    PeerLostError,
    RefusedError,
    RingMismatchError,
    RingtileError,
    needs_extra,
)

_build_error: BuildError | None = None
try:
    from ringtile.attn import aten as _aten  # noqa: F401  registers its kernels
    from ringtile.attn import traced as _traced  # noqa: F401  registers its ops
    from ringtile.attn.attention import attention, ring_attention
    from ringtile.attn.call import AttentionDropout
    from ringtile.recurrent import kernels as _recurrent_kernels  # noqa: F401  registers its ops on fake tensors
    from ringtile.sequence.layout import Layout
    from ringtile.sequence.mask import IntervalMask
    from ringtile.sequence.sharded import ShardedSequence
    from ringtile.sequence.tree import tree_position_ids
    from ringtile.transport.loopback import LoopbackWorld
except BuildError as error:  # `ringtile doctor` must run where the compiled ops do not load, and say why
    _build_error = error

_LAZY = {
    "CollectGarbageCallback": "hf.features.callbacks",
    "Config": "hf.config",
    "ContextParallel": "torch_context_parallel.parallel_style",
    "ContextParallelPlan": "torch_context_parallel.plan",
    "causal_conv1d": "recurrent.functions",
    "check_first_batch": "torch_context_parallel.context",
    "context_parallel": "torch_context_parallel.context",
    "context_parallel_shard": "torch_context_parallel.buffers",
    "context_parallel_unshard": "torch_context_parallel.buffers",
    "create_cp_block_mask": "torch_context_parallel.flex",
    "enable": "hf.trainer",
    "flex_attention": "torch_context_parallel.flex",
    "gated_delta_rule": "recurrent.functions",
    "Latents": "attn.latents",
    "Plan": "planner.layer",
    "offload_activations": "hf.features.offload",
    "real_tokens": "hf.written",
    "plan_attention": "planner.layer",
    "restore": "hf.trainer",
    "selective_scan": "recurrent.functions",
    "sequence_log_probs": "torch_context_parallel.rl",
    "ssd": "recurrent.functions",
    "stream_layers": "hf.features.stream",
    "tile_mlps": "hf.features.mlp",
    "tile_norms": "hf.features.norm",
    "tiled_linear_cross_entropy": "tiled.loss",
    "tiled_log_probs": "tiled.log_probs",
    "tiled_mlp": "tiled.mlp",
    "token_positions": "hf.written",
}
if TYPE_CHECKING:
    from ringtile.attn.latents import Latents
    from ringtile.hf.config import Config
    from ringtile.hf.features.callbacks import CollectGarbageCallback
    from ringtile.hf.features.mlp import tile_mlps
    from ringtile.hf.features.norm import tile_norms
    from ringtile.hf.features.offload import offload_activations
    from ringtile.hf.features.stream import stream_layers
    from ringtile.hf.trainer import enable, restore
    from ringtile.hf.written import real_tokens, token_positions
    from ringtile.planner.layer import Plan, plan_attention
    from ringtile.recurrent.functions import causal_conv1d, gated_delta_rule, selective_scan, ssd
    from ringtile.tiled.log_probs import tiled_log_probs
    from ringtile.tiled.loss import tiled_linear_cross_entropy
    from ringtile.tiled.mlp import tiled_mlp
    from ringtile.torch_context_parallel.buffers import context_parallel_shard, context_parallel_unshard
    from ringtile.torch_context_parallel.context import check_first_batch, context_parallel
    from ringtile.torch_context_parallel.flex import create_cp_block_mask, flex_attention
    from ringtile.torch_context_parallel.parallel_style import ContextParallel
    from ringtile.torch_context_parallel.plan import ContextParallelPlan
    from ringtile.torch_context_parallel.rl import sequence_log_probs

__version__ = "0.1.0"

__all__ = [
    "AttentionDropout",
    "BuildError",
    "CollectGarbageCallback",
    "Config",
    "ConfigError",
    "ContextParallel",
    "ContextParallelPlan",
    "InputError",
    "IntervalMask",
    "Latents",
    "Layout",
    "LayoutError",
    "LoopbackWorld",
    "MaskNotExpressibleError",
    "MissingPackageError",
    "PeerLostError",
    "Plan",
    "RefusedError",
    "RingMismatchError",
    "RingtileError",
    "ShardedSequence",
    "attention",
    "causal_conv1d",
    "check_first_batch",
    "context_parallel",
    "context_parallel_shard",
    "context_parallel_unshard",
    "create_cp_block_mask",
    "enable",
    "flex_attention",
    "gated_delta_rule",
    "offload_activations",
    "plan_attention",
    "real_tokens",
    "restore",
    "ring_attention",
    "selective_scan",
    "sequence_log_probs",
    "ssd",
    "stream_layers",
    "tile_mlps",
    "tile_norms",
    "tiled_linear_cross_entropy",
    "tiled_log_probs",
    "tiled_mlp",
    "token_positions",
    "tree_position_ids",
]


def __getattr__(name: str) -> Any:
    if name in __all__ and _build_error is not None:
        raise _build_error
    if name in _LAZY:
        with needs_extra(f"ringtile.{name}", "hf"):
            return getattr(importlib.import_module(f"ringtile.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'ringtile' has no attribute {name!r}")
