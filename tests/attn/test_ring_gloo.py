"""The ring over real processes: the same bits as over virtual ranks, and the bytes of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import Attention, dense_gradients
from pool import run_ranks
from ringtile import IntervalMask, Layout, plan, ring_attention
from ringtile.transport.groups import transport_of
from strategies import dense
from test_ring import FLOAT64_TOLERANCE, MASKS, Problem, assemble, assert_close, problem, run_ring

LAYOUTS = {
    "contiguous": Layout.contiguous,
    "zigzag": Layout.zigzag,
    "striped": Layout.striped,
    "uneven": lambda seq_len, world_size: Layout.from_runs(
        [[(2 * rank + 1, 1, 1, 1), (2 * rank, 1, 0, 1)] for rank in range(world_size - 1)]
        + [[(2 * world_size - 2, 1, 0, seq_len - 2 * world_size + 2)]]
    ),
}


def subgroup(world_size: int) -> dist.ProcessGroup | None:
    """The last world_size ranks of the world: in a group of three of four, no rank has its global number."""
    first = dist.get_world_size() - world_size
    return dist.new_group(list(range(first, dist.get_world_size()))) if first else dist.group.WORLD


def forward_and_backward(
    p: Problem, mask: IntervalMask, layout: Layout, group: dist.ProcessGroup | None
) -> tuple[Attention, int, int]:
    """This rank's results, and the bytes that it sent forward and backward."""
    transport = transport_of(group)
    leaves = [layout.shard(x, 1, transport.rank).requires_grad_() for x in (p.q, p.k, p.v)]
    before = transport.bytes_sent
    out, lse = ring_attention(*leaves, mask=mask, layout=layout, group=group, return_lse=True)
    between = transport.bytes_sent
    cotangents = [layout.shard(p.dout, 1, transport.rank), layout.shard(p.dlse, 2, transport.rank)]
    gradients = torch.autograd.grad([out, lse], leaves, cotangents)
    result = Attention(out.detach(), lse.detach(), *gradients)
    return result, between - before, transport.bytes_sent - between


def every_case(world_size: int, dtype: torch.dtype) -> dict[tuple[str, str], Any]:
    group = subgroup(world_size)
    if dist.get_rank(group) < 0:
        return {}
    p = problem(dtype=dtype)
    return {
        (mask, layout): forward_and_backward(p, MASKS[mask], LAYOUTS[layout](48, world_size), group)
        for mask in MASKS
        for layout in LAYOUTS
    }


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        (2, torch.bfloat16),
        (3, torch.float64),
        pytest.param(4, torch.float64, marks=pytest.mark.long),
        *(pytest.param(size, torch.bfloat16, marks=pytest.mark.long) for size in (3, 4)),
    ],
)
def test_processes_equal_virtual_ranks_and_send_what_the_plan_says(world_size: int, dtype: torch.dtype) -> None:
    p = problem(dtype=dtype)
    ranks = run_ranks(2 if world_size == 2 else 4, every_case, world_size, dtype)[-world_size:]
    for mask, layout_name in ranks[0]:
        layout = LAYOUTS[layout_name](48, world_size)
        cost = plan(
            MASKS[mask], layout, num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=8, dtype=dtype
        )  # fmt: skip
        results, forward, backward = zip(*(rank[mask, layout_name] for rank in ranks), strict=True)
        assert list(forward) == [rank.forward_bytes_sent for rank in cost.ranks]
        assert list(backward) == [rank.backward_bytes_sent for rank in cost.ranks]
        ring = assemble(list(results), layout)
        virtual = run_ring(p, MASKS[mask], layout)
        assert all(torch.equal(x, y) for x, y in zip(ring, virtual, strict=True)), (mask, layout_name)
        if dtype == torch.float64:
            expected = dense_gradients(p.q, p.k, p.v, dense(MASKS[mask]), p.dout, p.dlse)
            assert_close(ring, expected, FLOAT64_TOLERANCE)


def naive_and_planned_bytes() -> tuple[int, int]:
    p, layout = problem(dtype=torch.float32), Layout.zigzag(48, dist.get_world_size())
    sent = forward_and_backward(p, MASKS["causal"], layout, dist.group.WORLD)[1]
    everything = (dist.get_world_size() - 1) * layout.local_len(0) * 2 * (16 + 8) * 4
    return sent, everything


def test_causal_zigzag_moves_three_quarters_of_the_keys() -> None:
    """Every other rank attends a rank's head chunk, half of them its tail chunk (those whose own tail lies later)."""
    sent, everything = (sum(of_ranks) for of_ranks in zip(*run_ranks(4, naive_and_planned_bytes), strict=True))
    assert sent == 0.75 * everything


def compiled_and_eager() -> list[bool]:
    """A compiled ring layer, whose graph refers to the group by its name and which is the first to use a mask, against
    the plain one."""
    p, layout = problem(), Layout.zigzag(48, dist.get_world_size())
    mask = IntervalMask(MASKS["documents"].begin, MASKS["documents"].end)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ring_attention(q * 2, k, v, mask=mask, layout=layout, group=dist.group.WORLD).sin()

    results = []
    for function in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):
        leaves = [layout.shard(x, 1, dist.get_rank()).requires_grad_() for x in (p.q, p.k, p.v)]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    return [torch.equal(x, y) for x, y in zip(*results, strict=True)]


def test_ring_of_processes_compiles_into_one_graph() -> None:
    assert run_ranks(2, compiled_and_eager) == [[True] * 4] * 2
