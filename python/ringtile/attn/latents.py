"""Latents: what keys and values follow from, token by token, and what travels in their place.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) makes the keys and values of all heads from one short vector
a token. A rank sends those, and a rank that receives them makes the keys and values itself, in both passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringtile import arguments, derivatives, ops
from ringtile.attn import choose, ring
from ringtile.attn.backend import Final, Gradients, Running
from ringtile.attn.call import Call, Options, check, check_tensors, unwritten_keys
from ringtile.errors import InputError
from ringtile.sequence.plan import Round, Shape
from ringtile.sequence.sharded import ShardedSequence
from ringtile.tiled.replay import Recomputation, Replay
from ringtile.tiled.weight_grad import round_grad_sums

_tried: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that have expanded latents


class Latents:
    """What makes keys and values of latents: the `expand` of a call of `ringtile.ring_attention`.

    module(k, v) gets latents (B, n, g, d) and (B, n, g, dv) of any n tokens and returns k (B, n, G, D) and v (B, n, G,
    Dv), with G num_kv_heads and Dv v_head_dim: of each token alone, without random numbers. It runs once for each
    block, and again in the backward, which sums the gradients of its parameters over the blocks in float32 (float64 for
    float64 ones). forward: called as forward(module, k, v), if the module's own is another one.

    Autocast, and which parameters are trained, are as they were when it was made.

    InputError: module is none, a number is no whole number, or a parameter was freed.
    """

    def __init__(
        self, module: nn.Module, num_kv_heads: int, v_head_dim: int, *, forward: Callable[..., Any] | None = None
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InputError(f"module is a {type(module).__name__}; expected a torch.nn.Module: wrap a function in one")
        self.num_kv_heads = arguments.check_int("num_kv_heads", num_kv_heads)
        self.v_head_dim = arguments.check_int("v_head_dim", v_head_dim)
        for name, parameter in module.named_parameters():
            arguments.check_storage(name, parameter)
        self.module = module
        self._replay = Replay(module, forward or type(module).forward, next(module.parameters()))
        self.weights = self._replay.weights

    def __call__(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys: tuple[Tensor, Tensor] = self._replay.call(k, v)
        return keys

    def again(self, weights: Sequence[Tensor]) -> RecomputedLatents:
        """Return the arguments of a backward, with the weights as they were saved."""
        return RecomputedLatents(self._replay, weights)

    def shape_of(self, q: Tensor, k: Tensor, v: Tensor) -> Shape:
        """Return the shape of a call on latents k (B, N, g, d) and v (B, N, g, dv). InputError: they are none."""
        is_like = k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and k.dtype == v.dtype in ops.FLOAT_DTYPES
        if not is_like or k.size(0) != q.size(0) or k.stride(-1) != 1 or v.stride(-1) != 1:
            raise InputError(
                f"the latents k and v are {k.dtype} {tuple(k.shape)} and {v.dtype} {tuple(v.shape)}; expected (batch, "
                f"tokens, heads, d) and (batch, tokens, heads, dv) of one floating dtype and {q.size(0)} rows, with "
                f"stride 1 in the last dim"
            )
        arguments.check_devices("q", q, k=k, v=v)
        shape = Shape.of(q, *unwritten_keys(q, self.num_kv_heads, self.v_head_dim))
        numbers = k.size(2) * (k.size(3) + v.size(3))
        is_less = numbers < shape.num_kv_heads * (shape.head_dim + shape.v_head_dim) and k.dtype == shape.dtype
        return shape._replace(latent_dim=numbers if is_less else 0)

    def call(
        self, sequence: ShardedSequence, q: Tensor, k: Tensor, v: Tensor, options: Options
    ) -> tuple[Call, Tensor, Tensor]:
        """Return the call, and k and v, as they travel. Arguments and errors: as of `Call.of`."""
        arguments.check_whole(q=q, k=k, v=v)
        derivatives.check_once("ring_attention", q, k, v)
        k_made, v_made = k, v
        if q.dim() == 4:
            shape = self.shape_of(q, k, v)
            k_one, v_one = unwritten_keys(q, self.num_kv_heads, self.v_head_dim)
            k_made, v_made = k_one.expand(-1, k.size(1), -1, -1), v_one.expand(-1, k.size(1), -1, -1)
        _, options = check(sequence, q, k_made, v_made, options)
        return self.travel(Call.kept(sequence, shape, q.device, options), q, k, v)

    def travel(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Call, Tensor, Tensor]:
        """Return the call, and k and v, as they travel in its scheme: latents in a ring alone, if they are less."""
        if not call.shape.latent_dim or len(call.plan.ranks) == 1 or call.plan.heads is not None:
            keys = _keys_of(self, call, q, k, v)
            return call.but(shape=call.shape._replace(latent_dim=0)), *keys
        if self.module not in _tried:  # before any key is sent
            with torch.no_grad():
                _keys_of(self, call, q[:, :1], k[:, :1], v[:, :1])
            _tried.add(self.module)
        return call.but(blocks=self), k, v

    def forward(self, call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor, state: Running) -> None:
        """Merge the keys that a block of latents makes."""
        choose.forward(call, round, q, *_keys_of(self, call, q, k, v), state)


class RecomputedLatents(Recomputation):
    """Makes the keys and values of blocks again."""

    def __init__(self, replay: Replay, weights: Sequence[Tensor]) -> None:
        super().__init__(replay, weights)
        self._weights = weights

    def __call__(self, k: Tensor, v: Tensor) -> Any:
        with self.running():
            return super().__call__(k, v)

    def backward(
        self, call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor, final: Final, grads: Gradients
    ) -> None:
        """Add a block's part of dq, write the gradients of its latents, and add those of the weights."""
        dq, totals = grads.dq, grads.rounded or grads[1:3]
        of_latents: Sequence[Tensor | None] = None, None
        if k.size(1) > 0:
            k, v = (x.detach().requires_grad_() for x in (k, v))
            keys = _keys_of(self, call, q, k, v)
            fresh = round.num_keys == k.size(1)
            dk, dv = ((ring.empty if fresh else ring.zeros)(x, dtype=dq.dtype) for x in keys)
            rounded = None
            if fresh and dq.dtype != k.dtype:
                rounded = ring.empty(dk, dtype=k.dtype), ring.empty(dv, dtype=k.dtype)
            of_keys = Gradients(dq, dk, dv, fresh=fresh, rounded=rounded)
            choose.backward(call, round, q, keys[0].detach(), keys[1].detach(), final, of_keys)
            of_latents = self.differentiate(keys, rounded or (dk.to(k.dtype), dv.to(k.dtype)), (k, v))
        for total, x in zip(totals, of_latents, strict=True):
            total.zero_() if x is None else total.copy_(x)

    def weight_gradients(self) -> list[Tensor | None]:
        return round_grad_sums(self.grads, self._weights)


def _keys_of(expand: Latents | RecomputedLatents, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values that a block's latents make. InputError: they are others than promised."""
    shape = call.shape._replace(latent_dim=0)
    if (num_tokens := k.size(1)) == 0:  # which modules need not take
        return unwritten_keys(q, shape.num_kv_heads, shape.v_head_dim, 0)
    k, v = expand(k, v)
    if check_tensors(q, k, v, call.options) != shape or k.size(1) != num_tokens:
        raise InputError(
            f"expand made k {tuple(k.shape)} and v {tuple(v.shape)} of {num_tokens} tokens; expected of each "
            f"{shape.num_kv_heads} heads of head dims {shape.head_dim} and {shape.v_head_dim}"
        )
    return k, v
