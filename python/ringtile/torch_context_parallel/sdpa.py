"""scaled_dot_product_attention over the whole sequence, for local tokens with heads before tokens.

Shape letters: B batch, H query heads, G kv heads, N local tokens, D head dim, Dv value head dim, S global tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ringtile.errors import InputError, RefusedError, RingtileError
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.transport.groups import propagate_errors


def sdpa(
    scope: AttentionScope,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention over the sequence of the scope; the arguments are PyTorch's.

    query (B, H, N, D), key (B, G, N, D), value (B, G, N, Dv) hold local tokens -> (B, H, N, Dv). G is H without
    enable_gqa. attn_mask: bool, of the *global* sequence, (S, S), (B, S, S) or (B, 1, S, S), one interval per query.
    InputError, RefusedError (dropout; a float mask), MaskNotExpressibleError; RingMismatchError on the other ranks.
    """
    try:
        if dropout_p > 0:
            raise RefusedError(
                f"scaled_dot_product_attention got dropout_p {dropout_p}; the ring has no dropout: pass 0"
            )
        if not all(isinstance(x, Tensor) for x in (query, key, value)):
            raise InputError(
                f"query, key, value are {', '.join(type(x).__name__ for x in (query, key, value))}; expected tensors"
            )
        if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
            raise InputError(
                f"query, key, value are {tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}; expected "
                "(batch, heads, local tokens, head_dim) each"
            )
        if not enable_gqa and key.size(1) not in (1, query.size(1)):  # one head serves all queries'
            raise InputError(
                f"query has {query.size(1)} heads, key {key.size(1)}; expected the same number, or enable_gqa=True"
            )
        if attn_mask is not None:
            if not isinstance(attn_mask, Tensor):
                raise InputError(f"attn_mask is a {type(attn_mask).__name__}; expected a bool tensor")
            if is_causal:
                raise InputError("scaled_dot_product_attention got attn_mask and is_causal; expected one of them")
            scope = AttentionScope(scope.group, sequence=_masked(scope.sequence, attn_mask), is_masked=True)
    except RingtileError as error:
        scope.told(error, "scaled_dot_product_attention")
        raise
    out: Tensor = scope.attend(query, key, value, is_causal=is_causal, scale=scale)
    return out


def sdpa_of_dtensors(
    scope: AttentionScope, query: DTensor, key: DTensor, value: DTensor, *args: Any, **kwargs: Any
) -> Any:
    """`sdpa` of local tensors, over the mesh dim that shards dim 2 if there is one, else over the scope."""
    placements, mesh = query.placements, query.device_mesh
    dims = [i for i, placement in enumerate(placements) if placement == Shard(2)]
    scope = AttentionScope(mesh.get_group(dims[0])) if dims else scope
    with propagate_errors(scope.group, "scaled_dot_product_attention", query.to_local()):
        if len(dims) > 1 or any(not (p.is_replicate() or p in (Shard(0), Shard(1), Shard(2))) for p in placements):
            raise InputError(
                f"query is placed {placements}; expected Shard(2) once, else Shard(0), Shard(1), Replicate()"
            )
        for name, x in (("key", key), ("value", value)):
            if not isinstance(x, DTensor) or x.placements != placements or x.device_mesh != mesh:
                raise InputError(f"{name} is not placed as query is, {placements} on {mesh}; redistribute it")
    q, k, v = (x.to_local() for x in (query, key, value))
    return DTensor.from_local(sdpa(scope, q, k, v, *args, **kwargs), mesh, placements, run_check=False)


def _masked(sequence: ShardedSequence | None, attn_mask: Tensor) -> ShardedSequence:
    """The sequence under its own mask and a dense one of all its tokens."""
    if attn_mask.dtype != torch.bool:
        raise RefusedError(
            f"attn_mask is {attn_mask.dtype}; the ring adds nothing to scores: pass a bool mask, or is_causal"
        )
    if sequence is None:
        raise RefusedError(
            "attn_mask under ContextParallel; give the mask to context_parallel(..., mask=...) around it"
        )
    seq_len = sequence.seq_len
    if attn_mask.shape[-2:] != (seq_len, seq_len):
        raise InputError(
            f"attn_mask is {tuple(attn_mask.shape)}; expected all {seq_len} global tokens in both of its last "
            "dimensions (leave it out of buffers), or no attn_mask and context_parallel(..., mask=...). transformers "
            "makes such a mask of local tokens from an attention_mask with zeros, a sliding window, or position_ids "
            "that are not a buffer: pass the model attention_mask=None, and position_ids among the buffers"
        )
    # Not `sequence & mask`: the sequence would remember every batch's mask for as long as it lives.
    mask = sequence.mask & IntervalMask.from_bool(attn_mask)
    return ShardedSequence.of(mask, sequence.layout, sequence.group_name, scheme=sequence.scheme)
