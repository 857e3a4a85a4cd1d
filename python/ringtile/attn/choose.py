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
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from ringtile import ops, self_test
from ringtile.attn.aten import ATEN
from ringtile.attn.backend import Backend, Block, Final, Gradients, Ringtile, Running, why_slow
from ringtile.attn.call import AttentionCall, unwritten_keys
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
    states = state.out, state.lse

    def merge(backend: Backend, out: Tensor, lse: Tensor) -> None:
        backend.forward(block, Running(out, lse, state.fresh, state.rounded))

    task = _Task(call, block, merge, states, () if state.fresh else states, False)
    _settle(task) if settles else _run(task)


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
    states = grads[:3]

    def add(backend: Backend, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        backend.backward(block, final, Gradients(dq, dk, dv, grads.fresh, grads.rounded))

    # Some ranks of a ring may have a gradient of lse, which ringtile alone takes: these settle nothing for themselves.
    takes_dlse = final.dlse is not None and not settles
    task = _Task(call, block, add, states, states[:1] if grads.fresh else states, takes_dlse)
    _settle(task) if settles else _run(task)


@dataclass(eq=False, slots=True)
class _Task:
    """The forward or the backward of a block, by whichever backend."""

    call: AttentionCall
    block: Block
    compute: Callable[..., None]  # by a backend, into states like these
    states: tuple[Tensor, ...]
    kept: tuple[Tensor, ...]  # those of the states whose values it adds to
    takes_dlse: bool

    @property
    def backward(self) -> bool:
        return len(self.states) == 3

    @property
    def kind(self) -> Kind:
        return kind_of(self.call, self.takes_dlse, self.backward)


# What decides who may compute a block of a sequence, apart from its round.
Kind: TypeAlias = "tuple[object, ...]"


def kind_of(call: AttentionCall, takes_dlse: bool, backward: bool) -> Kind:
    """Return the kind of a call's blocks, with what torch's flash attention is."""
    options = call.dropout is not None, call.softcap != 0, call.indices is not None, takes_dlse, backward
    return call.shape, call.attention_kernel, *options, current_flash_attention_impl()


def _run(task: _Task) -> None:
    """Compute a block by the backend that is chosen; by another one where that of a library raises.

    Where what it adds to has changed, the error goes on.
    """
    while True:
        backend = _backend(task)
        if backend is RINGTILE:
            return task.compute(backend, *task.states)
        versions = _versions(task.kept)
        try:
            return task.compute(backend, *task.states)
        except Exception as error:
            if task.kept and (versions is None or versions != _versions(task.kept)):
                raise
            _drop(backend, task.block, error)


def _versions(tensors: tuple[Tensor, ...]) -> list[int] | None:
    """Return how often these were written to; None: nobody counts."""
    return None if any(x.is_inference() for x in tensors) else [x._version for x in tensors]


def _drop(backend: Backend, block: Block, error: Exception) -> None:
    """Use a library's kernel no more for such heads and dtypes. Raise the error if it says nothing of one."""
    if backend is RINGTILE or isinstance(error, torch.OutOfMemoryError):
        raise error
    mark_wrong(backend, block.q, block.k, block.v, self_test.error_of(error))
    block.round.able.clear()


def check(call: AttentionCall, q: Tensor, *, takes_dlse: bool, backward: bool) -> None:
    """Raise RefusedError where no backend that may be used computes some round; before anything is sent.

    q: of the call's dtype and device, which alone are read.
    """
    if q.is_meta:
        return
    rounds, kind = call.sequence.rounds_on(q.device), kind_of(call, takes_dlse, backward)
    if kind in rounds[-1].able:  # which is asked last
        return
    _, num_heads, num_kv_heads, head_dim, v_head_dim, *_ = call.shape
    if (heads := call.sequence.ring.heads) is not None:
        share = call.sequence.shares(num_heads, num_kv_heads)[heads.place]
        num_heads, num_kv_heads = len(share.heads), len(share.kv_of_heads or share.kv_heads)
    k, v = unwritten_keys(q, 1, v_head_dim)
    q = q.new_empty((1, 1, 1 if num_heads == num_kv_heads else 2, head_dim))  # others run where each has a kv head
    for round in rounds if num_heads else ():
        block = Block(q, k, v, round, call.scale, call.softcap, call.dropout, call.indices)
        _able(call, block, kind, takes_dlse)


def _captures(q: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, in which nothing is tested, measured or remembered."""
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


def _able(call: AttentionCall, block: Block, kind: Kind, takes_dlse: bool) -> list[Backend]:
    """Return the backends that support this block, found out once: five are asked on a GPU. RefusedError: none."""
    able = block.round.able.get(kind)
    if able is None:
        able = _ask(call, block, takes_dlse)
        if not _captures(block.q):
            block.round.able[kind] = able
    return able


def _ask(call: AttentionCall, block: Block, takes_dlse: bool = False) -> list[Backend]:
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


_slow: set[str] = set()  # reasons that were told
_looked_at: set[Kind] = set()


def _warn_if_slow(block: Block, kind: Kind, *, backward: bool) -> None:
    """Say so, once for each reason, where ringtile alone is there on a GPU: a slow run looks like any other."""
    if kind in _looked_at:
        return
    _looked_at.add(kind)
    reason = why_slow(block, torch.cuda.get_device_capability(block.q.device), backward=backward)
    if reason and reason not in _slow:
        _slow.add(reason)
        logger.warning("attention by ringtile's kernels is slow here: %s", reason)


# ---- who is fastest -----------------------------------------------------------------------------

# By kind and size of a call, the fastest first: in this process, for each list of backends that may be asked; and by
# group, for the ranks of a ring, who wait for the slowest of them.
_ranked_here: dict[object, list[Backend]] = {}
_ranked: weakref.WeakKeyDictionary[Transport, dict[object, list[Backend]]] = weakref.WeakKeyDictionary()


def _backend(task: _Task) -> Backend:
    """Return who computes a block: of several, who takes the least time for about this size, measured once.

    The first one, whose sums have one order, where torch is told to be deterministic, as a clock is not. It also stands
    in, and nothing is remembered, where nothing can be measured: while a CUDA graph is captured, and where there is no
    memory for copies of the states.
    """
    call, block, q, kind = task.call, task.block, task.block.q, task.kind
    while True:
        backends = _able(call, block, kind, task.takes_dlse)
        if len(backends) == 1 or torch.are_deterministic_algorithms_enabled():
            if q.is_cuda and backends == [RINGTILE]:
                _warn_if_slow(block, kind, backward=task.backward)
            return backends[0]
        for each in _ranked.get(call.sequence.transport, {}).get(_of_ring(call, kind), ()):
            if each in backends:
                return each
        key = kind, q.device, q.shape[1].bit_length(), *backends
        if key not in _ranked_here:
            seconds = None if _captures(q) else _measured(backends, task)
            if seconds is None:
                return backends[0]
            if len(seconds) < len(backends):  # one has raised, and is no more to be used
                continue
            _ranked_here[key] = sorted(backends, key=lambda backend: seconds[backend.name])
            _tell(task, seconds)
        return _ranked_here[key][0]


def _of_ring(call: AttentionCall, kind: Kind) -> tuple[object, ...]:
    """Return what is the same for all blocks that one choice is for, on all ranks of a ring."""
    return kind, call.sequence.seq_len.bit_length(), call.sequence.ring.ranks


def _measured(backends: list[Backend], task: _Task) -> dict[str, float] | None:
    """Return the seconds of each, but for those that raise, which are no more to be used. None: there is no memory."""
    seconds = {}
    try:
        for backend in backends:
            try:
                copies = tuple(state.clone() for state in task.states)
                seconds[backend.name] = _seconds(task.compute, backend, copies)
            except Exception as error:  # noqa: PERF203
                _drop(backend, task.block, error)
    except torch.OutOfMemoryError:
        return None
    return seconds


def _tell(task: _Task, seconds: dict[str, float]) -> None:
    logger.info(
        "attention %s of q %s and k %s is computed by %s (%s)",
        *("backward" if task.backward else "forward", tuple(task.block.q.shape), tuple(task.block.k.shape)),
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


def agrees(call: AttentionCall, q: Tensor, *, backward: bool) -> bool:
    """Return whether the ranks of a ring have yet to settle who computes such blocks; the same on all of these."""
    if not _may_differ(call, q):
        return False
    return _of_ring(call, kind_of(call, False, backward)) not in _ranked.get(call.sequence.transport, {})


def _may_differ(call: AttentionCall, q: Tensor) -> bool:
    """Return whether several backends may be asked, and ranks wait for each other."""
    several = q.is_cuda and call.attention_kernel != "ringtile" and len(call.sequence.ring.ranks) > 1
    several = several and call.expand is None and call.indices is None  # keys before their round; a kernel of aten's
    return several and not torch.are_deterministic_algorithms_enabled() and not _captures(q)


def _settle(task: _Task) -> None:
    """Rank the backends by the seconds of the slowest rank: a collective of the ranks of a ring.

    Asked once, where `agrees`, before all messages of a call, so that all ranks post these in one order. A rank that
    cannot measure, because the keys of its first block are not its own, or memory is short, says nothing.
    """
    call, block, q, kind = task.call, task.block, task.block.q, task.kind
    transport = call.sequence.transport
    able = _able(call, block, kind, task.takes_dlse) if block.round.planned.in_place else []
    seconds = _measured(able, task) or {}
    backends = {backend.name: backend for backend in (RINGTILE, *ATEN[q.device.type])}
    mine = torch.tensor([seconds.get(name, -1.0) for name in backends], dtype=torch.float64, device=q.device)
    arrived = {peer: torch.empty_like(mine) for peer in call.sequence.ring.ranks if peer != transport.rank}
    transport.exchange(dict.fromkeys(arrived, mine), arrived, "the seconds of attention kernels").wait()
    slowest = torch.stack([mine, *arrived.values()]).amax(0).tolist()
    of_ring = {name: taken for taken, name in sorted(zip(slowest, backends, strict=True)) if taken >= 0}
    _ranked.setdefault(transport, {})[_of_ring(call, kind)] = [backends[name] for name in of_ring]
    if of_ring:
        _tell(task, of_ring)
