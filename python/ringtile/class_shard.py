"""Softmax cross entropy over classes that are cut over the ranks of a process group.

Every rank has the logits of its own classes for the same tokens. Per tile one message of three numbers a token
travels, from which every rank finds the log-sum-exp over all classes; the logits stay where they are. This is the
vocabulary-parallel cross entropy of Megatron-LM (arXiv:1909.08053, section 3), in float64 where ranks are merged.

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

from .errors import InputError, RingMismatch

_COLUMNS = 4096  # of logits that are worked on at a time, so that what is kept beside them is small


class Options(NamedTuple):
    label_smoothing: float
    softcap: float
    z_loss: float


@dataclass(frozen=True)
class ClassShard:
    """Classes first_class .. first_class + v of num_classes are this rank's."""

    group: dist.ProcessGroup
    first_class: int
    num_classes: int  # V
    largest: int  # the largest v of any rank

    @classmethod
    def agree(
        cls, group: dist.ProcessGroup, num_own: int, facts: Mapping[str, float], device: torch.device
    ) -> ClassShard:
        """Ranks hold classes in the order of their ranks. RingMismatch: facts, the same by contract, differ."""
        gathered = _gather(torch.tensor([num_own, *facts.values()], dtype=torch.float64, device=device), group).tolist()
        for rank, theirs in enumerate(gathered):
            for name, value, first in zip(facts, theirs[1:], gathered[0][1:], strict=True):
                if value != first:
                    raise RingMismatch(
                        f"class-sharded loss: {name} is {first:g} on rank 0 and {value:g} on rank {rank} of the group; "
                        "expected the same hidden states, labels and options on all ranks, and only the classes cut. "
                        "A weight that FSDP2 has sharded over the data is gathered first: module.unshard()"
                    )
        sizes = [int(theirs[0]) for theirs in gathered]
        return cls(group, sum(sizes[: dist.get_rank(group)]), sum(sizes), max(sizes))

    def sum_(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def cross_entropy_fwd_bwd_(self, logits: Tensor, labels: Tensor, options: Options, want_grad: bool) -> Tensor:
        """The loss of every token (t); the logits (t, v) become its gradient with respect to them if want_grad.

        labels int64 (t) in 0..V-1. The formula is that of `ops.cross_entropy_fwd_bwd_`.
        """
        smoothing, softcap, z_loss = options
        blocks = [logits[:, first : first + _COLUMNS] for first in range(0, logits.size(1), _COLUMNS)]
        if softcap:
            for x in blocks:
                x.div_(softcap).tanh_().mul_(softcap)
        # 1. What the other ranks need: log-sum-exp, the label's logit (0 where it is not), the sum of the logits.
        own = labels - self.first_class
        (rows,) = torch.nonzero((own >= 0) & (own < logits.size(1)), as_tuple=True)
        columns = own[rows]
        label_logits = logits[rows, columns].double()
        mine = logits.new_zeros((3, labels.numel()), dtype=torch.float64)
        mine[0] = _log_sum_exp(blocks, mine[0])
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
        # 2. d loss / d x' = p (1 + 2 z_loss lse) - (1 - smoothing) [label] - smoothing / V, p = exp(x' - lse), where
        # exp(shift - lse) gives back what lse loses when it is rounded; then d x' / d x = 1 - (x' / softcap)^2.
        shift = lse.to(logits.dtype)
        scale = (torch.exp(shift.double() - lse) * (1 + 2 * z_loss * lse)).to(logits.dtype)[:, None]
        for x in blocks:
            slope = 1 - (x / softcap) ** 2 if softcap else 1.0
            x.sub_(shift[:, None]).exp_().mul_(scale).sub_(smoothing / self.num_classes).mul_(slope)
        slope_of_label = 1 - (label_logits / softcap) ** 2 if softcap else torch.ones_like(label_logits)
        logits[rows, columns] -= ((1 - smoothing) * slope_of_label).to(logits.dtype)
        return loss.to(logits.dtype)


def _log_sum_exp(blocks: list[Tensor], like: Tensor) -> Tensor:
    """Over the columns of all blocks, in float64; -inf where there is none."""
    parts: list[Tensor] = [torch.full_like(like, -torch.inf)]
    for x in blocks:
        largest = x.amax(-1)
        shift = torch.where(largest == -torch.inf, 0.0, largest)
        parts.append(shift.double() + (x - shift[:, None]).exp_().sum(-1, dtype=torch.float64).log())
    return torch.stack(parts).logsumexp(0)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(W, *x.shape): x of every rank."""
    out = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather(list(out.unbind()), x, group=group)
    return out


def local_classes(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, dist.ProcessGroup | None]:
    """weight, bias and the group that they are cut over, of DTensors; of plain tensors, these and None.

    InputError: DTensors that are not cut along their classes over one mesh dimension.
    """
    tensor = sys.modules.get("torch.distributed.tensor")  # where there is a DTensor, it has been imported
    if tensor is None or not isinstance(weight, tensor.DTensor):
        return weight, bias, None
    expected = (tensor.Shard(0),)
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None and (not isinstance(x, tensor.DTensor) or x.placements != expected):
            raise InputError(
                f"{name} is {'replicated' if not isinstance(x, tensor.DTensor) else x.placements}, expected a DTensor "
                f"cut along its classes, {expected}, on a mesh of one dimension"
            )
        if x is not None and x.device_mesh != weight.device_mesh:
            raise InputError(f"{name} is on {x.device_mesh} and the weight on {weight.device_mesh}; expected one mesh")
    group: dist.ProcessGroup = weight.device_mesh.get_group()
    return weight.to_local(), None if bias is None else bias.to_local(), group  # type: ignore[attr-defined]
