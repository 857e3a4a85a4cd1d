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

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl

from ringtile import ops, self_test
from ringtile.attn.backend import ATEN, Backend, Block, Final, Gradients, Ringtile, Running, misaligned, why_slow
from ringtile.attn.call import Call, unwritten_keys
from ringtile.attn.self_test import mark_wrong, why_wrong
from ringtile.errors import InputError, RefusedError
from ringtile.sequence.plan import Round

RINGTILE: Backend = Ringtile()


def forward(call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor, state: Running) -> None:
    """Merge the keys of a round into the state."""
    block = Block(q, k, v, round, call.options)
    key = round, False, False, current_flash_attention_impl(), torch.are_deterministic_algorithms_enabled()
    while (backend := call.backends.get(key) or _find(call, block, *key)) is not RINGTILE:
        kept = () if state.fresh else (state.out, state.lse)
        versions = _versions(kept)
        try:
            backend.forward(block, state)
        except Exception as error:
            _drop(call, backend, block, error, unless=kept and (not versions or versions != _versions(kept)))
        else:
            return
    backend.forward(block, state)


def backward(call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor, final: Final, grads: Gradients) -> None:
    """Add the gradients of a round."""
    block, takes_dlse = Block(q, k, v, round, call.options), final.dlse is not None
    key = round, True, takes_dlse, current_flash_attention_impl(), torch.are_deterministic_algorithms_enabled()
    while (backend := call.backends.get(key) or _find(call, block, *key)) is not RINGTILE:
        kept = grads[:1] if grads.fresh else grads[:3]
        versions = _versions(kept)
        try:
            backend.backward(block, final, grads)
        except Exception as error:
            _drop(call, backend, block, error, unless=not versions or versions != _versions(kept))
        else:
            return
    backend.backward(block, final, grads)


def _versions(tensors: tuple[Tensor, ...]) -> list[int] | None:
    """Return how often these were written to; None: nobody counts."""
    return None if any(x.is_inference() for x in tensors) else [x._version for x in tensors]


def _drop(call: Call, backend: Backend, block: Block, error: Exception, *, unless: object) -> None:
    """Use a library's kernel that raised no more; raise the error where what it adds to has changed, or for memory."""
    if isinstance(error, torch.OutOfMemoryError) or unless:
        raise error
    mark_wrong(backend, block.q, block.k, block.v, self_test.error_of(error))
    call.backends.clear()


def check(call: Call, q: Tensor, *, takes_dlse: bool, backward: bool) -> None:
    """Raise RefusedError where no backend that may be used computes some round; before anything is sent.

    q: of the call's dtype and device, which alone are read.
    """
    kind = backward, takes_dlse, current_flash_attention_impl(), torch.are_deterministic_algorithms_enabled()
    if (call.rounds[-1], *kind) in call.backends or q.is_meta:  # the last is asked last
        return
    _, num_heads, num_kv_heads, head_dim, v_head_dim, *_ = call.shape
    if max(head_dim, v_head_dim) > ops.MAX_HEAD_DIM:  # of a traced call, whose tensors nobody has checked
        raise InputError(f"the head dims are {head_dim} and {v_head_dim}; expected 1..{ops.MAX_HEAD_DIM}")
    if (heads := call.plan.heads) is not None:
        share = call.shares[heads.place]
        num_heads, num_kv_heads = len(share.heads), len(share.kv_of_heads or share.kv_heads)
    k, v = unwritten_keys(q, 1, v_head_dim)
    q = q.new_empty((1, 1, 1 if num_heads == num_kv_heads else 2, head_dim))  # others run where each has a kv head
    for round in call.rounds if num_heads else ():
        block = Block(q, k, v, round, call.options)
        if (round, *kind) not in call.backends:
            _find(call, block, round, *kind)


# ---- who does it --------------------------------------------------------------------------------


def _find(call: Call, block: Block, round: Round, backward: bool, takes_dlse: bool, *told: object) -> Backend:
    """Return who computes this block, and remember it by what decides that. told: by the user to torch.

    RefusedError: nobody can.
    """
    backend = _choose(block, call.options.attention_kernel, takes_dlse=takes_dlse, backward=backward)
    if not _captures(block.q):
        call.backends[round, backward, takes_dlse, *told] = backend
    return backend


def _captures(q: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, in which nothing is tested or remembered."""
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def _choose(block: Block, setting: str, *, takes_dlse: bool, backward: bool) -> Backend:
    """Return the first backend that supports this block. Raise RefusedError listing why each one does not."""
    q, k, v = block.q, block.k, block.v
    if q.is_meta:
        return RINGTILE
    unable: dict[str, str] = {}
    wrong: dict[str, str] = {}
    where = f"{q.dtype} with head dims {q.size(3)} and {v.size(3)} on {q.device}"
    for backend in _in_order(setting, block, backward):
        is_own = backend is RINGTILE
        options = (block.options.dropout is not None, bool(block.round.key_bounds)) if is_own else ()
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
