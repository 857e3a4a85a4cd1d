"""Latents: what keys and values follow from, token by token, and what travels in their place.

Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) makes the keys and values of all heads from one short vector
a token. A rank sends those, and a rank that receives them makes the keys and values itself, in both passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ringtile import arguments
from ringtile.errors import InputError
from ringtile.tiled.replay import Again, Replay
from ringtile.tiled.weight_grad import round_grad_sums

tried: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that have expanded latents


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

    def again(self, weights: Sequence[Tensor]) -> ExpandAgain:
        """Return the arguments of a backward, with the weights as they were saved."""
        return ExpandAgain(self._replay, weights)


class ExpandAgain(Again):
    """Makes the keys and values of blocks again."""

    def __init__(self, replay: Replay, weights: Sequence[Tensor]) -> None:
        super().__init__(replay, weights)
        self._weights = weights

    def __call__(self, k: Tensor, v: Tensor) -> Any:
        with self.running():
            return super().__call__(k, v)

    def weight_gradients(self) -> list[Tensor | None]:
        return round_grad_sums(self.grads, self._weights)
