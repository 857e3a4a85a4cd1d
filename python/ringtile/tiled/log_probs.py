"""Log-probabilities and entropies of a language model's tokens: the tiled loss, token by token.

The log-probability of a token is minus its cross entropy, so forward and backward are those of `loss.py`. The entropy
is computed from the same tile of logits, in torch operations, a few thousand classes at a time.

Shape letters: T tokens, t tokens of a tile, E hidden size, V vocabulary, v classes of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ringtile import arguments
from ringtile.errors import InputError
from ringtile.tiled.loss import Job, LossCall, tiled_outputs
from ringtile.tiled.tiles import tiles
from ringtile.tiled.vocab_parallel import CHUNK_COLUMNS, group_of
from ringtile.transport.groups import Group, transport_of

# exp of less is 0 in float64 too; a logit of -inf, times its probability 0, would be nan.
_LEAST = -1e4


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
    kind = _WithEntropy if return_entropy else Job
    outputs = tiled_outputs(kind, call._replace(tile_tokens=tile_tokens, group=group, chunk_tokens=chunk_tokens))
    if not return_entropy:
        return -outputs
    loss, entropy = outputs.unbind(-1)
    return -loss, entropy


class _Sums(NamedTuple):
    """Of the softmax of each token (t, 1), over all classes; x' are its logits, scaled and capped."""

    largest: Tensor  # x'
    total: Tensor  # float64: sum of exp(x' - largest)
    mean: Tensor  # float64: sum of p (largest - x'), p = exp(x' - largest) / total

    @property
    def entropy(self) -> Tensor:
        """Minus sum of p log p. Neither term is negative, so nothing cancels."""
        return self.total.log() + self.mean


class _WithEntropy(Job):
    """The loss and the entropy of each token, (T, 2)."""

    outputs: ClassVar[tuple[int, ...]] = (2,)

    def outputs_of_tile_(self, logits: Tensor, labels: Tensor, factors: Tensor | None, want_grad: bool) -> Tensor:
        sums = self._sums(logits)
        if want_grad:
            assert factors is not None
            self._gradient_(logits, labels, sums, factors[:, :1], factors[:, 1:])
            return factors.new_zeros(labels.numel(), 2)  # a backward wants the gradients alone
        loss = super().outputs_of_tile_(logits, labels, None, False)  # it may cap the logits
        return torch.stack([loss, sums.entropy.squeeze(1).to(loss.dtype)], dim=1)

    def _chunks(self, logits: Tensor, largest: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of the logits (t, v), and their x' - largest."""
        for columns in tiles(logits.size(1), CHUNK_COLUMNS):
            x = logits[:, columns]
            yield x, self._capped(x).sub_(largest).clamp_(min=_LEAST)

    def _capped(self, x: Tensor) -> Tensor:
        softcap = self.options.softcap
        return (x / softcap).tanh_().mul_(softcap) if softcap else x.clone()

    def _sums(self, logits: Tensor) -> _Sums:
        largest = logits.new_full((logits.size(0), 1), -torch.inf)
        for columns in tiles(logits.size(1), CHUNK_COLUMNS):
            if logits.size(1):
                largest = torch.maximum(largest, logits[:, columns].amax(1, keepdim=True))
        largest = self._capped(largest)
        total, below = (torch.zeros_like(largest, dtype=torch.float64) for _ in range(2))
        for _, y in self._chunks(logits, largest):
            weights = y.exp()
            total += weights.sum(1, keepdim=True, dtype=torch.float64)
            below -= y.mul_(weights).sum(1, keepdim=True, dtype=torch.float64)
        if self.vocab_parallel is not None:
            largest, total, below = self.vocab_parallel.merge_softmax(largest, total, below)
        return _Sums(largest, total, below / total)

    def _gradient_(self, logits: Tensor, labels: Tensor, sums: _Sums, of_loss: Tensor, of_entropy: Tensor) -> None:
        """Replaces the logits by the gradient of of_loss * loss + of_entropy * entropy; of_loss, of_entropy (t, 1).

        d loss / d x' = p - [label]. d entropy / d x' = -p (log p + entropy) = -p (y + mean) with y = x' - largest,
        since log p = y - log total and entropy = log total + mean. Then d x' / d x = 1 - (x' / softcap)^2.
        """
        num_tokens, num_classes = logits.shape
        if self.vocab_parallel is None:
            rows, columns = torch.arange(num_tokens, device=labels.device), labels
        else:
            rows, columns = self.vocab_parallel.own(labels, num_classes)
        softcap = self.options.softcap
        of_labels = of_loss[rows, 0]
        if softcap:
            of_labels = of_labels * (1 - (logits[rows, columns] / softcap).tanh_().square_())
        inverse, mean = (1 / sums.total).to(logits.dtype), sums.mean.to(logits.dtype)
        for x, y in self._chunks(logits, sums.largest):
            p = y.exp().mul_(inverse)
            gradient = y.add_(mean).mul_(-of_entropy).add_(of_loss).mul_(p)
            if softcap:
                gradient.mul_(1 - (x / softcap).tanh_().square_())
            x.copy_(gradient)
        logits[rows, columns] -= of_labels
