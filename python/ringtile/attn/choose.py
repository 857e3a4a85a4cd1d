"""Who computes a block of keys: ringtile's kernels, or one of aten's.

By the setting attention_kernel: "ringtile"; "aten", and what aten cannot do is refused by name; or "auto". On a CPU,
auto is ringtile's kernels; on a GPU, whoever is fastest there, of those that can, and that are there at all. A backend
that does not compute what it should (self_test.py) is never used: with auto the next one takes over.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from ringtile import ops, self_test
from ringtile.attn.aten import ATEN
from ringtile.attn.backend import Backend, Block, BlockMask, Final, Gradients, Ringtile, Running, why_slow
from ringtile.attn.call import AttentionCall
from ringtile.attn.self_test import why_wrong
from ringtile.errors import RefusedError
from ringtile.sequence.plan import RankPlan, Shape

RINGTILE: Backend = Ringtile()
logger = logging.getLogger(__name__)


def forward(call: AttentionCall, i: int, q: Tensor, k: Tensor, v: Tensor, state: Running) -> None:
    """Merge the keys of round i into the state."""
    block = _block(call, i, q, k, v)
    first, *others = backends = _checked(call, block)
    if not others:
        _warn_if_slow(first, block, backward=False)
        first.forward(block, state)
        return

    def merge(backend: Backend, out: Tensor, lse: Tensor) -> None:
        backend.forward(block, state._replace(out=out, lse=lse))

    _fastest(backends, merge, block, (state.out, state.lse)).forward(block, state)


def backward(call: AttentionCall, i: int, q: Tensor, k: Tensor, v: Tensor, final: Final, grads: Gradients) -> None:
    """Add the gradients of round i."""
    block = _block(call, i, q, k, v)
    first, *others = backends = _checked(call, block, takes_dlse=final.dlse is not None)
    if not others:
        _warn_if_slow(first, block, backward=True)
        first.backward(block, final, grads)
        return

    def add(backend: Backend, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        backend.backward(block, final, grads._replace(dq=dq, dk=dk, dv=dv))

    _fastest(backends, add, block, (grads.dq, grads.dk, grads.dv)).backward(block, final, grads)


def check(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, shape: Shape, takes_dlse: bool = False) -> None:
    """Raise RefusedError where no backend that may be used computes some round; before anything is sent.

    shape: of the local tokens; q, k and v have its heads, or the share that this rank works on first.
    """
    ring = call.sequence.ring
    if q.is_meta:
        return
    sizes = {(shape.num_heads, shape.num_kv_heads)}
    if ring.heads is not None:
        own = [stage[ring.heads.place] for stage in call.sequence.shares(shape.num_heads, shape.num_kv_heads)]
        sizes = {(len(share.heads), len(share.kv_of_heads or share.kv_heads)) for share in own if share.heads}
    elif _is_ringtiles(call, q) and not ops.why_no_kernels(q.device):
        two_sides = any(round.key_bounds for round in ring.plan.rounds)
        if not why_wrong(RINGTILE, q, k, v, call.dropout is not None, two_sides):
            return
    for num_heads, num_kv_heads in sizes:  # where each query head has a kv head of its own, other kernels may run
        of_q = q[:, :, : 1 if num_heads == num_kv_heads else 2]
        for i in range(len(ring.plan.rounds)):
            _able(call, _block(call, i, of_q, k[:, :, :1], v[:, :, :1]), takes_dlse)


# ---- who can ------------------------------------------------------------------------------------

_masks: weakref.WeakKeyDictionary[RankPlan, tuple[BlockMask, ...]] = weakref.WeakKeyDictionary()


def _block(call: AttentionCall, i: int, q: Tensor, k: Tensor, v: Tensor) -> Block:
    plan = call.sequence.ring.plan
    masks = _masks.get(plan)
    if masks is None:
        positions = call.sequence.positions_on(plan.begin.device)
        masks = _masks[plan] = tuple(
            BlockMask(plan.begin, plan.end, round.k_runs, round.key_bounds, positions) for round in plan.rounds
        )
    begin, end, *key_bounds = call.sequence.bounds_on(q.device, i)
    of_queries = call.sequence.positions_on(q.device) if key_bounds or call.dropout is not None else None
    about = call.scale, call.softcap, call.dropout, tuple(key_bounds), of_queries
    return Block(q, k, v, masks[i], begin, end, *about)


def _is_ringtiles(call: AttentionCall, q: Tensor) -> bool:
    """Return whether nobody else is asked if ringtile's kernels are right."""
    return call.attention_kernel == "ringtile" or (call.attention_kernel == "auto" and not q.is_cuda)


_NO_DLSE = "takes no gradient of the log-sum-exp (return_lse)"
_OTHERWISE = {
    "auto": "report this with the output of: ringtile doctor",
    "ringtile": "set attention_kernel to auto or aten",
    "aten": "set attention_kernel to auto or ringtile",
}


def _checked(call: AttentionCall, block: Block, takes_dlse: bool = False) -> list[Backend]:
    """Return the same as `_able`, after `check`, which refuses ringtile's kernels where they are wrong."""
    return [RINGTILE] if call.attention_kernel == "ringtile" else _able(call, block, takes_dlse)


def _able(call: AttentionCall, block: Block, takes_dlse: bool = False) -> list[Backend]:
    """Return who may compute a block, at least one. RefusedError, with everybody's reason, where there is none."""
    q, k, v = block.q, block.k, block.v
    if q.is_meta:
        return [RINGTILE]
    able: list[Backend] = []
    unable: dict[str, str] = {}
    wrong: dict[str, str] = {}
    if call.attention_kernel != "aten":
        if reason := RINGTILE.lacks(block):
            unable[RINGTILE.name] = reason
        elif reason := why_wrong(RINGTILE, q, k, v, block.dropout is not None, bool(block.key_bounds)):
            wrong[RINGTILE.name] = reason
        else:
            able.append(RINGTILE)
            if _is_ringtiles(call, q):
                return able
    for backend in ATEN[q.device.type] if call.attention_kernel != "ringtile" else ():
        if reason := backend.lacks(block) or (_NO_DLSE if takes_dlse else ""):
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
        otherwise = _OTHERWISE[setting] if wrong or setting != "auto" else "change what both lack"
        raise RefusedError(f"attention_kernel is {setting!r}, but for {where}: {said}; {otherwise}")
    for name, reason in wrong.items():
        self_test.warn_once(name, where, reason, able[0].name)
    return able


_slow: set[str] = set()


def _warn_if_slow(backend: Backend, block: Block, *, backward: bool) -> None:
    """Say so, once for each reason, where nobody else is there: a slow run looks like any other."""
    if not block.q.is_cuda or backend is not RINGTILE:
        return
    reason = why_slow(block, torch.cuda.get_device_capability(block.q.device), backward=backward)
    if reason and reason not in _slow:
        _slow.add(reason)
        logger.warning("attention by ringtile's kernels is slow here: %s", reason)


# ---- who is fastest -----------------------------------------------------------------------------

_chosen: dict[object, str] = {}


def _fastest(backends: list[Backend], run: Callable[..., None], block: Block, states: tuple[Tensor, ...]) -> Backend:
    """Return the one that takes the least time here, measured once for blocks of about this size and mask.

    states: what run writes, which keeps its values. The first one, whose sums have one order, where torch is told to be
    deterministic, as a clock is not; and where there is no memory for copies of the states.
    """
    if torch.are_deterministic_algorithms_enabled():
        return backends[0]
    q, k = block.q, block.k
    pieces = sum(map(len, block.mask.pieces or ()))
    sizes = (q.size(0), *q.shape[2:], k.size(2), *(number.bit_length() for number in (q.size(1), k.size(1), pieces)))
    key = (q.device, q.dtype, sizes, len(states), tuple(backend.name for backend in backends))
    if key not in _chosen:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return backends[0]
        try:
            seconds = {each.name: _seconds(run, each, tuple(state.clone() for state in states)) for each in backends}
        except torch.OutOfMemoryError:
            return backends[0]
        _chosen[key] = min(seconds, key=seconds.__getitem__)
    return next(backend for backend in backends if backend.name == _chosen[key])


def _seconds(run: Callable[..., None], backend: Backend, states: tuple[Tensor, ...]) -> float:
    """Return the shortest of three runs, after one that warms up."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        run(backend, *states)
        if states[0].is_cuda:
            torch.cuda.synchronize(states[0].device)
        times.append(time.perf_counter() - began)
    return min(times[1:])
