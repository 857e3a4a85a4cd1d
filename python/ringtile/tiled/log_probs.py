"""Log-probabilities and entropies of a language model's tokens: the tiled loss, token by token.

The log-probability of a token is minus its cross entropy, so forward and backward are those of `loss.py`. The entropy
is computed from the same tile of logits (vocab_parallel.py).

Shape letters: E hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ringtile import arguments
from ringtile.errors import InputError
from ringtile.tiled.loss import LossCall, tiled_outputs
from ringtile.tiled.vocab_parallel import group_of
from ringtile.transport.groups import Group, transport_of


@torch.compiler.disable  # type: ignore[untyped-decorator]
def tiled_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    tile_tokens: int | None = None,
    group: Group | None = None,
    return_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> Any:
    """Return log_softmax(x / temperature)[label] of each token; only the logits of one tile exist at a time.

    hidden (..., E), weight (V, E), bias (V), labels int64 (...), logit_scale, softcap, ignore_index, tile_tokens and
    group are those of `tiled_linear_cross_entropy`; x is its logits, scaled and capped. Returns log_probs (...) in
    float32 (float64 for float64 hidden). With return_entropy, returns (log_probs, entropy): the entropy (...) of
    softmax(x / temperature), in nats. Tokens labeled ignore_index have log-probability, entropy and gradient 0, and
    their logits are not computed. Differentiable once, with respect to hidden, weight and bias, by both results.

    log_probs are the same bits with gradients and without, and with entropies and without. So exp(new - old) is exactly
    1 for weights that have not changed, if both calls have the same tokens, labels and tiles; or, of one row, where no
    tile has tokens of two chunks of chunk_tokens tokens, the same chunks.

    InputError: a temperature that is not above 0. Raises what `tiled_linear_cross_entropy` raises.
    """
    group = group_of(weight, group)
    with transport_of(group).propagate_errors("the tiled loss"):
        temperature = arguments.check_number("temperature", temperature)
        if not 0.0 < temperature < math.inf:
            raise InputError(f"temperature is {temperature}, expected a number above 0")
        logit_scale = arguments.check_number("logit_scale", logit_scale) / temperature
        # c tanh(x / c) / temperature = C tanh((x / temperature) / C) with C = c / temperature
        softcap = arguments.check_number("softcap", softcap) / temperature
    call = LossCall(hidden, weight, labels, bias, "none", ignore_index, logit_scale=logit_scale, softcap=softcap)
    call = call._replace(tile_tokens=tile_tokens, group=group, chunk_tokens=chunk_tokens, entropy=return_entropy)
    outputs = tiled_outputs(call)
    if not return_entropy:
        return -outputs
    loss, entropy = outputs.unbind(-1)
    return -loss, entropy
