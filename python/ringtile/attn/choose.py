"""Who computes a block of keys: ringtile's kernels, or one of aten's.

By the setting attention_kernel: "ringtile"; "aten", and what aten cannot do is refused by name; or "auto": ringtile's
kernels, whose results have the same bits on every run, but where another's are known to take a fraction of the time.
On a GPU these are blocks that ringtile has no kernel of that architecture's tensor cores for (`why_slow`), on a CPU
those in bfloat16 where it has AMX and ringtile's build has not. A rule and no clock: all ranks and all runs choose
alike. With `torch.use_deterministic_algorithms(True)` auto is ringtile's in any case.

A backend that does not compute what it should (self_test.py) is never used: with auto the next one takes over. So it
does where another's kernel raises, also later at a size that the self-test does not have.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from ringtile import ops, self_test
from ringtile.attn.aten import ATEN
from ringtile.attn.backend import Backend, Block, Final, Gradients, Ringtile, Running, misaligned, why_slow
from ringtile.attn.call import AttentionCall, unwritten_keys
from ringtile.attn.self_test import mark_wrong, why_wrong
from ringtile.errors import InputError, RefusedError
from ringtile.sequence.plan import Shape
from ringtile.sequence.rounds import Round

RINGTILE: Backend = Ringtile()


def forward(call: AttentionCall, round: Round, q: Tensor, k: Tensor, v: Tensor, state: Running) -> None:
    """Merge the keys of a round into the state."""
    block = Block(q, k, v, round, call.scale, call.softcap, call.dropout)
    kept = () if state.fresh else (state.out, state.lse)
    _run(block, _kind_of(call, False, False), lambda backend: backend.forward(block, state), kept)


def backward(
    call: AttentionCall, round: Round, q: Tensor, k: Tensor, v: Tensor, final: Final, grads: Gradients
) -> None:
    """Add the gradients of a round."""
    block = Block(q, k, v, round, call.scale, call.softcap, call.dropout)
    kept = grads[:1] if grads.fresh else grads[:3]
    kind = _kind_of(call, final.dlse is not None, True)
    _run(block, kind, lambda backend: backend.backward(block, final, grads), kept)


def _run(block: Block, kind: Kind, compute: Callable[[Backend], None], kept: tuple[Tensor, ...]) -> None:
    """Compute a block by the backend that is chosen; by another one where that of a library raises.

    kept: what it adds to. Where that has changed, the error goes on.
    """
    while True:
        backend = _chosen(block, kind)
        if backend is RINGTILE:
            return compute(backend)
        versions = _versions(kept)
        try:
            return compute(backend)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or (kept and (not versions or versions != _versions(kept))):
                raise
            mark_wrong(backend, block.q, block.k, block.v, self_test.error_of(error))
            block.round.backends.clear()


def _versions(tensors: tuple[Tensor, ...]) -> list[int] | None:
    """Return how often these were written to; None: nobody counts."""
    return None if any(x.is_inference() for x in tensors) else [x._version for x in tensors]


def check(call: AttentionCall, q: Tensor, *, takes_dlse: bool, backward: bool) -> None:
    """Raise RefusedError where no backend that may be used computes some round; before anything is sent.

    q: of the call's dtype and device, which alone are read.
    """
    if q.is_meta:
        return
    rounds, kind = call.sequence.rounds_on(q.device), _kind_of(call, takes_dlse, backward)
    if kind in rounds[-1].backends:  # which is asked last
        return
    _, num_heads, num_kv_heads, head_dim, v_head_dim, *_ = call.shape
    if max(head_dim, v_head_dim) > ops.MAX_HEAD_DIM:  # of a traced call, whose tensors nobody has checked
        raise InputError(f"the head dims are {head_dim} and {v_head_dim}; expected 1..{ops.MAX_HEAD_DIM}")
    if (heads := call.sequence.ring.heads) is not None:
        share = call.sequence.shares(num_heads, num_kv_heads)[heads.place]
        num_heads, num_kv_heads = len(share.heads), len(share.kv_of_heads or share.kv_heads)
    k, v = unwritten_keys(q, 1, v_head_dim)
    q = q.new_empty((1, 1, 1 if num_heads == num_kv_heads else 2, head_dim))  # others run where each has a kv head
    for round in rounds if num_heads else ():
        _chosen(Block(q, k, v, round, call.scale, call.softcap, call.dropout), kind)


# ---- who does it --------------------------------------------------------------------------------

# What decides who computes a block, apart from its round: whether it takes a gradient of lse, backward, shape, setting,
# options, and what the user has told torch.
Kind: TypeAlias = tuple[bool, bool, Shape, str, tuple[bool, ...], tuple[object, ...]]


def _kind_of(call: AttentionCall, takes_dlse: bool, backward: bool) -> Kind:
    options = call.dropout is not None, call.softcap != 0
    told = current_flash_attention_impl(), torch.are_deterministic_algorithms_enabled()
    return takes_dlse, backward, call.shape, call.attention_kernel, options, told


def _chosen(block: Block, kind: Kind) -> Backend:
    """Return who computes this block, found out once. RefusedError: nobody can."""
    backend: Backend | None = block.round.backends.get(kind)
    if backend is None:
        backend = _choose(block, kind)
        if not _captures(block.q):
            block.round.backends[kind] = backend
    return backend


def _captures(q: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, in which nothing is tested or remembered."""
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def _choose(block: Block, kind: Kind) -> Backend:
    """Return the first backend that supports this block. Raise RefusedError listing why each one does not."""
    takes_dlse, backward, _, setting, *_ = kind
    q, k, v = block.q, block.k, block.v
    if q.is_meta:
        return RINGTILE
    unable: dict[str, str] = {}
    wrong: dict[str, str] = {}
    where = f"{q.dtype} with head dims {q.size(3)} and {v.size(3)} on {q.device}"
    for backend in _in_order(setting, block, backward):
        is_own = backend is RINGTILE
        options = (block.dropout is not None, bool(block.round.key_bounds)) if is_own else ()
        if reason := backend.lacks(block) or (_NO_DLSE if takes_dlse and not is_own else ""):
            unable[backend.name] = reason
        elif reason := why_wrong(backend, q, k, v, *options):
            wrong[backend.name] = reason
        else:
            for name, reason in wrong.items():
                self_test.warn_once(name, where, reason, backend.name)
            _tell(backend, block, where, backward=backward)
            return backend
    said = "; ".join(f"{name} {why}" for name, why in (unable | wrong).items())
    otherwise = _OTHERWISE[setting] if wrong or setting != "auto" else "change what both lack"
    raise RefusedError(f"attention_kernel is {setting!r}, but for {where}: {said}; {otherwise}")


_NO_DLSE = "takes no gradient of the log-sum-exp (return_lse)"
_OTHERWISE = {
    "auto": "report this with the output of: ringtile doctor",
    "ringtile": "set attention_kernel to auto or aten",
    "aten": "set attention_kernel to auto or ringtile",
}


def _in_order(setting: str, block: Block, backward: bool) -> tuple[Backend, ...]:
    """Return the backends that may be used, the one to be asked first in front."""
    others = ATEN[block.q.device.type]
    if setting != "auto":
        return (RINGTILE,) if setting == "ringtile" else others
    faster: tuple[Backend, ...] = ()
    if why_slow(block, backward=backward) and not torch.are_deterministic_algorithms_enabled():
        # The last one for a GPU is torch's flash attention, which has kernels of sm_80 too.
        faster = others[:-1] if block.q.is_cuda else others
    return *faster, RINGTILE, *(each for each in others if each not in faster)


def _tell(backend: Backend, block: Block, where: str, *, backward: bool) -> None:
    """Say who computes, and why ringtile's kernels are slow, where they are: a slow run looks like any other."""
    direction = "backward" if backward else "forward"
    _say_once(logging.INFO, f"attention {direction} of {where} is computed by {backend.name}")
    if backend is RINGTILE and (reason := why_slow(block, backward=backward) or misaligned(block)):
        _say_once(logging.WARNING, f"attention by ringtile's kernels is slow here: {reason}")


@functools.cache
def _say_once(level: int, text: str) -> None:
    logging.getLogger(__name__).log(level, text)
