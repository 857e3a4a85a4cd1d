"""Who computes a block of keys: ringtile's kernels, or one of aten's.

By the setting attention_kernel: "ringtile"; "aten", and what aten cannot do is refused by name; or "auto". On a CPU,
auto is ringtile's kernels; in bfloat16 aten's, which use AMX, where the CPU has it and ringtile's build has not. On a
GPU it times every installed backend that supports the block, once for each kind and size of a call, and keeps the
fastest; the ranks of a ring keep the one whose slowest rank is the fastest. A backend that does not compute what it
should (self_test.py) is never used: with auto the next one takes over. So it does where another's kernel raises, also
later at a size that the self-test does not have.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from ringtile import ops, self_test
from ringtile.attn.aten import ATEN
from ringtile.attn.backend import Backend, Block, Final, Gradients, Ringtile, Running, why_slow
from ringtile.attn.call import AttentionCall
from ringtile.attn.self_test import mark_wrong, why_wrong
from ringtile.errors import RefusedError
from ringtile.sequence.rounds import Round
from ringtile.transport.transport import Transport

RINGTILE: Backend = Ringtile()
logger = logging.getLogger(__name__)


def forward(
    call: AttentionCall, round: Round, q: Tensor, k: Tensor, v: Tensor, state: Running, *, settles: bool = False
) -> None:
    """Merge the keys of a round into the state; or, where it settles, find out with the other ranks who does so."""
    block = Block(q, k, v, round, call.scale, call.softcap, call.dropout, call.indices)

    def merge(backend: Backend, out: Tensor, lse: Tensor) -> None:
        backend.forward(block, Running(out, lse, state.fresh, state.rounded))

    states = state.out, state.lse
    if settles:
        return _settle(call, block, merge, states, False)
    _run(call, block, merge, states, () if state.fresh else states)


def backward(
    call: AttentionCall,
    round: Round,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    final: Final,
    grads: Gradients,
    *,
    settles: bool = False,
) -> None:
    """Add the gradients of a round; settles: as in `forward`."""
    block = Block(q, k, v, round, call.scale, call.softcap, call.dropout, call.indices)

    def add(backend: Backend, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        backend.backward(block, final, Gradients(dq, dk, dv, grads.fresh, grads.rounded))

    if settles:
        return _settle(call, block, add, grads[:3], final.dlse is not None)
    kept = grads[:1] if grads.fresh else grads[:3]
    _run(call, block, add, grads[:3], kept, takes_dlse=final.dlse is not None)


def _run(
    call: AttentionCall,
    block: Block,
    run: Callable[..., None],
    states: tuple[Tensor, ...],
    kept: tuple[Tensor, ...],
    *,
    takes_dlse: bool = False,
) -> None:
    """Compute a block by the backend that is chosen; by another one where that of a library raises.

    run, states: as in `_fastest`. kept: those whose values the block adds to; an error after they have changed goes on.
    """
    while True:
        backend = _backend(call, block, run, states, takes_dlse)
        if backend is RINGTILE:
            return run(backend, *states)
        versions = _versions(kept)
        try:
            return run(backend, *states)
        except Exception as error:
            if kept and (versions is None or versions != _versions(kept)):
                raise
            _drop(backend, block, error)


def _versions(tensors: tuple[Tensor, ...]) -> list[int] | None:
    """Return how often these were written to; None: nobody counts."""
    return None if any(x.is_inference() for x in tensors) else [x._version for x in tensors]


def _drop(backend: Backend, block: Block, error: Exception) -> None:
    """Use a library's kernel no more for such heads and dtypes. Raise the error if it says nothing of one."""
    if backend is RINGTILE or isinstance(error, torch.OutOfMemoryError):
        raise error
    mark_wrong(backend, block.q, block.k, block.v, self_test.error_of(error))
    block.round.chosen.clear()


def check(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, takes_dlse: bool = False) -> None:
    """Raise RefusedError where no backend that may be used computes some round; before anything is sent.

    q, k, v: the local tensors, or this rank's first heads; only dtype, device and head dims are read.
    """
    if q.is_meta:
        return
    rounds = call.sequence.rounds_on(q.device)
    checked, kind = rounds[0].queries.checked, (_kind(call, q, takes_dlse), call.shape)
    if kind in checked:
        return
    num_heads, num_kv_heads = call.shape.num_heads, call.shape.num_kv_heads
    if (heads := call.sequence.ring.heads) is not None:
        share = call.sequence.shares(num_heads, num_kv_heads)[heads.place]
        num_heads, num_kv_heads = len(share.heads), len(share.kv_of_heads or share.kv_heads)
    of_q = q[:, :, : 1 if num_heads == num_kv_heads else 2]  # other kernels may run where each has a kv head
    for round in rounds if num_heads else ():
        block = Block(of_q, k[:, :, :1], v[:, :, :1], round, call.scale, call.softcap, call.dropout, call.indices)
        _able(call, block, takes_dlse)
    if not _captures(q):
        checked.add(kind)


def _kind(call: AttentionCall, q: Tensor, takes_dlse: bool) -> tuple[object, ...]:
    """Return what decides who may compute a block, apart from its round, shapes and dtype."""
    about = call.attention_kernel, call.dropout is None, call.softcap == 0, call.indices is None, takes_dlse
    return *about, current_flash_attention_impl()


def _captures(q: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, in which nothing is tested or measured."""
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


# ---- who can ------------------------------------------------------------------------------------


def _is_ringtiles(call: AttentionCall, q: Tensor) -> bool:
    """Return whether nobody else is asked if ringtile's kernels are right."""
    if call.attention_kernel == "auto" and not q.is_cuda:
        return not (q.dtype == torch.bfloat16 and ops.why_no_amx())
    return call.attention_kernel == "ringtile"


_NO_DLSE = "takes no gradient of the log-sum-exp (return_lse)"
_OTHERWISE = {
    "auto": "report this with the output of: ringtile doctor",
    "ringtile": "set attention_kernel to auto or aten",
    "aten": "set attention_kernel to auto or ringtile",
}


def _backend(
    call: AttentionCall,
    block: Block,
    run: Callable[..., None],
    states: tuple[Tensor, ...],
    takes_dlse: bool = False,
) -> Backend:
    """Return who computes a block. run, states: as in `_fastest`."""
    q, backward, chosen = block.q, len(states) == 3, block.round.chosen
    # On a GPU, where five backends may take part, asking all of them takes a quarter of the host's time in a round.
    kind, deterministic = _kind(call, q, takes_dlse), torch.are_deterministic_algorithms_enabled()
    key = kind, backward, deterministic, q.dtype, q.shape, block.k.shape, block.v.shape
    found: Backend | None = chosen.get(key)
    while found is None:
        backends = _able(call, block, takes_dlse)
        ranked = _ranked.get(call.sequence.transport, {}).get(_size_class(call, block, kind, states), ())
        agreed = (backend for name in ranked for backend in backends if backend.name == name)
        found, is_final = next(agreed, None), True
        if found is None:
            found, is_final = _fastest(backends, run, block, states)
        if found is None:
            continue
        if len(backends) == 1:
            _warn_if_slow(found, block, backward=backward)
        if is_final and not _captures(q):
            chosen[key] = found
    return found


def _able(call: AttentionCall, block: Block, takes_dlse: bool = False) -> list[Backend]:
    """Return the backends that support this block. Raise RefusedError listing why each one does not."""
    q, k, v = block.q, block.k, block.v
    if q.is_meta or (block.indices is not None and call.attention_kernel != "aten"):  # for which nobody else has one
        return [RINGTILE]
    able: list[Backend] = []
    unable: dict[str, str] = {}
    wrong: dict[str, str] = {}
    if call.attention_kernel != "aten":
        if reason := RINGTILE.lacks(block):
            unable[RINGTILE.name] = reason
        elif reason := why_wrong(RINGTILE, q, k, v, block.dropout is not None, bool(block.round.key_bounds)):
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
        return able[-1:] if not q.is_cuda and ops.why_no_amx() else able
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


def _fastest(
    backends: list[Backend], run: Callable[..., None], block: Block, states: tuple[Tensor, ...]
) -> tuple[Backend | None, bool]:
    """Return the one that takes the least time here, measured once for blocks of about this size and mask.

    None: one of them has raised, and is no more to be used.

    states: what run writes, which keeps its values. The first one, whose sums have one order, where torch is told to be
    deterministic, as a clock is not. It also stands in, and False says so, where nothing can be measured: while a CUDA
    graph is captured, and where there is no memory for copies of the states.
    """
    if len(backends) == 1 or torch.are_deterministic_algorithms_enabled():
        return backends[0], True
    q = block.q
    sizes = (q.size(0), *q.shape[2:], block.k.size(2), q.size(1).bit_length())
    key = (q.device, q.dtype, sizes, len(states), tuple(backend.name for backend in backends))
    if key not in _chosen:
        seconds = None if _captures(q) else _measured(backends, run, block, states)
        if seconds is None:
            return backends[0], False
        if len(seconds) < len(backends):
            return None, False
        _chosen[key] = min(seconds, key=seconds.__getitem__)
        _tell(block, states, seconds)
    return next(backend for backend in backends if backend.name == _chosen[key]), True


def _measured(
    backends: list[Backend], run: Callable[..., None], block: Block, states: tuple[Tensor, ...]
) -> dict[str, float] | None:
    """Return the seconds of each, but for those that raise, which are no more to be used. None: there is no memory."""
    seconds = {}
    try:
        for backend in backends:
            try:
                seconds[backend.name] = _seconds(run, backend, tuple(state.clone() for state in states))
            except Exception as error:  # noqa: PERF203
                _drop(backend, block, error)
    except torch.OutOfMemoryError:
        return None
    return seconds


def _tell(block: Block, states: tuple[Tensor, ...], seconds: dict[str, float]) -> None:
    logger.info(
        "attention %s of q %s and k %s is computed by %s (%s)",
        *("backward" if len(states) == 3 else "forward", tuple(block.q.shape), tuple(block.k.shape)),
        *(
            min(seconds, key=seconds.__getitem__),
            ", ".join(f"{x} {taken * 1e3:.2f} ms" for x, taken in seconds.items()),
        ),
    )


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


# ---- the same on all ranks ----------------------------------------------------------------------

# By group, and by kind and size of a call: backends, first the one whose slowest rank is the fastest.
_ranked: weakref.WeakKeyDictionary[Transport, dict[object, list[str]]] = weakref.WeakKeyDictionary()


def _size_class(call: AttentionCall, block: Block, kind: object, states: tuple[Tensor, ...]) -> tuple[object, ...]:
    """Return what is the same for all blocks that one choice is for, on all ranks of a ring."""
    q, sequence = block.q, call.sequence
    sizes = (q.size(0), *q.shape[2:], block.k.size(2), block.v.size(3), sequence.seq_len.bit_length())
    return sequence.ring.ranks, kind, q.dtype, sizes, len(states)


def agrees(call: AttentionCall, q: Tensor) -> bool:
    """Return whether several backends may be asked, and ranks that wait for each other; the same on all of these."""
    several = q.is_cuda and call.attention_kernel != "ringtile" and len(call.sequence.ring.ranks) > 1
    several = several and call.expand is None and call.indices is None  # keys before their round; a kernel of aten's
    return several and not torch.are_deterministic_algorithms_enabled() and not _captures(q)


def _settle(
    call: AttentionCall, block: Block, run: Callable[..., None], states: tuple[Tensor, ...], takes_dlse: bool
) -> None:
    """Rank the backends by the seconds of the slowest rank: once, a collective of the ranks of a ring.

    Asked only where `agrees`, before all messages of a call, so that all ranks post these in one order. A rank that
    cannot measure, because the keys of its first block are not its own, or memory is short, says nothing.
    """
    transport, kind = call.sequence.transport, _kind(call, block.q, takes_dlse)
    ranked, key = _ranked.setdefault(transport, {}), _size_class(call, block, kind, states)
    if key in ranked:
        return
    able = _able(call, block, takes_dlse) if block.round.planned.in_place else []
    seconds = _measured(able, run, block, states) or {}
    names = [backend.name for backend in (RINGTILE, *ATEN[block.q.device.type])]
    mine = torch.tensor([seconds.get(name, -1.0) for name in names], dtype=torch.float64, device=block.q.device)
    arrived = {peer: torch.empty_like(mine) for peer in call.sequence.ring.ranks if peer != transport.rank}
    transport.exchange(dict.fromkeys(arrived, mine), arrived, "the seconds of attention kernels").wait()
    slowest = torch.stack([mine, *arrived.values()]).amax(0).tolist()
    of_ring = {name: taken for taken, name in sorted(zip(slowest, names, strict=True)) if taken >= 0}
    ranked[key] = [*of_ring]
    if of_ring:
        _tell(block, states, of_ring)
