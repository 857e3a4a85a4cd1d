"""Vocabulary-parallel cross entropy: each rank of a process group holds a shard of the classes.

All ranks hold the same tokens, each with the logits of its own classes. For each tile the ranks exchange three numbers
per token, from which each computes the log-sum-exp over all classes; logits never travel. This is the
vocabulary-parallel cross entropy of Megatron-LM (arXiv:1909.08053, section 3), with ranks merged in float64.

Shape letters: t tokens of a tile, V classes of all ranks, v classes of this rank, W ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringtile.errors import InputError, RingMismatch

_CHUNK_COLUMNS = 4096  # logits are processed in chunks of this many classes, to keep temporaries small


class LossOptions(NamedTuple):
    """Options of the loss that apply after the logits are scaled."""

    label_smoothing: float
    softcap: float
    z_loss: float


@dataclass(frozen=True)
class VocabParallel:
    """This rank holds the classes first_class .. first_class + v of num_classes."""

    group: dist.ProcessGroup
    first_class: int
    num_classes: int  # V
    max_local_classes: int  # the largest v of any rank

    @classmethod
    def agree(
        cls, group: dist.ProcessGroup, num_local_classes: int, facts: Mapping[str, float], device: torch.device
    ) -> VocabParallel:
        """Exchanges the shard sizes; classes are numbered in rank order.

        facts: numbers that must be equal on all ranks, by name. RingMismatch: they differ.
        """
        mine = torch.tensor([num_local_classes, *facts.values()], dtype=torch.float64, device=device)
        gathered = _gather(mine, group).tolist()
        for rank, theirs in enumerate(gathered):
            for name, value, first in zip(facts, theirs[1:], gathered[0][1:], strict=True):
                if value != first:
                    raise RingMismatch(
                        f"vocabulary-parallel loss: {name} is {first:g} on rank 0 and {value:g} on rank {rank} of the "
                        "group; expected the same hidden states, labels and options on all ranks, and on each its own "
                        "shard of the classes. If FSDP2 has sharded the weight over data-parallel ranks, gather it "
                        "first: module.unshard()"
                    )
        sizes = [int(theirs[0]) for theirs in gathered]
        return cls(group, sum(sizes[: dist.get_rank(group)]), sum(sizes), max(sizes))

    def sum_(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def cross_entropy_fwd_bwd_(self, logits: Tensor, labels: Tensor, options: LossOptions, want_grad: bool) -> Tensor:
        """The loss of each token (t). If want_grad, the logits (t, v) are replaced by their gradient.

        labels int64 (t) in 0..V-1. Same formula as `ops.cross_entropy_fwd_bwd_`.
        """
        smoothing, softcap, z_loss = options
        chunks = [logits[:, first : first + _CHUNK_COLUMNS] for first in range(0, logits.size(1), _CHUNK_COLUMNS)]
        if softcap:
            for x in chunks:
                x.div_(softcap).tanh_().mul_(softcap)
        # 1. Exchange, per token: log-sum-exp, the label's logit (0 unless the label is ours), the sum of the logits.
        own = labels - self.first_class
        (rows,) = torch.nonzero((own >= 0) & (own < logits.size(1)), as_tuple=True)
        columns = own[rows]
        label_logits = logits[rows, columns].double()
        mine = logits.new_zeros((3, labels.numel()), dtype=torch.float64)
        mine[0] = _log_sum_exp(chunks, mine[0])
        mine[1, rows] = label_logits
        if smoothing:
            mine[2] = logits.sum(-1, dtype=torch.float64)
        gathered = _gather(mine, self.group)
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


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x of all ranks, (W, *x.shape)."""
    out = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather(list(out.unbind()), x, group=group)
    return out


def local_vocab_shard(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, dist.ProcessGroup | None]:
    """This rank's shard of weight and bias, and the group they are sharded over; for plain tensors themselves and None.

    InputError: a DTensor that is not sharded along its classes over a one-dimensional mesh.
    """
    tensor = sys.modules.get("torch.distributed.tensor")  # a DTensor can only exist if this has been imported
    if tensor is None or not isinstance(weight, tensor.DTensor):
        return weight, bias, None
    expected = (tensor.Shard(0),)
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and (not isinstance(x, tensor.DTensor) or x.placements != expected):
            raise InputError(
                f"{name} is {'replicated' if not isinstance(x, tensor.DTensor) else x.placements}, expected a DTensor "
                f"sharded along its classes, {expected}, on a one-dimensional mesh"
            )
        if x is not None and x.device_mesh != weight.device_mesh:
            raise InputError(f"{name} is on {x.device_mesh} and the weight on {weight.device_mesh}; expected one mesh")
    group: dist.ProcessGroup = weight.device_mesh.get_group()
    return weight.to_local(), None if bias is None else bias.to_local(), group  # type: ignore[attr-defined]
