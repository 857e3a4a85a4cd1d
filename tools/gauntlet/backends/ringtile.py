"""ringtile's own attention, in each of its schemes of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import ringtile
from ringtile.sequence.layout import PADDED_LIKE
from ringtile.sequence.mask import IntervalMask

from tools.gauntlet.attention_cases import AttentionCase, Inputs, Outputs
from tools.gauntlet.backends import Backend, sharded

if TYPE_CHECKING:
    from transformers import Trainer

    from tools.gauntlet.training_cases import TrainingCase


def _attend(scheme: str, layout: str, case: AttentionCase, inputs: Inputs) -> Outputs:
    import torch.distributed as dist
    from torch.nn import functional

    multiple = ringtile.Layout.multiple(PADDED_LIKE.get(layout, layout), dist.get_world_size())
    padding = -case.seq_len % multiple
    mask = _mask(case).padded(padding)
    placed = ringtile.Layout.of_mask(layout, mask, dist.get_world_size())
    sequence = ringtile.ShardedSequence(mask, placed, dist.group.WORLD, scheme=scheme)
    sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_()
    return sharded(
        inputs,
        lambda q, k, v: ringtile.ring_attention(q, k, v, sequence, scale=case.scale, softcap=case.softcap, sinks=sinks),
        shard=lambda x: sequence.shard(functional.pad(x, (0, 0, 0, 0, 0, padding)), dim=1),
        unshard=lambda x: sequence.unshard(x, dim=1)[:, : case.seq_len],
        sinks=sinks,
    )


def _mask(case: AttentionCase) -> IntervalMask:
    """By ringtile's own names where it has one."""
    if len(case.documents) == 1 and case.causal:
        mask = IntervalMask.documents(list(case.documents[0]))
    elif case.is_plain:
        mask = IntervalMask.causal(case.seq_len) if case.causal else IntervalMask.full(case.seq_len)
    else:
        mask = IntervalMask.from_bool(case.attends())
    if case.window is not None:
        mask = mask & IntervalMask.sliding_window(case.seq_len, case.window)
    return mask


def _trainer(case: TrainingCase, make: Callable[..., Trainer]) -> Trainer:
    import torch.distributed as dist

    trainer = make()
    # The check of the first batch is left out, which would refuse what this is to find.
    config = {"first_batch_check": False, "context_parallel_size": dist.get_world_size(), **case.ringtile}
    ringtile.enable(trainer, config)
    return trainer


_SETUP = "attention over a ShardedSequence, scheme {}, layout {}"
BACKENDS = [
    Backend(
        name=name,
        package="ringtile",
        install="pip install ringtile",
        attend=functools.partial(_attend, scheme, layout),
        setup=_SETUP.format(scheme, layout),
        trainer=_trainer if name == "ringtile" else None,
    )
    for name, scheme, layout in (("ringtile", "ring", "zigzag"), ("ringtile-ulysses", "ulysses", "contiguous"))
]
