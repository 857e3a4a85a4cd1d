"""The softmax of each token of a tile, in torch operations: with entropies, or with classes sharded over ranks.

Vocabulary parallel, each rank of a group holds a shard of the classes, and all hold the same tokens. The ranks exchange
five numbers per token, from which each computes the softmax over all classes; logits never travel. This is the
vocabulary-parallel cross entropy of Megatron-LM (arXiv:1909.08053, section 3), with ranks merged in float64.

Shape letters: t tokens of a tile, V classes of all ranks, v classes of this rank, W ranks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile.errors import InputError, RingMismatchError
from ringtile.tiled.tiles import tiles
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.groups import Group
from ringtile.transport.transport import Transport, all_gather

_COLUMNS = 4096  # logits are processed in chunks of this many classes, to keep temporaries small
# exp of less is 0 in float64 too; a logit of -inf, times its probability 0, would be nan.
_LEAST = -1e4


@dataclass(frozen=True)
class VocabParallel:
    """This rank holds the classes first_class .. first_class + v of num_classes."""

    transport: Transport
    first_class: int
    num_classes: int  # V
    max_local_classes: int  # the largest v of any rank

    @classmethod
    def agree(
        cls,
        transport: Transport,
        num_local_classes: int,
        facts: Mapping[str, HeaderValue],
        device: torch.device,
    ) -> VocabParallel:
        """Exchanges the shard sizes; classes are numbered in rank order.

        facts: what must be equal on all ranks, by name. RingMismatchError: it is not.
        """
        with _call(transport, "the tiled loss", facts, device):
            mine = torch.tensor([num_local_classes], device=device)
            sizes = [int(size) for size in all_gather(mine, transport, "the sizes of the shards")]
        return cls(transport, sum(sizes[: transport.rank]), sum(sizes), max(sizes))

    def call(self, direction: str, num_tokens: int, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Around a pass over that many tokens, in which the ranks exchange messages."""
        return _call(self.transport, f"the tiled loss {direction}", {"tokens": num_tokens}, device)

    def sum_(self, x: Tensor) -> Tensor:
        """x (T, ...), summed over the ranks in their order: each sums a part of the rows, and sends it to all."""
        rank, parts = self.transport.rank, x.tensor_split(self.transport.world_size)
        others = {peer: part for peer, part in enumerate(parts) if peer != rank}
        received = {peer: torch.empty_like(parts[rank]) for peer in others}
        self.transport.exchange(others, received, "the gradient of hidden").wait()
        total = received.get(0, parts[rank]).clone()
        for peer in range(1, len(parts)):
            total += received.get(peer, parts[rank])
        parts[rank].copy_(total)
        self.transport.exchange(dict.fromkeys(others, total), others, "the gradient of hidden").wait()
        return x

    def own(self, labels: Tensor, num_local_classes: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a tile whose labels (t) this rank holds, and the columns of these labels in its
        logits."""
        own = labels - self.first_class
        (rows,) = torch.nonzero((own >= 0) & (own < num_local_classes), as_tuple=True)
        return rows, own[rows]

    def gather(self, largest: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the tokens (t) and (k, t), float64, of all ranks: (W, t) and (k, W, t)."""
        gathered = all_gather(torch.cat([largest[None], others]), self.transport, "the numbers of the tokens")
        return gathered[:, 0], gathered[:, 1:].transpose(0, 1)


@contextlib.contextmanager
def _call(transport: Transport, op: str, facts: Mapping[str, HeaderValue], device: torch.device) -> Iterator[None]:
    try:
        with transport.agree(op, facts, device):
            yield
    except RingMismatchError as error:
        raise RingMismatchError(
            f"vocabulary-parallel loss: {error}, labels and options, and on each its own shard of the classes. If "
            f"FSDP2 has sharded the weight over data-parallel ranks, gather it first: module.unshard()"
        ) from None


class LossOptions(NamedTuple):
    """Options of the loss that apply after the logits are scaled."""

    label_smoothing: float
    softcap: float
    z_loss: float


@dataclass(frozen=True)
class Softmax:
    """The softmax of each token, of x', its logits capped. Sums over all classes are float64 (t)."""

    logits: Tensor  # (t, v) x', of this rank
    options: LossOptions
    num_classes: int  # V
    labels: tuple[Tensor, Tensor]  # tokens whose labels are this rank's, and their columns
    largest: Tensor  # (t, 1) x', of the logits' dtype
    total: Tensor  # sum of exp(x' - largest)
    mean: Tensor  # sum of p (largest - x'), p = exp(x' - largest) / total; 0 unless the entropy is asked for
    label_logit: Tensor  # x' of the label
    sum: Tensor  # of x'; 0 unless labels are smoothed

    @classmethod
    def of(
        cls, logits: Tensor, labels: Tensor, options: LossOptions, classes: VocabParallel | None, entropy: bool
    ) -> Softmax:
        """Cap the logits in place, and sum. labels int64 (t) in 0..V-1. classes: of this rank; None: all."""
        num_tokens, num_classes = logits.shape
        largest = logits.new_full((num_tokens, 1), -torch.inf)
        for x in _chunks(logits):
            if options.softcap:
                x.div_(options.softcap).tanh_().mul_(options.softcap)
            if num_classes:
                largest = torch.maximum(largest, x.amax(1, keepdim=True))
        total, below, label_logit, sum_ = mine = logits.new_zeros((4, num_tokens), dtype=torch.float64)
        for x in _chunks(logits):
            if options.label_smoothing:
                sum_ += x.sum(1, dtype=torch.float64)
            y = (x - largest).clamp_(min=_LEAST)
            weights = y.exp() if entropy else y.exp_()
            total += weights.sum(1, dtype=torch.float64)
            if entropy:
                below -= y.mul_(weights).sum(1, dtype=torch.float64)
        if classes is None:
            own = torch.arange(num_tokens, device=labels.device), labels
        else:
            own = classes.own(labels, num_classes)
        label_logit[own[0]] = logits[own].double()
        if classes is not None:
            num_classes = classes.num_classes
            of_ranks, (totals, belows, *sums) = classes.gather(largest.squeeze(1).double(), mine)
            of_all = of_ranks.amax(0)
            gap = (of_all - of_ranks).clamp_(max=-_LEAST)  # of a rank without classes it is inf
            weights = torch.exp(-gap)
            largest = of_all.to(largest.dtype)[:, None]
            total, below = (weights * totals).sum(0), (weights * (belows + gap * totals)).sum(0)
            label_logit, sum_ = (x.sum(0) for x in sums)
        return cls(logits, options, num_classes, own, largest, total, below / total, label_logit, sum_)

    @property
    def _lse(self) -> Tensor:
        return self.largest.squeeze(1).double() + self.total.log()

    @property
    def loss(self) -> Tensor:
        """Same formula as `ops.cross_entropy_fwd_bwd_`."""
        (smoothing, _, z_loss), lse = self.options, self._lse
        loss = (1 - smoothing) * (lse - self.label_logit) + z_loss * lse**2
        if smoothing:
            loss += smoothing * (lse - self.sum / self.num_classes)
        return loss.to(self.logits.dtype)

    @property
    def entropy(self) -> Tensor:
        """Minus sum of p log p. Neither term is negative, so nothing cancels."""
        return (self.total.log() + self.mean).to(self.logits.dtype)

    def gradient_(self, factors: Tensor) -> None:
        """Replaces the logits by the gradient of factors (t) * loss, or of factors (t, 2) * (loss, entropy).

        d loss / d x' = p (1 + 2 z_loss lse) - (1 - smoothing) [label] - smoothing / V.
        d entropy / d x' = -p (log p + entropy) = -p (y + mean) with y = x' - largest, since log p = y - log total and
        entropy = log total + mean. Then d x' / d x = 1 - (x' / softcap)^2.
        """
        (smoothing, softcap, z_loss), dtype = self.options, self.logits.dtype
        of_loss, of_entropy = (factors, None) if factors.dim() == 1 else factors.unbind(1)
        of_labels = (1 - smoothing) * of_loss[self.labels[0]]
        if softcap:
            of_labels = of_labels * (1 - (self.logits[self.labels] / softcap).square_())
        of_p = (1 + 2 * z_loss * self._lse) * of_loss
        of_each = (smoothing / self.num_classes * of_loss)[:, None]
        inverse, of_p, of_exp, mean = (
            number.to(dtype)[:, None] for number in (1 / self.total, of_p, of_p / self.total, self.mean)
        )
        for x in _chunks(self.logits):
            slope = 1 - (x / softcap).square_() if softcap else None
            y = (x - self.largest).clamp_(min=_LEAST)
            if of_entropy is None:
                gradient = y.exp_().mul_(of_exp)
            else:
                p = y.exp().mul_(inverse)
                gradient = y.add_(mean).mul_(-of_entropy[:, None]).add_(of_p).mul_(p)
            if smoothing:
                gradient.sub_(of_each)
            x.copy_(gradient if slope is None else gradient.mul_(slope))
        self.logits[self.labels] -= of_labels.to(dtype)


def _chunks(logits: Tensor) -> Iterator[Tensor]:
    """Views of a few thousand classes each."""
    for columns in tiles(logits.size(1), _COLUMNS):
        yield logits[:, columns]


def group_of(weight: Any, group: Group | None) -> Group | None:
    """Return the group that a call of the loss is over, as far as its unchecked arguments say."""
    tensor = sys.modules.get("torch.distributed.tensor")  # a DTensor can only exist if this has been imported
    if group is None and tensor is not None and isinstance(weight, tensor.DTensor) and weight.device_mesh.ndim == 1:
        mesh_group: Group = weight.device_mesh.get_group()
        return mesh_group
    return group


def local_vocab_shard(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """This rank's shard of weight and bias; plain tensors are shards already.

    InputError: a DTensor that is not sharded along its classes over a one-dimensional mesh.
    """
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None or not isinstance(weight, tensor.DTensor):
        return weight, bias
    expected = (tensor.Shard(0),)
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and (not isinstance(x, tensor.DTensor) or x.placements != expected):
            raise InputError(
                f"{name} is {'replicated' if not isinstance(x, tensor.DTensor) else x.placements}, expected a DTensor "
                f"sharded along its classes, {expected}, on a one-dimensional mesh"
            )
        if x is not None and x.device_mesh != weight.device_mesh:
            raise InputError(f"{name} is on {x.device_mesh} and the weight on {weight.device_mesh}; expected one mesh")
    return weight.to_local(), None if bias is None else bias.to_local()  # type: ignore[attr-defined]
