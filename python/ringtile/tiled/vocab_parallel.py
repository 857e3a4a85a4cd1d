"""Vocabulary-parallel cross entropy: each rank of a group holds a shard of the classes.

All ranks hold the same tokens, each with the logits of its own classes. For each tile the ranks exchange three numbers
per token, from which each computes the log-sum-exp over all classes; logits never travel. This is the
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
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.groups import Group
from ringtile.transport.transport import Transport, all_gather

CHUNK_COLUMNS = 4096  # logits are processed in chunks of this many classes, to keep temporaries small


class LossOptions(NamedTuple):
    """Options of the loss that apply after the logits are scaled."""

    label_smoothing: float
    softcap: float
    z_loss: float


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
        """The tokens of a tile whose labels (t) this rank holds, and the columns of these labels in its logits."""
        own = labels - self.first_class
        (rows,) = torch.nonzero((own >= 0) & (own < num_local_classes), as_tuple=True)
        return rows, own[rows]

    def merge_softmax(self, largest: Tensor, total: Tensor, below: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Over all classes: the largest logit x' of each token (t, 1), and in float64 the sum of exp(x' - largest) and
        that of exp(x' - largest) (largest - x'); from those over this rank's classes."""
        mine = torch.stack([largest.double(), total, below])
        of_ranks, totals, belows = all_gather(mine, self.transport, "the numbers of the tokens").unbind(1)
        of_all = of_ranks.amax(0)
        gap = (of_all - of_ranks).clamp_(max=1e4)  # exp(-1e4) is 0; of a rank without classes the gap is inf
        weights = torch.exp(-gap)
        return of_all.to(largest.dtype), (weights * totals).sum(0), (weights * (belows + gap * totals)).sum(0)

    def cross_entropy_fwd_bwd_(self, logits: Tensor, labels: Tensor, options: LossOptions, want_grad: bool) -> Tensor:
        """The loss of each token (t). If want_grad, the logits (t, v) are replaced by their gradient.

        labels int64 (t) in 0..V-1. Same formula as `ops.cross_entropy_fwd_bwd_`.
        """
        smoothing, softcap, z_loss = options
        chunks = [logits[:, first : first + CHUNK_COLUMNS] for first in range(0, logits.size(1), CHUNK_COLUMNS)]
        if softcap:
            for x in chunks:
                x.div_(softcap).tanh_().mul_(softcap)
        # 1. Exchange, per token: log-sum-exp, the label's logit (0 unless the label is ours), the sum of the logits.
        rows, columns = self.own(labels, logits.size(1))
        label_logits = logits[rows, columns].double()
        mine = logits.new_zeros((3, labels.numel()), dtype=torch.float64)
        mine[0] = _log_sum_exp(chunks, mine[0])
        mine[1, rows] = label_logits
        if smoothing:
            mine[2] = logits.sum(-1, dtype=torch.float64)
        gathered = all_gather(mine, self.transport, "the numbers of the tokens")
        lse, (label_logit, total) = gathered[:, 0].logsumexp(0), gathered[:, 1:].sum(0)
        loss: Tensor = (1 - smoothing) * (lse - label_logit) + z_loss * lse**2
        if smoothing:
            loss += smoothing * (lse - total / self.num_classes)
        if not want_grad:
            return loss.to(logits.dtype)
        # 2. d loss / d x' = p (1 + 2 z_loss lse) - (1 - smoothing) [label] - smoothing / V with p = exp(x' - lse), then
        # d x' / d x = 1 - (x' / softcap)^2. shift is lse rounded; the factor exp(shift - lse) undoes the rounding.
        shift = lse.to(logits.dtype)
        scale = (torch.exp(shift.double() - lse) * (1 + 2 * z_loss * lse)).to(logits.dtype)[:, None]
        for x in chunks:
            slope = 1 - (x / softcap) ** 2 if softcap else 1.0
            x.sub_(shift[:, None]).exp_().mul_(scale).sub_(smoothing / self.num_classes).mul_(slope)
        label_slope = 1 - (label_logits / softcap) ** 2 if softcap else torch.ones_like(label_logits)
        logits[rows, columns] -= ((1 - smoothing) * label_slope).to(logits.dtype)
        return loss.to(logits.dtype)


def _log_sum_exp(chunks: list[Tensor], like: Tensor) -> Tensor:
    """Over the columns of all chunks, in float64, shaped like `like`; -inf if there are no columns."""
    parts: list[Tensor] = [torch.full_like(like, -torch.inf)]
    for x in chunks:
        largest = x.amax(-1)
        shift = torch.where(largest == -torch.inf, 0.0, largest)
        parts.append(shift.double() + (x - shift[:, None]).exp_().sum(-1, dtype=torch.float64).log())
    return torch.stack(parts).logsumexp(0)


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


def group_of(weight: Any, group: Group | None) -> Group | None:
    """The group that a call of the loss is over, as far as its unchecked arguments say."""
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
