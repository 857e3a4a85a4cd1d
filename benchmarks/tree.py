"""`python -m benchmarks tree`: a prompt and the completions that share it, as a tree and as rows of their own.

Shape letters: S tokens of the tree, of which half are the prompt, n completions, T tokens of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ringtile
import torch
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from torch import Tensor
from torch.nn import functional

from benchmarks import cases, scan
from benchmarks.attention import bool_mask, sdpa
from benchmarks.compare import Candidate, gradient_candidate, measure_each
from benchmarks.rows import Comparison, Cost, Grid, check_sizes
from benchmarks.scan import Inputs

CASES = ("attention", *scan.CASES)
BACKENDS = ("ringtile", "ringtile_rows", "torch_mask")
_OF_ALL_TOKENS = ("A", "D", "weight")


@dataclass(frozen=True)
class Workload(scan.Workload):
    """case: "attention", or one of `python -m benchmarks scan`."""

    num_completions: int = 8

    @property
    def lengths(self) -> tuple[int, list[int]]:
        """Of the prompt and the completions, which differ by a token at most."""
        half, n = self.seq_len // 2, self.num_completions
        ends = [half + (self.seq_len - half) * i // n for i in range(n + 1)]
        return half, [after - begin for begin, after in itertools.pairwise(ends)]

    @property
    def mask(self) -> IntervalMask:
        return IntervalMask.shared_prefix(*self.lengths)


def make_inputs(workload: Workload) -> Inputs:
    """Random numbers of the tree's tokens, the same on every call."""
    if workload.case != "attention":
        return scan.make_inputs(workload)
    q, k, v, dout = cases.make_inputs(_of_attention(workload))
    return Inputs({"q": q, "k": k, "v": v}, dout)


def _of_attention(workload: Workload) -> cases.Workload:
    heads = workload.num_heads, workload.num_kv_heads
    return cases.Workload("causal", workload.dtype, workload.seq_len, workload.head_dim, *heads, device=workload.device)


def rows_of(workload: Workload, x: Tensor) -> Tensor:
    """(1, S, ...) -> (n, T, ...): the prompt and a completion, padded at the end."""
    prompt, completions = workload.lengths
    parts = torch.split(x[:, prompt:], completions, dim=1)
    rows = [torch.cat([x[:, :prompt], part], dim=1) for part in parts]
    length = prompt + max(completions)
    return torch.cat([functional.pad(row, (*(0, 0) * (x.dim() - 2), 0, length - row.size(1))) for row in rows])


def compute(case: str, tensors: dict[str, Tensor], sequence: ShardedSequence) -> Tensor:
    given: dict[str, Any] = {**tensors, "sequence": sequence}
    if case == "attention":
        out: Tensor = ringtile.ring_attention(**given, attention_kernel="ringtile")
        return out
    if case == "convolution":
        return ringtile.causal_conv1d(**given, activation="silu")
    if case == "selective":
        gate, step = functional.silu(given.pop("z")), functional.softplus(given.pop("dt"))
        return ringtile.selective_scan(**given, dt=step) * gate
    return ringtile.ssd(**given) if case == "ssd" else ringtile.gated_delta_rule(**given)


def make_candidate(name: str, workload: Workload, inputs: Inputs) -> Candidate | None:
    tensors, dout, mask = inputs.tensors, inputs.dout, workload.mask
    if name == "torch_mask":
        if workload.case != "attention":
            return None
        attend = bool_mask(mask).to(dout.device)
        return _candidate(lambda x: sdpa(**x, attn_mask=attend), tensors, dout)
    if name == "ringtile_rows":
        tensors = {n: x if n in _OF_ALL_TOKENS else rows_of(workload, x) for n, x in tensors.items()}
        tensors = {n: x.detach().requires_grad_() for n, x in tensors.items()}
        dout = rows_of(workload, dout)
        prompt, completions = workload.lengths
        held = torch.arange(dout.size(1)) < torch.tensor([prompt + length for length in completions])[:, None]
        mask = IntervalMask.from_padding(held.int())
    sequence = ShardedSequence(mask, Layout.contiguous(mask.seq_len, 1))
    return _candidate(lambda x: compute(workload.case, x, sequence), tensors, dout)


def _candidate(apply: Any, tensors: dict[str, Tensor], dout: Tensor) -> Candidate:
    return gradient_candidate(partial(apply, tensors), dout, tuple(tensors.values()))


def exact_results(workload: Workload, inputs: Inputs) -> None:
    """Tests hold trees to their ways; rows of their own have other shapes."""


def cost_of(workload: Workload, inputs: Inputs) -> Cost:
    """Those of the tree, whoever computes it."""
    if workload.case != "attention":
        return scan.cost_of(workload, inputs)
    of_attention = _of_attention(workload)
    return Cost(workload, cases.flops_of(of_attention, workload.mask), cases.bytes_of(of_attention, 1))


def smaller(workload: Workload) -> Workload:
    """A workload that warms a process up."""
    return replace(workload, seq_len=2, num_completions=1)


measure = partial(measure_each, "tree")
MEMORY = False  # whether memory is measured by default
GRID: Grid = {
    "case": CASES,
    "dtype": ("float32",),
    "seq_len": (8192,),
    "num_heads": (8,),
    "num_kv_heads": (8,),
    "head_dim": (64,),
    "device": ("cpu",),
    "num_completions": (8,),
}


check = partial(check_sizes, CASES)


def quick_comparisons() -> Iterator[Comparison]:
    """The comparisons quoted in the documentation."""
    for case in CASES:
        yield Comparison(Workload(case, "float32", 8192, 2, 2, 64), BACKENDS)
        yield Comparison(Workload(case, "bfloat16", 16384, 16, 16, 128, device="cuda"), BACKENDS)
