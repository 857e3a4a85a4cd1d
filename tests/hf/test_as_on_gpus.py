"""A Trainer on CPU ranks as it runs on GPUs: the backward in a thread of its own, groups that carry no CPU tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from hf_training import Run, packed, train
from pool import run_ranks
from ringtile.transport import groups
from ringtile.transport.groups import ProcessGroupTransport
from test_ring_nccl import AsOverNccl

KEYS = {"context_parallel_size": 2, "tiled_mlp": True, "tiled_norm": True, "tiled_loss": True, "tile_tokens": 16}
CHECKPOINTS = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


@contextlib.contextmanager
def in_another_thread() -> Iterator[list[object]]:
    """Autograd runs the nodes of CUDA tensors, and a checkpoint's forward among them, in a thread of the device."""
    backward, calls = Accelerator.backward, []
    with ThreadPoolExecutor(1) as thread:

        def submit(*args: Any, **kwargs: Any) -> None:
            calls.append(thread.submit(backward, *args, **kwargs).result())

        with patch.object(Accelerator, "backward", submit):
            yield calls


class OverNccl(AsOverNccl):
    """As a group whose backend carries no CPU tensors; what is said before any tensor waits in the store too."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._carries = set()

    def agree(self, op: str, fields: Any, device: Any = None, **options: int) -> Any:
        return ProcessGroupTransport.agree(self, op, fields, None if device is None else "cuda", **options)


@contextlib.contextmanager
def over_nccl_alone() -> Iterator[list[object]]:
    """What ranks agree on travels through the store, payloads in batches, and the host runs ahead."""
    made: list[object] = []

    def make(group: Any) -> OverNccl:
        made.append(OverNccl(group))
        return made[-1]  # type: ignore[return-value]

    with (
        patch.object(groups, "ProcessGroupTransport", make),
        patch.object(groups, "_transports", weakref.WeakKeyDictionary()),
    ):
        yield made


def trained() -> Run:
    return train(KEYS | {"first_batch_check": True}, collator=packed, evaluate=False, max_steps=2, **CHECKPOINTS)


def compared(way: str) -> tuple[bool, bool]:
    """Whether something was done in another way, and whether losses, norms and weights have the same bits."""
    plain = trained()
    with {"thread": in_another_thread, "store": over_nccl_alone}[way]() as used:
        other = trained()
    same = (plain.losses, plain.grad_norms) == (other.losses, other.grad_norms)
    same &= all(torch.equal(weight, other.weights[name]) for name, weight in plain.weights.items())
    return bool(used), same


def test_a_backward_in_another_thread_gives_the_same_bits() -> None:
    assert run_ranks(2, compared, "thread") == [(True, True)] * 2


def test_groups_without_cpu_tensors_give_the_same_bits() -> None:
    assert run_ranks(2, compared, "store") == [(True, True)] * 2
