"""Attention of a sharded sequence under torch.compile, export and selective checkpointing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks
from ringtile import ContextParallel, IntervalMask, Layout, LoopbackWorld, context_parallel, ring_attention
from ringtile.attn.call import Options
from ringtile.attn.traced import SequenceTensors, attend
from ringtile.transport.loopback import LoopbackGroup
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

RING = torch.ops.ringtile.ring_attention.default


class Block(nn.Module):
    """A layer as models write it: projections, heads before tokens, attention, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.project = nn.Linear(16, 3 * 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.project(x).chunk(3, dim=-1))
        return x + self.inner(q, k, v).transpose(1, 2).flatten(2).sin()


class Inner(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, is_causal=True)


def tokens(seq_len: int) -> Tensor:
    return torch.randn(2, seq_len, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seq_len))


def outcome(block: Any, weight: nn.Parameter, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = block(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, weight])]


def compiled_and_plain(way: str) -> int:
    """A compiled block against the plain one at three lengths; returns how many graphs with a ring were compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    group, rank, world_size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    block = Block()
    if way == "style":
        block.inner = ContextParallel(2)._apply(block.inner, group)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for seq_len in (24, 26, 64):
        x = Layout.zigzag(seq_len, world_size).shard(tokens(seq_len), 1, rank)
        with context_parallel(group, mask=IntervalMask.documents([10, seq_len - 10])):
            results = [outcome(function, block.project.weight, x) for function in (block, compiled)]
        assert all(a.equal(b) for a, b in zip(*results, strict=True)), seq_len
    return sum(any("ring_attention" in str(node.target) for node in graph.graph.nodes) for graph in counter.graphs)


@pytest.mark.parametrize(
    ("world_size", "way"),  # a style makes its mode in the graph too, which a context has made outside
    [(2, "style"), *(pytest.param(world_size, "context", marks=pytest.mark.long) for world_size in (1, 2))],
)
def test_a_block_compiles_whole_and_once_for_all_lengths(world_size: int, way: str) -> None:
    assert run_ranks(world_size, compiled_and_plain, way) == [1] * world_size


# ---- the op in graphs ---------------------------------------------------------------------------


MASK, LAYOUT = IntervalMask.causal(6), Layout.contiguous(6, 1)


def qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 6, 2, 4, dtype=torch.float64, generator=generator) for _ in range(3)]


def ring_of_one(q: Tensor, k: Tensor, v: Tensor, begin: Tensor, end: Tensor, layout: Tensor) -> Tensor:
    return attend(q, k, v, SequenceTensors(begin, end, layout), Options(0.5))[0]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_keeps_the_op(mode: str) -> None:
    arguments = (*qkv(), MASK.begin, MASK.end, LAYOUT.tensor)
    graph = make_fx(ring_of_one, tracing_mode=mode)(*arguments)
    assert [node.target for node in graph.graph.nodes].count(RING) == 1
    assert graph(*arguments).equal(ring_of_one(*arguments))


def test_joint_export_has_forward_and_backward_op() -> None:
    def forward(*arguments: Tensor) -> tuple[Tensor]:
        return (ring_of_one(*arguments),)

    arguments = (*(t.requires_grad_() for t in qkv()), MASK.begin, MASK.end, LAYOUT.tensor)
    graph = aot_export_joint_simple(forward, arguments, trace_joint=True)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(RING) == 1
    assert targets.count(torch.ops.ringtile.ring_attention_backward.default) == 1


def test_export_keeps_the_op() -> None:
    class Module(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ring_attention(q, k, v, mask=MASK, layout=LAYOUT)

    program = torch.export.export(Module(), tuple(qkv()))
    assert [node.target for node in program.graph.nodes].count(RING) == 1
    assert program.module()(*qkv()).equal(Module()(*qkv()))


def test_make_fx_keeps_the_op_that_looks_the_sequence_up() -> None:
    """A graph that kept the sequence itself would go on with one length."""
    inner = ContextParallel(2)._apply(Inner(), LoopbackWorld(1).groups[0])
    heads_first = [t.transpose(1, 2) for t in qkv()]
    graph = make_fx(inner)(*heads_first)
    targets = [node.target for node in graph.graph.nodes]
    assert torch.ops.ringtile.sequence_of.default in targets
    assert graph(*heads_first).equal(inner(*heads_first))


@pytest.mark.parametrize("is_causal", [False, True])
def test_sequence_op_passes_opcheck(is_causal: bool) -> None:
    arguments = (torch.zeros(1), 8, is_causal, "")
    torch.library.opcheck(torch.ops.ringtile.sequence_of.default, arguments)


# ---- selective activation checkpointing ---------------------------------------------------------


@pytest.mark.parametrize(("saved", "calls"), [([RING], 2), ([], 3)])
def test_selective_checkpoint_keeps_out_and_lse(saved: list[Any], calls: int) -> None:
    """Forward and backward are one call each of the ring; a forward that is recomputed is a third."""

    def gradients(group: LoopbackGroup, function: Any) -> tuple[list[Tensor], int]:
        layout = Layout.contiguous(6, 2)
        leaves = [layout.shard(t, 1, group.transport.rank).transpose(1, 2).requires_grad_() for t in qkv()]
        with context_parallel(group, layout=layout, mask=IntervalMask.causal(6)):
            out = function(*leaves)
            found = list(torch.autograd.grad(out.sum(), leaves))
        return found, group.transport.num_calls

    def run(function: Any) -> list[tuple[list[Tensor], int]]:
        return LoopbackWorld(2).run(lambda group: gradients(group, function))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q.sin(), k, v).cos()

    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    plain = run(layer)
    again = run(lambda *t: checkpoint(layer, *t, use_reentrant=False, context_fn=contexts))
    for (got, counted), (wanted, _) in zip(again, plain, strict=True):
        assert counted == calls
        assert all(a.equal(b) for a, b in zip(got, wanted, strict=True))
