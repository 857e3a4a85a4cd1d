"""FlexAttention over a cut sequence: by the ring where the mask is one interval per query, else by gathered keys.

A BlockMask is made for a rank's queries against all keys of the global sequence, and remembers the interval mask and
the layout it was made from. `flex_attention` of this module takes it with local query, key and value.

Shape letters: B batch, H query heads, G kv heads, S global tokens, N local tokens, D head dim, Dv value head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    create_block_mask,
    create_mask,
    noop_mask,
)
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import InputError, Refused
from ..layout import Layout
from ..mask import IntervalMask
from ..ops import state_dtype
from ..transport import group_name, transport_of
from .attention import ring
from .sharding import Mesh, NamedSequence, Sequence, check_cut, group_of, layout_of

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Origin(NamedTuple):
    """What a rank's BlockMask was made from."""

    group: str
    layout: Layout
    sequence: Sequence | None  # with the interval mask; None: the mask is not one interval per query


def create_cp_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    mesh: Mesh,
    load_balancer: Layout | str | None = None,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """The BlockMask of this rank's queries against all keys, for `flex_attention`.

    mask_mod speaks of the global sequence, of Q_LEN = KV_LEN tokens of any number; B and H as for create_block_mask.
    load_balancer: the layout in which the queries are cut, by name or as a Layout; contiguous if None.
    Whether the mask is one interval per query is found by evaluating every pair, 128 queries at a time.
    """
    if Q_LEN != KV_LEN:
        raise InputError(f"Q_LEN is {Q_LEN}, KV_LEN {KV_LEN}; expected one sequence, so one length")
    group = group_of(mesh)
    transport = transport_of(group)
    layout = layout_of(load_balancer or "contiguous", Q_LEN, transport.world_size)
    positions = layout.positions(transport.rank).to(device)
    interval = interval_mask_of(mask_mod, B, H, Q_LEN, device)

    def of_local_query(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b, h, positions[q_idx], kv_idx)

    block_mask = create_block_mask(of_local_query, B, H, len(positions), KV_LEN, device=str(device))
    sequence = None if interval is None else Sequence(layout, interval)
    block_mask.ringtile_origin = Origin(group_name(group), layout, sequence)  # type: ignore[attr-defined]
    return block_mask


def interval_mask_of(
    mask_mod: MaskMod, B: int | None, H: int | None, seq_len: int, device: torch.device | str = "cpu"
) -> IntervalMask | None:
    """The same mask as intervals; None where keys of a query have a gap or its heads differ. Asks every pair."""
    begins, ends = [], []
    keys = torch.arange(seq_len, device=device)
    for first in range(0, seq_len, flex._DEFAULT_SPARSE_BLOCK_SIZE):
        num_queries = min(flex._DEFAULT_SPARSE_BLOCK_SIZE, seq_len - first)

        def of_block(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, first: int = first) -> Tensor:
            return mask_mod(b, h, q_idx + first, kv_idx)

        attend = create_mask(of_block, B, H, num_queries, seq_len, device=str(device))  # (B, H, queries, S)
        num_keys = attend.sum(-1)
        begin = torch.where(attend, keys, seq_len).amin(-1)
        end = torch.where(attend, keys + 1, 0).amax(-1)
        one_interval = (end - begin).clamp(min=0) == num_keys
        same_heads = (begin == begin[:, :1]) & (end == end[:, :1])
        if not bool((one_interval & same_heads).all()):
            return None
        begins.append(begin[:, 0])
        ends.append(end[:, 0])
    bounds = (torch.cat(pieces, 1).int().cpu() for pieces in (begins, ends))
    return IntervalMask(*bounds)


def shard_block_mask(block_mask: BlockMask, mesh: Mesh, layout: Layout | str) -> BlockMask:
    """`create_cp_block_mask` of a BlockMask of the global sequence: what its blocks and its mask_mod say together."""
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    partial = _blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    q_block, kv_block = block_mask.BLOCK_SIZE

    def whole(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        block = (b * (batch > 1), h * (heads > 1), q_idx // q_block, kv_idx // kv_block)  # one row serves all
        return full[block] | (partial[block] & block_mask.mask_mod(b, h, q_idx, kv_idx))

    return create_cp_block_mask(whole, batch, heads, *block_mask.seq_lengths, mesh, layout, partial.device)


def _blocks(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """bool (B, H, query blocks, key blocks), from how many key blocks a query block has, and which come first."""
    listed = torch.arange(indices.size(-1), device=indices.device) < num_blocks[..., None]
    return torch.zeros_like(indices).scatter_add_(-1, indices.long(), listed.to(indices.dtype)) > 0


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, which this calls, for local tokens too.

    With a block_mask of `create_cp_block_mask`: query (B, H, N, D), key (B, G, N, D), value (B, G, N, Dv) are local.
    A mask of one interval per query without a score_mod runs as a ring, forward and backward, on the CPU as well;
    anything else gathers key and value (`Layout.unshard`) and calls PyTorch's, which has no backward on the CPU.
    score_mod speaks of global positions. Raises Refused (max_scores in the ring), InputError.
    """
    if has_torch_function((query, key, value)):
        return handle_torch_function(
            flex_attention,
            (query, key, value),
            query,
            key,
            value,
            score_mod,
            block_mask,
            scale,
            enable_gqa,
            return_lse,
            kernel_options,
            return_aux=return_aux,
        )
    origin: Origin | None = getattr(block_mask, "ringtile_origin", None)
    if origin is not None:
        if origin.sequence is not None and score_mod is None:
            return in_ring(origin.group, origin.sequence, query, key, value, scale, enable_gqa, return_lse, return_aux)
        key, value, score_mod = gathered(origin, key, value, 2, score_mod)
    return flex.flex_attention(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
        return_aux=return_aux,  # type: ignore[arg-type]
    )


def in_ring(
    group: str,
    sequence: Sequence | NamedSequence,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    return_aux: AuxRequest | None,
) -> Any:
    """`flex_attention` without mods, for the queries and keys of a cut sequence."""
    if not enable_gqa and query.size(1) != key.size(1):
        raise _told(group, InputError(f"query has {query.size(1)} heads, key {key.size(1)}; pass enable_gqa=True"))
    if return_aux is not None and return_aux.max_scores:
        raise _told(group, Refused("return_aux.max_scores: the ring keeps no maximum of the scores; ask for lse"))
    out, lse = ring(group, sequence, query, key, value, False, scale)
    lse = lse.to(state_dtype(out.dtype))
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out


def gathered(
    origin: Origin, key: Tensor, value: Tensor, seq_dim: int, score_mod: ScoreMod | None
) -> tuple[Tensor, Tensor, ScoreMod | None]:
    """Key and value of all ranks in global order, and the score_mod for this rank's queries.

    Forward all-gather; backward reduce-scatter, added in float32 (`Layout.unshard`).
    """
    key, value = (origin.layout.unshard(x, seq_dim, origin.group) for x in (key, value))
    if score_mod is None:
        return key, value, None
    positions = origin.layout.positions(transport_of(origin.group).rank).to(key.device)

    def of_local_query(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b, h, positions[q_idx], kv_idx)

    return key, value, of_local_query


def flex_in_mode(
    group: str,
    sequence: Sequence | NamedSequence,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """`flex_attention` inside `context_parallel`: a BlockMask may also be one of the global sequence.

    Without a BlockMask the mask of the context holds; both together are refused.
    """
    if block_mask is None and score_mod is None:
        return in_ring(group, sequence, query, key, value, scale, enable_gqa, return_lse, return_aux)
    if block_mask is not None and isinstance(sequence, Sequence) and sequence.is_masked:
        raise _told(group, Refused("a block_mask inside context_parallel(mask=...); give one of them"))
    if not hasattr(block_mask, "ringtile_origin"):
        if isinstance(sequence, NamedSequence):
            raise _told(
                group, Refused("flex_attention of an unknown length; name buffers or a Layout to context_parallel")
            )
        block_mask = _of_global(block_mask, sequence, group)
    origin: Origin | None = block_mask.ringtile_origin  # type: ignore[union-attr]
    if origin is not None:
        check_cut(group, origin.layout)
    return flex_attention(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
        return_aux=return_aux,
    )


def _of_global(block_mask: BlockMask | None, sequence: Sequence, group: str) -> BlockMask:
    """The rank's part of a BlockMask of the global sequence, remembered on it; of the sequence's own mask for None."""
    if block_mask is None:
        begin, end = sequence.begin, sequence.end

        def interval(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            row = b * (begin.size(0) > 1)
            return (begin[row, q_idx] <= kv_idx) & (kv_idx < end[row, q_idx])

        seq_len = sequence.layout.seq_len
        return create_cp_block_mask(interval, begin.size(0), None, seq_len, seq_len, group, sequence.layout)
    parts = block_mask.__dict__.setdefault("ringtile_parts", {})
    if (group, sequence.layout) not in parts:
        parts[group, sequence.layout] = shard_block_mask(block_mask, group, sequence.layout)
    part: BlockMask = parts[group, sequence.layout]
    return part


def flex_hop_in_ring(
    group: str,
    sequence: Sequence | NamedSequence,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    *captured: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """What PyTorch's own flex_attention arrives at: its operator, whose log-sum-exp is to base 2.

    It has compared a BlockMask with local lengths before, so one of the global sequence cannot come this far.
    """
    if score_mod is not flex._identity or block_mask[-1] is not noop_mask or kernel_options.get("OUTPUT_MAX"):
        raise Refused(
            "torch's flex_attention with a score_mod, a block_mask or max_scores on a cut sequence; call "
            "ringtile.flex_attention, which has the same arguments"
        )
    out, lse = ring(group, sequence, query, key, value, False, scale)
    lse = lse.to(state_dtype(out.dtype))
    return out, lse if kernel_options.get("BACKEND") == "FLASH" else lse / math.log(2), lse.new_empty(0)


def _told(group: str, error: InputError | Refused) -> InputError | Refused:
    """The error, told to the other ranks, who would wait for this one."""
    transport_of(group).refuse("flex_attention", error)
    return error
