"""Who computes a block of keys in the ring: ringtile's kernels, or one of aten's.

By the setting attention_kernel: "ringtile"; "aten", and what aten cannot do is refused by name; or "auto". On a CPU,
auto is ringtile's kernels; on a GPU, whoever is fastest there, of those that can. A backend that does not compute what
it should (self_test.py) is never used: with auto the next one takes over.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ringtile import ops, self_test
from ringtile.attn.aten import ATEN
from ringtile.attn.backend import Backend, Block, BlockMask, Final, Ringtile
from ringtile.attn.dropout import AttentionDropout
from ringtile.attn.self_test import why_wrong
from ringtile.errors import Refused
from ringtile.sequence.plan import RankPlan
from ringtile.sequence.sharded import ShardedSequence

AttentionKernel = Literal["auto", "ringtile", "aten"]
ATTENTION_KERNELS = ("auto", "ringtile", "aten")
RINGTILE: Backend = Ringtile()


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What a call of attention is about, besides its tensors."""

    sequence: ShardedSequence
    scale: float
    softcap: float = 0.0
    attention_kernel: str = "ringtile"
    sinks: Tensor | None = None  # (H) of the state dtype, without a graph
    dropout: AttentionDropout | None = None  # None where its probability is 0


def attn_fwd_(
    call: AttentionCall,
    i: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rounded: Tensor | None = None,
) -> None:
    """Merges the keys of round i into out and lse, which hold the sinks or nothing before round 0.

    rounded, in the last round: gets the merged out, in its dtype; out then holds any numbers.
    """
    block = _block(call, i, q, fresh=i == 0 and call.sinks is None)
    first, *others = backends = _able(call, block, q, k, v)
    if not others:
        first.forward_(block, q, k, v, out, lse, rounded)
        return

    def merge_(backend: Backend, out: Tensor, lse: Tensor) -> None:
        backend.forward_(block, q, k, v, out, lse, rounded)

    merge_(_fastest(backends, merge_, (q, k, block.mask), (out, lse)), out, lse)


def attn_bwd_(
    call: AttentionCall,
    i: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    final: Final,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    fresh: bool,
    rounded: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Adds the gradients of round i. fresh: dk and dv may be uninitialized, and the round needs each of their rows.

    rounded, where no other round adds to them: get dk and dv, in their dtype; dk and dv then hold any numbers.
    """
    block = _block(call, i, q, fresh)
    first, *others = backends = _able(call, block, q, k, v, final.dlse)
    if not others:
        first.backward_(block, q, k, v, final, dq, dk, dv, rounded)
        return

    def add_(backend: Backend, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        backend.backward_(block, q, k, v, final, dq, dk, dv, rounded)

    add_(_fastest(backends, add_, (q, k, block.mask), (dq, dk, dv)), dq, dk, dv)


def check(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, dlse: Tensor | None = None) -> None:
    """Refused where no backend that may be used computes some round; before any key is sent."""
    plan = call.sequence.plan
    if not plan.is_whole:
        _check_shares(call, plan.scheme.text)
        if q.is_meta:
            return
        # A part of a kv head's query heads, which may be one: another kernel than that of whole groups.
        shares = [of_stage[plan.group.index(plan.rank)] for of_stage in plan.shares(q.size(2), k.size(2))]
        for sizes in {(len(piece.heads), len(piece.kv_heads)) for each in shares for piece in each.pieces}:
            of_q, of_k, of_v = (x.narrow(2, 0, count) for x, count in zip((q, k, v), (*sizes, sizes[1]), strict=True))
            _able(call, _block(call, 0, q, fresh=False), of_q, of_k, of_v)
        return
    if q.is_meta or (_is_ringtiles(call, q) and not why_wrong(RINGTILE, q, k, v, call.dropout is not None)):
        return
    for i in range(len(plan.rounds)):
        _able(call, _block(call, i, q, fresh=False), q, k, v, dlse)


def _check_shares(call: AttentionCall, scheme: str) -> None:
    """Refused: what cannot be computed where ranks share heads."""
    if call.attention_kernel == "aten":
        raise Refused(
            f"attention_kernel is 'aten', whose backward needs the output, but with the scheme {scheme} that stays "
            f"with the owner of the queries; set attention_kernel to auto or ringtile, or the scheme to "
            f"ring or all_gather"
        )
    if call.dropout is not None:
        raise Refused(
            f"attention dropout with the scheme {scheme}, in which a rank works on queries of others; expected the "
            f"scheme ring or all_gather, or no attention dropout"
        )


# ---- who can ------------------------------------------------------------------------------------

_masks: weakref.WeakKeyDictionary[RankPlan, tuple[BlockMask, ...]] = weakref.WeakKeyDictionary()


def _block(call: AttentionCall, i: int, q: Tensor, fresh: bool) -> Block:
    plan = call.sequence.plan
    masks = _masks.get(plan)
    if masks is None:
        masks = _masks[plan] = tuple(BlockMask(plan.begin, plan.end, round.k_runs) for round in plan.rounds)
    block = Block(masks[i], *call.sequence.mask_on(q.device), call.scale, call.softcap, fresh)
    if (drop := call.dropout) is None:
        return block
    positions = call.sequence.positions_on(q.device)
    numbers = ops.WeightDropout(drop.probability, drop.seed, drop.step, drop.stream, drop.rows, positions)
    return block._replace(dropout=numbers)


def _is_ringtiles(call: AttentionCall, q: Tensor) -> bool:
    """Whether nobody else is asked if ringtile's kernels are right."""
    others = call.attention_kernel != "ringtile" and call.sequence.plan.is_whole
    return not others or (call.attention_kernel == "auto" and not q.is_cuda)


_NO_DLSE = "takes no gradient of the log-sum-exp (return_lse)"
_OTHERWISE = {
    "auto": "report this with the output of: ringtile doctor",
    "ringtile": "set attention_kernel to auto or aten",
    "aten": "set attention_kernel to auto or ringtile",
}


def _able(
    call: AttentionCall, block: Block, q: Tensor, k: Tensor, v: Tensor, dlse: Tensor | None = None
) -> list[Backend]:
    """Who may compute a block, at least one: Refused, with everybody's reason, where there is none."""
    if q.is_meta:
        return [RINGTILE]
    able: list[Backend] = []
    unable: dict[str, str] = {}
    wrong: dict[str, str] = {}
    if call.attention_kernel != "aten":
        if reason := why_wrong(RINGTILE, q, k, v, call.dropout is not None):
            wrong[RINGTILE.name] = reason
        else:
            able.append(RINGTILE)
            if _is_ringtiles(call, q):
                return able
    for backend in ATEN[q.device.type] if call.attention_kernel != "ringtile" else ():
        if reason := backend.why_not(block, q, v) or ("" if dlse is None else _NO_DLSE):
            unable[backend.name] = reason
        elif reason := why_wrong(backend, q, k, v):
            wrong[backend.name] = reason
        else:
            able.append(backend)
    if able and not wrong:
        return able
    where = f"{q.dtype} with head dims {q.size(3)} and {v.size(3)} on {q.device}"
    if not able:
        setting, said = call.attention_kernel, "; ".join(f"{name} {why}" for name, why in (unable | wrong).items())
        raise Refused(f"attention_kernel is {setting!r}, but for {where}: {said}; {_OTHERWISE[setting]}")
    for name, reason in wrong.items():
        self_test.warn_once(name, where, reason, able[0].name)
    return able


# ---- who is fastest -----------------------------------------------------------------------------

_chosen: dict[object, str] = {}


def _fastest(
    backends: list[Backend],
    run: Callable[..., None],
    of: tuple[Tensor, Tensor, BlockMask],
    states: tuple[Tensor, ...],
) -> Backend:
    """The one that takes the least time here, measured once for blocks of about this size and number of pieces.

    states: what run writes, which keeps its values.
    """
    q, k, mask = of
    pieces = sum(map(len, mask.pieces or ()))
    sizes = (q.size(0), *q.shape[2:], k.size(2), *(number.bit_length() for number in (q.size(1), k.size(1), pieces)))
    key = (q.device, q.dtype, sizes, len(states), tuple(backend.name for backend in backends))
    if key not in _chosen:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return backends[0]
        seconds = {each.name: _seconds(run, each, tuple(state.clone() for state in states)) for each in backends}
        _chosen[key] = min(seconds, key=seconds.__getitem__)
    return next(backend for backend in backends if backend.name == _chosen[key])


def _seconds(run: Callable[..., None], backend: Backend, states: tuple[Tensor, ...]) -> float:
    """The shortest of three runs, after one that warms up."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        run(backend, *states)
        if states[0].is_cuda:
            torch.cuda.synchronize(states[0].device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
