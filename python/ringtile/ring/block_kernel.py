"""Which kernel merges a block of keys in the ring's forward: ringtile's, or one of aten's (flash attention, cuDNN's).

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
import functools
import itertools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ringtile import ops
from ringtile.errors import InputError
from ringtile.sequence.plan import RankPlan
from ringtile.sequence.sharded import ShardedSequence

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


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What a call of attention is about, besides its tensors."""

    sequence: ShardedSequence
    scale: float
    softcap: float = 0.0
    block_kernel: str = "ringtile"
    sinks: Tensor | None = None  # (H) of the state dtype, without a graph


def attn_fwd_(call: AttentionCall, i: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """ops.attn_fwd_ of round i, fresh in round 0 unless the sinks are there already: by aten where the call says so and
    aten can, else by ringtile's.

    If several kernels may run, all are measured the first time that they meet shapes and pieces on a device, and the
    fastest is kept: with "auto" one of aten's or ringtile's, with "aten" one of aten's.
    """
    plan = call.sequence.plan
    begin, end = call.sequence.mask_on(q.device)
    fresh = i == 0 and call.sinks is None

    def by_ringtile(out: Tensor, lse: Tensor) -> None:
        ops.attn_fwd_(q, k, v, begin, end, plan.rounds[i].k_runs, out, lse, call.scale, call.softcap, fresh)

    if call.block_kernel == "ringtile":
        by_ringtile(out, lse)
        return

    def by_aten(attend: Attend, out: Tensor, lse: Tensor) -> None:
        if fresh:
            out.zero_()
            lse.fill_(float("-inf"))
        for piece in pieces or ():
            _merge_piece_(attend, piece, q, k, v, out, lse, call.scale)

    pieces = _pieces_of_aten(call, i, q, v)
    if pieces is None:
        by_ringtile(out, lse)
        return
    merges: dict[str, Merge] = {
        name: functools.partial(by_aten, ATEN[q.device.type][name]) for name in _names_in_aten(call.block_kernel, q, k)
    }
    if call.block_kernel == "auto":
        merges["ringtile"] = by_ringtile
    _fastest(merges, (q.device, q.dtype, q.shape, k.shape, pieces), out, lse)(out, lse)


def check(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> None:
    """InputError where aten was asked for, has a round to compute, and none of its kernels agrees with ringtile's."""
    if call.block_kernel != "aten":
        return
    if any(_pieces_of_aten(call, i, q, v) is not None for i in range(len(call.sequence.plan.rounds))):
        _names_in_aten(call.block_kernel, q, k)


# ---- plain masks --------------------------------------------------------------------------------

_pieces: weakref.WeakKeyDictionary[RankPlan, dict[int, tuple[Piece, ...] | None]] = weakref.WeakKeyDictionary()


def plain_pieces(plan: RankPlan, i: int) -> tuple[Piece, ...] | None:
    """The pieces of round i's mask, found once a plan; None where it is not plain."""
    found = _pieces.setdefault(plan, {})
    if i not in found:
        found[i] = find_pieces(plan.begin, plan.end, plan.rounds[i].k_runs)
    return found[i]


def find_pieces(begin: Tensor, end: Tensor, k_runs: Tensor) -> tuple[Piece, ...] | None:
    """The pieces of a mask; None where it takes more than MAX_PIECES, or its rows differ.

    begin, end: int32 CPU (Bm, N); k_runs: int64 CPU (R, 4).
    """
    runs = k_runs[k_runs[:, 2].argsort()].tolist()  # in the order of rows
    nothing = torch.empty(0, device="cpu")
    rows = torch.cat([torch.arange(row, row + length, device="cpu") for _, _, row, length in runs] or [nothing])
    positions = torch.cat([at + step * torch.arange(length, device="cpu") for at, step, _, length in runs] or [nothing])
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


# ---- aten's kernels -----------------------------------------------------------------------------

# attend(q, k, v, causal, scale), q (B, H, N, D), k, v (B, G, K, D): out (B, H, N, D) of q's dtype; lse, B H N numbers.
Attend = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Merge = Callable[[Tensor, Tensor], None]  # (out, lse), both read and written, in round 0 written


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return found[0], found[1]


def _flash_for_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return found[0], found[1]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return found[0], found[1]


ATEN: dict[str, dict[str, Attend]] = {  # by type of device, by name
    "cpu": {"aten's flash attention": _flash_for_cpu},
    "cuda": {"aten's flash attention": _flash, "aten's cuDNN attention": _cudnn},
}


def _aten_takes(q: Tensor, v: Tensor, softcap: float) -> bool:
    """Whether aten has kernels for such tensors."""
    if softcap != 0 or v.size(3) != q.size(3):
        return False
    if q.device.type == "cuda":
        return q.dtype in (torch.bfloat16, torch.float16) and q.size(3) % 8 == 0
    return q.device.type == "cpu"


def _pieces_of_aten(call: AttentionCall, i: int, q: Tensor, v: Tensor) -> tuple[Piece, ...] | None:
    """The pieces of round i's mask; None where it is ringtile's."""
    plan = call.sequence.plan
    wanted = call.block_kernel != "ringtile" and _aten_takes(q, v, call.softcap)
    pieces = plain_pieces(plan, i) if wanted else None
    rounds_once_more = q.dtype != ops.state_dtype(q.dtype)
    alone = pieces is not None and call.sinks is None and _is_alone(plan, i, pieces)
    return None if rounds_once_more and not alone else pieces


def _names_in_aten(kernel: str, q: Tensor, k: Tensor) -> list[str]:
    """Of the kernels that compute what ringtile's does; InputError where `kernel` is "aten" and there are none."""
    found = {name: why_not(name, q.device, q.dtype, q.size(3), q.size(2), k.size(2)) for name in ATEN[q.device.type]}
    names = [name for name, reason in found.items() if not reason]
    if kernel == "aten" and not names:
        reasons = "; ".join(f"{name} {reason}" for name, reason in found.items())
        raise InputError(f"block_kernel is 'aten', but on {q.device} {reasons}; use 'auto' or 'ringtile'")
    return names


def _merge_piece_(
    attend: Attend, piece: Piece, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> None:
    """out -= sigmoid(lse_piece - lse) * (out - out_piece), lse = log(exp lse + exp lse_piece) (arXiv:2310.01889)."""
    queries, keys = slice(piece.q_begin, piece.q_end), slice(piece.k_begin, piece.k_end)
    block = attend(
        q[:, queries].transpose(1, 2), k[:, keys].transpose(1, 2), v[:, keys].transpose(1, 2), piece.causal, scale
    )
    running_out, running_lse = out[:, queries], lse[:, :, queries]
    out_piece, lse_piece = block[0].transpose(1, 2).to(out.dtype), block[1].to(lse.dtype).reshape(running_lse.shape)
    share = torch.sigmoid(lse_piece - running_lse)  # of the piece; 1 where no key came before
    running_out.lerp_(out_piece, share.transpose(1, 2)[..., None].to(out.dtype))
    running_lse.copy_(torch.logaddexp(running_lse, lse_piece))


CHECKED_LEN = 200  # tokens: no multiple of any tile


@functools.cache
def why_not(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int
) -> str:
    """Why a kernel of aten's is not used for such tensors: it raises, or computes something else; "" when it is used.

    These are private functions of torch, and the form of their log-sum-exp is promised nowhere. So out and lse of a
    causal and of a full piece are compared with ringtile's, once a process. Of each kernel a score is off by at most a
    rounding of |q| |k| a term, and the log of a sum by one a term. aten's exponentials are as good as weights in dtype:
    half an eps. All that bounds lse, and what it does to weights; besides, each kernel may round its weights to dtype,
    and aten rounds out: three times half an eps.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    cpu: Any = {"dtype": torch.float32, "device": "cpu"}
    heads = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = (
        torch.randn(1, CHECKED_LEN, count, head_dim, generator=generator, **cpu).to(device, dtype) for count in heads
    )
    state, scale = ops.state_dtype(dtype), head_dim**-0.5
    score = scale * float(q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max())
    lse_bound = 2 * torch.finfo(state).eps * (head_dim * score + CHECKED_LEN) + torch.finfo(dtype).eps / 2
    out_bound = (2 * lse_bound + 1.5 * torch.finfo(dtype).eps) * float(v.abs().max())
    begin = torch.zeros(1, CHECKED_LEN, dtype=torch.int32, device=device)
    for piece in (Piece(0, CHECKED_LEN, 0, CHECKED_LEN, True), Piece(0, CHECKED_LEN, 0, CHECKED_LEN // 2 + 1, False)):
        end = begin + piece.k_end
        if piece.causal:
            end = torch.arange(1, CHECKED_LEN + 1, dtype=torch.int32, device=device)[None]
        states = []
        for _ in range(2):
            out = torch.zeros_like(q, dtype=state)
            states.append((out, out.new_full((1, num_heads, CHECKED_LEN), -torch.inf, dtype=torch.float64)))
        (out, lse), (our_out, our_lse) = states
        ops.attn_fwd_(q, k, v, begin, end, ops.runs_tensor([(0, 1, 0, CHECKED_LEN)]), our_out, our_lse, scale, 0.0)
        try:
            _merge_piece_(ATEN[device.type][name], piece, q, k, v, out, lse, scale)
        except RuntimeError as error:
            return f"raises {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        for what, got, ours, bound in (("out", out, our_out, out_bound), ("lse", lse, our_lse, lse_bound)):
            difference = float((got - ours).abs().max())
            if not difference <= bound:  # nor a nan
                return f"gives another {what} than ringtile's kernel, by {difference:.1e}, expected at most {bound:.1e}"
    return ""


# ---- the fastest --------------------------------------------------------------------------------

_chosen: dict[object, str] = {}


def _fastest(merges: dict[str, Merge], key: object, out: Tensor, lse: Tensor) -> Merge:
    """The one that takes the least time here, as measured the first time; out and lse keep their values."""
    if len(merges) == 1:
        return next(iter(merges.values()))
    key = (key, tuple(merges))
    if key not in _chosen:
        seconds = {name: _seconds(merge, out.clone(), lse.clone()) for name, merge in merges.items()}
        _chosen[key] = min(seconds, key=seconds.__getitem__)
    return merges[_chosen[key]]


def _seconds(merge: Merge, out: Tensor, lse: Tensor) -> float:
    """The shortest of three runs, after one that warms up."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        merge(out, lse)
        if out.is_cuda:
            torch.cuda.synchronize(out.device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
