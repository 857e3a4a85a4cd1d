"""Which kernel merges a block of keys in the ring's forward: ringtile's, or aten's flash attention.

aten's can where the mask of a round is plain: over the rows of the local queries and of the block's keys at most
MAX_PIECES rectangles, each of them full or causal along its diagonal. So it is for causal and full masks in contiguous
and zigzag layouts. Its out and lse are merged into the running ones as one more block.

Its out has the dtype of q. In bfloat16 and float16 that is one rounding more a block, which would make a ring less
exact than torch's attention of the whole sequence; so there it is used only where no query needs a second block, as on
one rank. The backward is always ringtile's.

Shape letters: B batch, N local queries, K keys of the block, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import ops
from .plan import RankPlan

BlockKernel = Literal["auto", "ringtile", "aten"]
BLOCK_KERNELS = ("auto", "ringtile", "aten")
MAX_PIECES = 4  # each is a kernel call and a merge of its own


class Piece(NamedTuple):
    """Rows [q_begin, q_end) of the queries, all of which attend rows [k_begin, k_end) of the keys; or, causal, as many
    queries as keys, of which the i-th query attends the first i + 1 keys."""

    q_begin: int
    q_end: int
    k_begin: int
    k_end: int
    causal: bool


def attn_fwd_(
    kernel: str,
    plan: RankPlan,
    i: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float,
) -> None:
    """ops.attn_fwd_ of round i, by the kernel that `kernel` names where that has it, else by ringtile's.

    "auto" measures both the first time that it meets shapes and pieces on a device, and keeps the faster one.
    """
    begin, end = plan.mask_on(q.device)

    def by_ringtile(out: Tensor, lse: Tensor) -> None:
        ops.attn_fwd_(q, k, v, begin, end, plan.rounds[i].k_runs, out, lse, scale, softcap)

    def by_aten(out: Tensor, lse: Tensor) -> None:
        for piece in pieces or ():
            _merge_piece_(piece, q, k, v, out, lse, scale)

    pieces = plain_pieces(plan, i) if kernel != "ringtile" and _has_flash(q, v, softcap) else None
    if pieces is not None and q.dtype != out.dtype and not _is_alone(plan, i, pieces):
        pieces = None
    if pieces is None or (kernel == "auto" and not _is_faster(by_aten, by_ringtile, q, k, out, lse, pieces)):
        by_ringtile(out, lse)
    else:
        by_aten(out, lse)


# ---- plain masks --------------------------------------------------------------------------------


def plain_pieces(plan: RankPlan, i: int) -> tuple[Piece, ...] | None:
    """The pieces of round i's mask, found once a plan; None where it is not plain."""
    if i not in plan._pieces:
        plan._pieces[i] = find_pieces(plan.begin, plan.end, plan.rounds[i].k_runs)
    found: tuple[Piece, ...] | None = plan._pieces[i]
    return found


def find_pieces(begin: Tensor, end: Tensor, k_runs: Tensor) -> tuple[Piece, ...] | None:
    """The pieces of a mask; None where it takes more than MAX_PIECES, or its rows differ.

    begin, end: int32 CPU (Bm, N); k_runs: int64 CPU (R, 4).
    """
    runs = k_runs[k_runs[:, 2].argsort()].tolist()  # in the order of rows
    rows = torch.cat([torch.arange(row, row + length) for _, _, row, length in runs] or [torch.empty(0)])
    positions = torch.cat([at + step * torch.arange(length) for at, step, _, length in runs] or [torch.empty(0)])
    in_order = bool((positions.diff() > 0).all()) and bool((rows.diff() == 1).all())
    if not in_order or not (
        torch.equal(begin, begin[:1].expand_as(begin)) and torch.equal(end, end[:1].expand_as(end))
    ):
        return None
    # Query q attends keys [low[q], high[q]) in the order of rows.
    low, high = (torch.searchsorted(positions, bound[0].to(positions.dtype)) for bound in (begin, end))
    low, high = torch.where(high > low, low, 0), torch.where(high > low, high, 0)
    # From one query to the next the keys stay the same (0), or get one more at the end (1), or else (-1).
    step = torch.where((low.diff() == 0) & (high.diff() >= 0) & (high.diff() <= 1), high.diff(), -1)
    num_queries, first_row = low.numel(), int(rows[0]) if rows.numel() else 0
    changes = [*((step[1:] != step[:-1]).nonzero()[:, 0] + 1).tolist(), num_queries - 1]
    pieces: list[Piece] = []
    q = 0
    while q < num_queries and len(pieces) <= MAX_PIECES:
        kind = int(step[q]) if q < num_queries - 1 else 0
        k_begin, k_end = first_row + int(low[q]), first_row + int(high[q])
        if kind < 0 or (kind == 1 and k_end == k_begin):
            after = q + 1
        else:  # the steps from q on are of one kind up to the next change
            after = changes[bisect.bisect_right(changes, q)] + 1 if q < num_queries - 1 else q + 1
        if kind == 1 and k_end > k_begin:  # a causal square, and the keys before it
            pieces += [Piece(q, after, k_begin, k_end - 1, False)] if k_end - 1 > k_begin else []
            pieces.append(Piece(q, after, k_end - 1, k_end - 1 + after - q, True))
        elif k_end > k_begin:
            pieces.append(Piece(q, after, k_begin, k_end, False))
        q = after
    return None if len(pieces) > MAX_PIECES else tuple(pieces)


def _is_alone(plan: RankPlan, i: int, pieces: tuple[Piece, ...]) -> bool:
    """Whether every query meets its keys in one piece, and so in this round."""
    others = any(round.num_keys for at, round in enumerate(plan.rounds) if at != i)
    return not others and all(one.q_end <= other.q_begin for one, other in itertools.pairwise(pieces))


# ---- aten's kernel ------------------------------------------------------------------------------


def _has_flash(q: Tensor, v: Tensor, softcap: float) -> bool:
    """Whether aten's flash attention takes such tensors."""
    if softcap != 0 or v.size(3) != q.size(3):
        return False
    if q.device.type == "cuda":
        return q.dtype in (torch.bfloat16, torch.float16) and q.size(3) % 8 == 0
    return q.device.type == "cpu"


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, H, N, D) of q's dtype and lse (B, H, N), for q (B, H, N, D), k, v (B, G, K, D)."""
    if q.device.type == "cuda":
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return found[0], found[1]


def _merge_piece_(piece: Piece, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
    """out -= sigmoid(lse_piece - lse) * (out - out_piece), lse = log(exp lse + exp lse_piece) (arXiv:2310.01889)."""
    queries, keys = slice(piece.q_begin, piece.q_end), slice(piece.k_begin, piece.k_end)
    block = _flash(
        q[:, queries].transpose(1, 2), k[:, keys].transpose(1, 2), v[:, keys].transpose(1, 2), piece.causal, scale
    )
    out_piece, lse_piece = block[0].transpose(1, 2).to(out.dtype), block[1].to(lse.dtype)
    running_out, running_lse = out[:, queries], lse[:, :, queries]
    share = torch.sigmoid(lse_piece - running_lse)  # of the piece; 1 where no key came before
    running_out.lerp_(out_piece, share.transpose(1, 2)[..., None].to(out.dtype))
    running_lse.copy_(torch.logaddexp(running_lse, lse_piece))


# ---- auto ---------------------------------------------------------------------------------------

_faster: dict[object, bool] = {}


def _is_faster(
    one: Callable[[Tensor, Tensor], None],
    other: Callable[[Tensor, Tensor], None],
    q: Tensor,
    k: Tensor,
    out: Tensor,
    lse: Tensor,
    pieces: tuple[Piece, ...],
) -> bool:
    """Whether one takes less time than the other here, as measured the first time; out and lse keep their values."""
    key = (q.device, q.dtype, q.shape, k.shape, pieces)
    if key not in _faster:
        seconds = [_seconds(merge, out.clone(), lse.clone()) for merge in (one, other)]
        _faster[key] = seconds[0] < seconds[1]
    return _faster[key]


def _seconds(merge: Callable[[Tensor, Tensor], None], out: Tensor, lse: Tensor) -> float:
    """The shortest of three runs, after one that warms up."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        merge(out, lse)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
