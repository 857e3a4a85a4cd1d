"""The workloads of `python -m benchmarks attention` and `ring`: masks, sizes, inputs, flops and bytes.

Shape letters: B batch, S tokens, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from ringtile.attn.call import check_tensors
from ringtile.errors import ConfigError
from ringtile.planner.layer import Plan, plan_attention
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from torch import Tensor

from benchmarks.rows import DTYPES, Cost, forward_backward, generator_on

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q (B, S, H, D), k, v (B, S, G, D) -> out (B, S, H, D)


@dataclass(frozen=True)
class Workload:
    """Attention with one mask at one size. case: the name of the mask, see make_case."""

    case: str
    dtype: str
    seq_len: int
    head_dim: int
    num_heads: int = 8
    num_kv_heads: int = 8
    world_size: int = 1
    device: str = "cpu"
    scheme: str = "ring"  # of ringtile's context parallelism


class Case(NamedTuple):
    """A mask, and the simpler forms that other attention functions take, where it has one."""

    mask: IntervalMask
    is_causal: bool | None  # as torch's is_causal; None: neither full nor causal
    documents: tuple[tuple[int, int, int], ...] | None  # as causal documents (row, begin, end); None: not made of them


def make_case(name: str, seq_len: int) -> Case:
    """The mask with that name. ConfigError: there is none."""
    family, _, text = name.partition("-")
    number = int(text) if text.isdecimal() and int(text) > 0 else 0
    if name == "full":
        return Case(IntervalMask.full(seq_len), False, None)
    if name == "causal":
        return Case(IntervalMask.causal(seq_len), True, None)
    if name == "padding":  # two rows, the second one half empty
        num_tokens = (seq_len, (seq_len + 1) // 2)
        attention_mask = torch.arange(seq_len) < torch.tensor(num_tokens)[:, None]
        spans = tuple((row, 0, end) for row, end in enumerate(num_tokens))
        return Case(IntervalMask.from_padding(attention_mask.int()), None, spans)
    if family == "window" and number:
        return Case(IntervalMask.sliding_window(seq_len, number), None, None)
    if family == "documents" and 0 < number <= seq_len:
        bounds = [seq_len * i // number for i in range(number + 1)]
        lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
        return Case(IntervalMask.documents(lengths), None, tuple((0, *span) for span in itertools.pairwise(bounds)))
    raise ConfigError(
        f"case is {name!r} at {seq_len} tokens; expected full, causal, padding, window-TOKENS, or documents-COUNT with "
        "at most one document per token"
    )


class Inputs(NamedTuple):
    """q (B, S, H, D), k and v (B, S, G, D), all leaves, and dout (B, S, H, D), the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def detached(self) -> Inputs:
        """The same numbers without a graph, for a backend that has no backward."""
        return Inputs(*(x.detach() for x in self))

    def double(self) -> Inputs:
        """The same numbers in float64, in a separate graph."""
        return leaves(x.detach().double() for x in self)


def make_inputs(workload: Workload) -> Inputs:
    """Normal random numbers, the same on every call; B is the batch size of the workload's mask."""
    batch = make_case(workload.case, workload.seq_len).mask.begin.size(0)
    generator = generator_on(workload.device)
    heads = (workload.num_heads, workload.num_kv_heads, workload.num_kv_heads, workload.num_heads)
    shapes = [(batch, workload.seq_len, count, workload.head_dim) for count in heads]
    numbers = (torch.randn(shape, generator=generator, device=workload.device) for shape in shapes)
    return leaves(x.to(DTYPES[workload.dtype]) for x in numbers)


def leaves(tensors: Iterable[Tensor]) -> Inputs:
    """q, k, v as leaves that require gradients, and dout."""
    q, k, v, dout = tensors
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def check_kernel(workload: Workload) -> None:
    """InputError: the kernels do not support the workload's heads or dtype."""
    q, k, v, _ = make_inputs(replace(workload, case="full", seq_len=1))
    check_tensors(q, k, v)


def attention_cost(workload: Workload, case: Case) -> Cost:
    """The flops and bytes of a workload's attention."""
    return Cost(workload, flops_of(workload, case.mask), bytes_of(workload, case.mask.begin.size(0)))


def attention_plan(workload: Workload, mask: IntervalMask, layout: Layout) -> Plan:
    """The plan of a workload: which flops its ranks compute and which bytes they send."""
    return plan_attention(
        mask,
        layout,
        num_heads=workload.num_heads,
        num_kv_heads=workload.num_kv_heads,
        head_dim=workload.head_dim,
        dtype=DTYPES[workload.dtype],
        scheme=workload.scheme if layout.world_size > 1 else "ring",
    )


def flops_of(workload: Workload, mask: IntervalMask) -> dict[str, int]:
    """Flops of the unmasked pairs, by pass."""
    one_rank = attention_plan(workload, mask, Layout.contiguous(workload.seq_len, 1))
    return forward_backward(one_rank.forward_flops, one_rank.backward_flops)


def bytes_of(workload: Workload, batch: int) -> dict[str, int]:
    """The least memory traffic, by pass: each input read once, each output written once."""
    tokens, element = batch * workload.seq_len, DTYPES[workload.dtype].itemsize
    queries = tokens * workload.num_heads * workload.head_dim * element  # q; out, dout and dq have the same size
    keys = 2 * tokens * workload.num_kv_heads * workload.head_dim * element  # k and v; so have dk and dv
    lse = tokens * workload.num_heads * 4
    return forward_backward(2 * queries + keys + lse, 4 * queries + 2 * keys + lse)
