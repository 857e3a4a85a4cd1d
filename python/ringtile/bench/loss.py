"""`ringtile bench loss`: the output projection and the cross entropy, by ringtile's tiles and by what else there is.

Shape letters: T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringtile.bench.compare import Candidate, gradient_candidate, gradient_of, measure_each
from ringtile.bench.measure import PASSES
from ringtile.bench.points import DTYPES, Entry, Work, check_sizes
from ringtile.tiled_loss import tiled_linear_cross_entropy

CASES = ("full", "half-ignored")
EXACT_TOKENS = 512  # at a time
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Point:
    """A loss at one size. case: every token has a label, or the first half of them, a prompt, is ignored."""

    case: str
    dtype: str
    seq_len: int
    hidden_size: int
    vocab_size: int
    num_tiles: int
    world_size: int = 1

    @property
    def tile_tokens(self) -> int:
        return -(-self.seq_len // self.num_tiles)


class Inputs(NamedTuple):
    """hidden (T, E) and weight (V, E), which gradients are asked for; labels int64 (T), IGNORE_INDEX for none."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor


Loss = Callable[[Inputs], Tensor]  # the mean over the labels that are not ignored


def make_inputs(point: Point) -> Inputs:
    """Random numbers, the same at every call; logits are about 1."""
    dtype, generator = DTYPES[point.dtype], torch.Generator().manual_seed(0)
    hidden = torch.randn(point.seq_len, point.hidden_size, generator=generator).to(dtype)
    weight = (torch.randn(point.vocab_size, point.hidden_size, generator=generator) * point.hidden_size**-0.5).to(dtype)
    labels = torch.randint(point.vocab_size, (point.seq_len,), generator=generator)
    if point.case == "half-ignored":
        labels[: point.seq_len // 2] = IGNORE_INDEX
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), labels)


def exact_results(inputs: Inputs) -> tuple[Tensor, ...]:
    """The loss and the gradients of hidden and weight in float64; a few tokens at a time, so that they fit."""
    hidden, weight = (x.detach().double().requires_grad_() for x in inputs[:2])
    loss = torch.zeros((), dtype=torch.float64)
    for rows, labels in zip(torch.split(hidden, EXACT_TOKENS), torch.split(inputs.labels, EXACT_TOKENS), strict=True):
        part = sum_of(rows, weight, labels) / num_labels(inputs)
        torch.autograd.backward(part)
        loss += part.detach()
    return loss, gradient_of(hidden), gradient_of(weight)


def sum_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As transformers computes it: the logits in the model's dtype, then at least float32."""
    logits = nn.functional.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)


def num_labels(inputs: Inputs) -> int:
    return int(inputs.labels.ne(IGNORE_INDEX).sum())


# ---- providers ----------------------------------------------------------------------------------


def ringtile_loss(point: Point) -> Loss:
    return lambda inputs: tiled_linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.labels, tile_tokens=point.tile_tokens
    )


def plain_loss(point: Point) -> Loss:
    return lambda inputs: sum_of(*inputs) / num_labels(inputs)


def checkpoint_loss(point: Point) -> Loss:
    """A torch.utils.checkpoint for every tile."""

    def loss(inputs: Inputs) -> Tensor:
        parts = [
            checkpoint(sum_of, hidden, inputs.weight, labels, use_reentrant=False)
            for hidden, labels in zip(
                torch.split(inputs.hidden, point.tile_tokens),
                torch.split(inputs.labels, point.tile_tokens),
                strict=True,
            )
        ]
        return torch.stack(parts).sum() / num_labels(inputs)

    return loss


def torch_loss(point: Point, same_tiles: bool) -> Loss:
    """torch's chunked linear_cross_entropy (2.13); same_tiles: in our tiles, otherwise in chunks of its choice."""
    chunked, options_of = (
        getattr(owner, name, None)
        for owner, name in ((nn.functional, "linear_cross_entropy"), (nn, "LinearCrossEntropyOptions"))
    )
    if chunked is None or options_of is None:
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
    options: Any = options_of(batch_chunk_size=point.tile_tokens, chunking_method=None) if same_tiles else options_of()

    def loss(inputs: Inputs) -> Tensor:
        mean: Tensor = chunked(inputs.hidden, inputs.weight, inputs.labels, ignore_index=IGNORE_INDEX, options=options)
        return mean

    return loss


def deepspeed_loss(point: Point) -> Loss:
    """DeepSpeed's TiledFusedLogitsLoss over sums that are divided inside: it does not scale the weight's gradient."""
    tiled = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledFusedLogitsLoss

    def loss(inputs: Inputs) -> Tensor:
        count = num_labels(inputs)

        def part(weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
            return sum_of(hidden, weight, labels) / count

        total: Tensor = tiled.apply(
            part, inputs.weight, inputs.hidden[None], inputs.labels[None], None, point.num_tiles, [inputs.weight], "sum"
        )
        return total

    return loss


def liger_loss(point: Point) -> Loss:
    """Liger's fused linear cross entropy: Triton kernels, which need a GPU."""
    fused = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE_INDEX
    )

    def loss(inputs: Inputs) -> Tensor:
        mean: Tensor = fused(inputs.weight, inputs.hidden, inputs.labels)
        return mean

    return loss


PROVIDERS: dict[str, Callable[[Point], Loss]] = {
    "ringtile": ringtile_loss,
    "plain": plain_loss,
    "checkpoint": checkpoint_loss,
    "torch": partial(torch_loss, same_tiles=False),
    "torch_tiles": partial(torch_loss, same_tiles=True),
    "deepspeed": deepspeed_loss,
    "liger": liger_loss,
}


def make_candidate(name: str, point: Point, inputs: Inputs) -> Candidate:
    return gradient_candidate(partial(PROVIDERS[name](point), inputs), torch.ones(()), inputs[:2])


# ---- what is measured ---------------------------------------------------------------------------


measure = partial(measure_each, "loss")


def work_of(point: Point, inputs: Inputs) -> Work:
    """A product forward and two backward of 2 T*E*V flops each, T the labels that count; every tensor once."""
    product = 2 * num_labels(inputs) * point.hidden_size * point.vocab_size
    element = DTYPES[point.dtype].itemsize
    hidden, weight = point.seq_len * point.hidden_size * element, point.vocab_size * point.hidden_size * element
    labels = point.seq_len * 8
    num_bytes = (hidden + weight + labels, 2 * hidden + 2 * weight + labels)
    return Work(
        point,
        dict(zip(PASSES, (product, 2 * product, 3 * product), strict=True)),
        dict(zip(PASSES, (*num_bytes, sum(num_bytes)), strict=True)),
    )


def smaller(point: Point) -> Point:
    """What a process warms up with."""
    return replace(point, seq_len=2 * point.num_tiles, vocab_size=min(point.vocab_size, 64))


MEMORY = True  # measured without being asked to
GRID: dict[str, tuple[str, ...] | tuple[int, ...]] = {
    "case": ("full",),
    "dtype": ("float32", "bfloat16"),
    "seq_len": (4096,),
    "hidden_size": (1024,),
    "vocab_size": (32000,),
    "num_tiles": (8,),
}


check = partial(check_sizes, CASES)


def quick_entries() -> Iterator[Entry]:
    """What docs/performance.md quotes."""
    for dtype in ("float32", "bfloat16"):
        yield Entry(Point("full", dtype, 1024, 1024, 32000, 2), tuple(PROVIDERS), memory=True)
    yield Entry(Point("half-ignored", "float32", 1024, 1024, 32000, 2), ("ringtile", "plain", "torch"), memory=True)
