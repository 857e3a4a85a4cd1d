"""`python -m benchmarks loss`: the output projection and the cross entropy, in ringtile's tiles and by others.

Shape letters: T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from ringtile.tiled.loss import tiled_linear_cross_entropy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.compare import Candidate, gradient_candidate, gradient_of, measure_each
from benchmarks.rows import DTYPES, Comparison, Cost, Grid, check_sizes, forward_backward, generator_on

CASES = ("full", "half-ignored")
EXACT_TOKENS = 512  # the float64 results are computed this many tokens at a time, so that they fit in memory
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Workload:
    """A loss at one size. case: "full", or "half-ignored" if the first half of the tokens, a prompt, has no labels."""

    case: str
    dtype: str
    seq_len: int
    hidden_size: int
    vocab_size: int
    num_tiles: int
    world_size: int = 1
    device: str = "cpu"

    @property
    def tile_tokens(self) -> int:
        return -(-self.seq_len // self.num_tiles)


class Inputs(NamedTuple):
    """hidden (T, E) and weight (V, E), which require gradients; labels int64 (T), IGNORE_INDEX for none."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor


Loss = Callable[[Inputs], Tensor]  # returns the mean over the labels that are not ignored


def make_inputs(workload: Workload) -> Inputs:
    """Random numbers, the same on every call; logits are about 1."""
    dtype, device = DTYPES[workload.dtype], workload.device
    generator = generator_on(device)
    normal = partial(torch.randn, generator=generator, device=device)
    hidden = normal(workload.seq_len, workload.hidden_size)
    weight = normal(workload.vocab_size, workload.hidden_size) * workload.hidden_size**-0.5
    labels = torch.randint(workload.vocab_size, (workload.seq_len,), generator=generator, device=device)
    if workload.case == "half-ignored":
        labels[: workload.seq_len // 2] = IGNORE_INDEX
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    return Inputs(hidden, weight, labels)


def exact_results(workload: Workload, inputs: Inputs) -> tuple[Tensor, ...]:
    """The loss and the gradients of hidden and weight in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in inputs[:2])
    loss = torch.zeros((), dtype=torch.float64, device=workload.device)
    for rows, labels in zip(torch.split(hidden, EXACT_TOKENS), torch.split(inputs.labels, EXACT_TOKENS), strict=True):
        share = sum_of(rows, weight, labels) / num_labels(inputs)
        torch.autograd.backward(share)
        loss += share.detach()
    return loss, gradient_of(hidden), gradient_of(weight)


def sum_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses as transformers computes them: logits in the model's dtype, then in at least float32."""
    logits = nn.functional.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)


def num_labels(inputs: Inputs) -> int:
    return int(inputs.labels.ne(IGNORE_INDEX).sum())


# ---- backends ----------------------------------------------------------------------------------


def ringtile_loss(workload: Workload) -> Loss:
    return lambda inputs: tiled_linear_cross_entropy(
        inputs.hidden, inputs.weight, inputs.labels, tile_tokens=workload.tile_tokens
    )


def plain_loss(workload: Workload) -> Loss:
    return lambda inputs: sum_of(*inputs) / num_labels(inputs)


def checkpoint_loss(workload: Workload) -> Loss:
    """One torch.utils.checkpoint per tile."""

    def loss(inputs: Inputs) -> Tensor:
        parts = [
            checkpoint(sum_of, hidden, inputs.weight, labels, use_reentrant=False)
            for hidden, labels in zip(
                torch.split(inputs.hidden, workload.tile_tokens),
                torch.split(inputs.labels, workload.tile_tokens),
                strict=True,
            )
        ]
        return torch.stack(parts).sum() / num_labels(inputs)

    return loss


def torch_loss(workload: Workload, same_tiles: bool) -> Loss:
    """torch's chunked linear_cross_entropy (2.13). same_tiles: in the workload's tiles instead of chunks it chooses."""
    chunked, options_of = (
        getattr(owner, name, None)
        for owner, name in ((nn.functional, "linear_cross_entropy"), (nn, "LinearCrossEntropyOptions"))
    )
    if chunked is None or options_of is None:
        raise ImportError(f"torch {torch.__version__} has no linear_cross_entropy")
    keywords = {"batch_chunk_size": workload.tile_tokens, "chunking_method": None} if same_tiles else {}
    options: Any = options_of(**keywords)

    def loss(inputs: Inputs) -> Tensor:
        mean: Tensor = chunked(inputs.hidden, inputs.weight, inputs.labels, ignore_index=IGNORE_INDEX, options=options)
        return mean

    return loss


def deepspeed_loss(workload: Workload) -> Loss:
    """DeepSpeed's TiledFusedLogitsLoss. The mean is taken inside, because it does not scale the weight's gradient."""
    tiled = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledFusedLogitsLoss

    def loss(inputs: Inputs) -> Tensor:
        count = num_labels(inputs)

        def tile_loss(weight: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
            return sum_of(hidden, weight, labels) / count

        total: Tensor = tiled.apply(
            tile_loss,
            inputs.weight,
            inputs.hidden[None],
            inputs.labels[None],
            None,
            workload.num_tiles,
            [inputs.weight],
            "sum",
        )
        return total

    return loss


def liger_loss(workload: Workload) -> Loss:
    """Liger's fused linear cross entropy: Triton kernels, which need a GPU."""
    fused = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE_INDEX
    )

    def loss(inputs: Inputs) -> Tensor:
        mean: Tensor = fused(inputs.weight, inputs.hidden, inputs.labels)
        return mean

    return loss


BACKENDS: dict[str, Callable[[Workload], Loss]] = {
    "ringtile": ringtile_loss,
    "plain": plain_loss,
    "checkpoint": checkpoint_loss,
    "torch": partial(torch_loss, same_tiles=False),
    "torch_tiles": partial(torch_loss, same_tiles=True),
    "deepspeed": deepspeed_loss,
    "liger": liger_loss,
}


def make_candidate(name: str, workload: Workload, inputs: Inputs) -> Candidate:
    one = torch.ones((), device=workload.device)
    return gradient_candidate(partial(BACKENDS[name](workload), inputs), one, inputs[:2])


# ---- the workloads ------------------------------------------------------------------------------


measure = partial(measure_each, "loss")


def cost_of(workload: Workload, inputs: Inputs) -> Cost:
    """1 product forward and 2 backward of 2 T*E*V flops each, with T the tokens that have a label.

    Bytes: each input is read once and each output written once.
    """
    product = 2 * num_labels(inputs) * workload.hidden_size * workload.vocab_size
    token = workload.hidden_size * DTYPES[workload.dtype].itemsize  # bytes of one row of hidden or weight
    hidden, weight = workload.seq_len * token, workload.vocab_size * token
    labels = workload.seq_len * 8
    num_bytes = forward_backward(hidden + weight + labels, 2 * hidden + 2 * weight + labels)
    return Cost(workload, forward_backward(product, 2 * product), num_bytes)


def smaller(workload: Workload) -> Workload:
    """A workload that warms a process up."""
    return replace(workload, seq_len=2 * workload.num_tiles, vocab_size=min(workload.vocab_size, 64))


MEMORY = True  # whether memory is measured by default
GRID: Grid = {
    "case": ("full",),
    "dtype": ("float32", "bfloat16"),
    "seq_len": (4096,),
    "hidden_size": (1024,),
    "vocab_size": (32000,),
    "num_tiles": (8,),
    "device": ("cpu",),
}


check = partial(check_sizes, CASES)


def quick_comparisons() -> Iterator[Comparison]:
    """The comparisons quoted in the documentation."""
    for dtype in ("float32", "bfloat16"):
        yield Comparison(Workload("full", dtype, 1024, 1024, 32000, 2), tuple(BACKENDS), memory=True)
    yield Comparison(
        Workload("half-ignored", "float32", 1024, 1024, 32000, 2), ("ringtile", "plain", "torch"), memory=True
    )
    # Of a GPU: the head of an 8B model, in tiles of about 1 GiB of logits.
    yield Comparison(Workload("full", "bfloat16", 16384, 4096, 128256, 8, device="cuda"), tuple(BACKENDS), memory=True)
