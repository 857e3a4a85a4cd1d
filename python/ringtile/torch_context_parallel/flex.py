"""FlexAttention over a sharded sequence: a ring if the mask is an interval mask, else with gathered keys.

A rank's BlockMask is for its local queries against all keys of the global sequence. It remembers the layout and the
interval mask it was made from, so that `flex_attention` of this module takes it with local query, key and value.

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

from ringtile.errors import InputError, RefusedError, RingtileError
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.torch_context_parallel.group_layouts import (
    Mesh,
    check_layout,
    group_of,
    layout_of,
    sequence_in_force,
)
from ringtile.torch_context_parallel.scope import AttentionScope
from ringtile.transport.groups import group_name, transport_of

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


# ---- BlockMasks of local queries ----------------------------------------------------------------


class Origin(NamedTuple):
    """The group, layout and sequence that a rank's BlockMask was made for."""

    group_name: str
    layout: Layout
    sequence: ShardedSequence | None  # with the interval mask; None: the mask is none


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
    """Return the BlockMask of this rank's queries against all keys, for `flex_attention`.

    mask_mod takes positions of the global sequence, of Q_LEN = KV_LEN = S tokens; any S will do. B and H as for
    create_block_mask. load_balancer: the layout of the queries, by name or as a Layout; contiguous if None.
    mask_mod is evaluated for every pair, 128 queries at a time, to find out if it is an interval mask.
    """
    if not callable(mask_mod):
        raise InputError(f"mask_mod is a {type(mask_mod).__name__}; expected a function of (b, h, q_idx, kv_idx)")
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
    sequence = None if interval is None else ShardedSequence.of(interval, layout, group)
    block_mask.ringtile_origin = Origin(group_name(group), layout, sequence)  # type: ignore[attr-defined]
    return block_mask


def interval_mask_of(
    mask_mod: MaskMod, B: int | None, H: int | None, seq_len: int, device: torch.device | str = "cpu"
) -> IntervalMask | None:
    """The same mask as intervals, of one side or two; None if those cannot say it or heads differ. Evaluates every
    pair."""
    begins, ends, counts = [], [], []
    keys = torch.arange(seq_len, device=device)
    key_begin, key_end = torch.tensor(seq_len, device=device), torch.tensor(0, device=device)
    for first in range(0, seq_len, flex._DEFAULT_SPARSE_BLOCK_SIZE):
        num_queries = min(flex._DEFAULT_SPARSE_BLOCK_SIZE, seq_len - first)

        def of_block(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, first: int = first) -> Tensor:
            return mask_mod(b, h, q_idx + first, kv_idx)

        attend = create_mask(of_block, B, H, num_queries, seq_len, device=str(device))  # (B, H, queries, S)
        num_keys = attend.sum(-1)
        begin = torch.where(attend, keys, seq_len).amin(-1)
        end = torch.where(attend, keys + 1, 0).amax(-1)
        if not bool((attend == attend[:, :1]).all()):
            return None
        begins.append(begin[:, 0])
        ends.append(end[:, 0])
        counts.append(num_keys[:, 0])
        queries = keys[first : first + num_queries, None]
        key_begin = torch.minimum(key_begin, torch.where(attend[:, 0], queries, seq_len).amin(1))
        key_end = torch.maximum(key_end, torch.where(attend[:, 0], queries + 1, 0).amax(1))
    begin, end, num_keys = (torch.cat(parts, 1).cpu() for parts in (begins, ends, counts))
    mask = IntervalMask(begin.int(), end.int())
    if not torch.equal(mask.num_keys, num_keys):
        mask = IntervalMask(begin.int(), end.int(), key_begin.int().cpu(), key_end.int().cpu())
    return mask if torch.equal(mask.num_keys, num_keys) else None


def shard_block_mask(block_mask: BlockMask, mesh: Mesh, layout: Layout | str) -> BlockMask:
    """`create_cp_block_mask` from a BlockMask of the global sequence: its listed blocks and its mask_mod combined."""
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    partial = _blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    q_block, kv_block = block_mask.BLOCK_SIZE

    def of_global(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        block = (b * (batch > 1), h * (heads > 1), q_idx // q_block, kv_idx // kv_block)  # one row stands for all
        return full[block] | (partial[block] & block_mask.mask_mod(b, h, q_idx, kv_idx))

    return create_cp_block_mask(of_global, batch, heads, *block_mask.seq_lengths, mesh, layout, partial.device)


def _blocks(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """bool (B, H, query blocks, key blocks): the first num_blocks of each row of indices are listed key blocks."""
    listed = torch.arange(indices.size(-1), device=indices.device) < num_blocks[..., None]
    return torch.zeros_like(indices).scatter_add_(-1, indices.long(), listed.to(indices.dtype)) > 0


# ---- flex_attention -----------------------------------------------------------------------------


class FlexCall(NamedTuple):
    """The arguments of flex_attention, in PyTorch's order; the last one is keyword-only there."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: ScoreMod | None = None
    block_mask: BlockMask | None = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: Any = None
    return_aux: AuxRequest | None = None

    def invoke(self, function: Callable[..., Any]) -> Any:
        """Calls a function of these arguments."""
        return function(*self[:-1], return_aux=self.return_aux)


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
    """torch.nn.attention.flex_attention.flex_attention, for local tokens too.

    With a block_mask of `create_cp_block_mask`, query (B, H, N, D), key (B, G, N, D) and value (B, G, N, Dv) are local.
    A mask of one interval per query, without a score_mod, then runs as a ring, forward and backward, also on the CPU.
    Any other mask, and any score_mod, gathers key and value (`Layout.unshard`) and calls PyTorch's function, which has
    no backward on the CPU. Without such a block_mask this is PyTorch's function. score_mod takes global positions.
    Raises RefusedError (max_scores in the ring), InputError.
    """
    call = FlexCall(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux)
    if has_torch_function(call[:3]):
        return handle_torch_function(flex_attention, call[:3], *call[:-1], return_aux=return_aux)
    origin: Origin | None = getattr(block_mask, "ringtile_origin", None)
    if origin is None:
        return call.invoke(flex.flex_attention)
    scope = AttentionScope(origin.group_name, sequence=origin.sequence)
    if not torch.compiler.is_compiling():
        check_layout(origin.group_name, origin.layout)
    if origin.sequence is not None and score_mod is None:
        return flex_in_ring(scope, call)
    return _flex_on_gathered(scope, origin, call)


def flex_in_ring(scope: AttentionScope, call: FlexCall) -> Any:
    """`flex_attention` over the scope's sequence; score_mod and block_mask do not count."""
    check_call(scope, call)
    if call.return_aux is not None and call.return_aux.max_scores:
        raise scope.told(
            RefusedError("return_aux.max_scores: the ring keeps no maximum of the scores; ask for lse"), _OP
        )
    out, lse = scope.attend(call.query, call.key, call.value, scale=call.scale, return_lse=True)
    if call.return_aux is not None:
        return out, AuxOutput(lse=lse if call.return_aux.lse else None, max_scores=None)
    return (out, lse) if call.return_lse else out


def _flex_on_gathered(scope: AttentionScope, origin: Origin, call: FlexCall) -> Any:
    """`flex_attention` of this rank's queries and the keys of all ranks, in global order; block_mask is of those, or
    None. Keys and values are gathered, their gradients reduce-scattered in float32 (`Layout.unshard`)."""
    check_call(scope, call)
    scope.check_scale(call.scale)
    key, value = (origin.layout.unshard(x, 2, origin.group_name) for x in (call.key, call.value))
    score_mod = call.score_mod
    if score_mod is None:
        return call._replace(key=key, value=value).invoke(flex.flex_attention)
    positions = origin.layout.positions(transport_of(origin.group_name).rank).to(key.device)

    def of_local_query(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b, h, positions[q_idx], kv_idx)

    return call._replace(key=key, value=value, score_mod=of_local_query).invoke(flex.flex_attention)


_OP = "flex_attention"


def check_call(scope: AttentionScope, call: FlexCall) -> None:
    """Refuses arguments that are not what flex_attention takes. kernel_options tune a kernel; the ring needs none."""
    types = ", ".join(type(x).__name__ for x in call[:3])
    error: InputError | None = None
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in call[:3]):
        error = InputError(f"query, key, value are {types}; expected tensors (batch, heads, local tokens, head_dim)")
    elif call.score_mod is not None and not callable(call.score_mod):
        error = InputError(f"score_mod is a {type(call.score_mod).__name__}; expected a function")
    elif call.return_lse and call.return_aux is not None:
        error = InputError("return_lse and return_aux; expected one of them: return_aux=AuxRequest(lse=True)")
    elif call.kernel_options is not None and not isinstance(call.kernel_options, dict):
        error = InputError(f"kernel_options is a {type(call.kernel_options).__name__}; expected a dict")
    elif not call.enable_gqa and call.query.size(1) != call.key.size(1):
        error = InputError(f"query has {call.query.size(1)} heads, key {call.key.size(1)}; pass enable_gqa=True")
    if error is not None:
        raise scope.told(error, _OP)


# ---- inside a RingMode --------------------------------------------------------------------------


def flex_in_mode(scope: AttentionScope, call: FlexCall) -> Any:
    """`flex_attention` inside `context_parallel`: a BlockMask may also be one of the global sequence.

    Without a BlockMask the context's mask holds; a BlockMask and a mask of the context are refused.
    """
    if call.block_mask is None and call.score_mod is None:
        return flex_in_ring(scope, call)
    check_call(scope, call)
    if call.block_mask is not None and not isinstance(call.block_mask, BlockMask):
        raise scope.told(InputError(f"block_mask is a {type(call.block_mask).__name__}; expected a BlockMask"), _OP)
    if call.block_mask is not None and scope.is_masked:
        raise scope.told(RefusedError("a block_mask inside context_parallel(mask=...); give one of them"), _OP)
    if not hasattr(call.block_mask, "ringtile_origin"):
        sequence = scope.sequence or sequence_in_force(scope.group, call.query.size(2))
        try:
            call = call._replace(block_mask=_local_block_mask(call.block_mask, sequence))
        except RingtileError as error:
            scope.told(error, _OP)
            raise
    return call.invoke(flex_attention)


def _local_block_mask(block_mask: BlockMask | None, sequence: ShardedSequence) -> BlockMask:
    """This rank's part of a global BlockMask, remembered on it; for None, of the sequence's own mask."""
    group, layout = sequence.group_name, sequence.layout
    if block_mask is None:
        begin, end, *of_keys = sequence.mask.tensors

        def interval(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            row = b * (begin.size(0) > 1)
            attends = (begin[row, q_idx] <= kv_idx) & (kv_idx < end[row, q_idx])
            if of_keys:
                attends &= (of_keys[0][row, kv_idx] <= q_idx) & (q_idx < of_keys[1][row, kv_idx])
            return attends

        return create_cp_block_mask(interval, begin.size(0), None, layout.seq_len, layout.seq_len, group, layout)
    parts = block_mask.__dict__.setdefault("ringtile_parts", {})
    if (group, layout) not in parts:
        parts[group, layout] = shard_block_mask(block_mask, group, layout)
    part: BlockMask = parts[group, layout]
    return part


def flex_hop_in_ring(
    scope: AttentionScope,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    *captured: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator that PyTorch's own flex_attention ends in; its log-sum-exp is to base 2.

    PyTorch's function checks a BlockMask against the local lengths first, so a global one never reaches this.
    """
    if score_mod is not flex._identity or block_mask[-1] is not noop_mask or kernel_options.get("OUTPUT_MAX"):
        raise RefusedError(  # not told to the other ranks: dynamo is tracing
            "torch's flex_attention with a score_mod, a block_mask or max_scores on a sharded sequence; call "
            "ringtile.flex_attention, which has the same arguments"
        )
    out, lse = scope.attend(query, key, value, scale=scale, return_lse=True)
    return out, lse if kernel_options.get("BACKEND") == "FLASH" else lse / math.log(2), lse.new_empty(0)
