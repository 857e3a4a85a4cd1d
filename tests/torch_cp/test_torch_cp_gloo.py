"""PyTorch's own test cases of context parallelism, on processes, in float32: every way in, and cases PyTorch skips.

Shape letters: B batch, S global tokens, H query heads, G kv heads, D head dim, W ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks
from ringtile import (
    ContextParallel,
    ContextParallelPlan,
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RingMismatchError,
    ShardedSequence,
    attention,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    create_cp_block_mask,
    flex_attention,
    plan_attention,
    ring_attention,
)
from ringtile.transport.groups import transport_of
from strategies import dense
from test_torch_cp_flex import FLEX, Attention, mask_mod_of, styled
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention as sdpa

Heads = tuple[int, int]


def global_tensors(seq_len: int, heads: Heads, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dout, heads before tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, h, seq_len, 32) for h in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def assert_within_1e_6(got: list[Tensor], wanted: list[Tensor], where: object) -> None:
    """Relative to the largest magnitude: sums of 200 terms in float32 state, a few ulp (6e-8) each."""
    for a, b in zip(got, wanted, strict=True):
        assert (a.double() - b).abs().max() <= 1e-6 * b.abs().max(), where


# ---- one attention, five ways in ----------------------------------------------------------------


def by_context(mesh: DeviceMesh, tensors: list[Tensor], layout: str, call: dict[str, Any]) -> list[Tensor]:
    buffers = [t.clone() for t in tensors]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, layout=layout):
        return differentiate(sdpa, *buffers, **call)


def by_style(mesh: DeviceMesh, tensors: list[Tensor], layout: str, call: dict[str, Any]) -> list[Tensor]:
    """In a plan."""
    shards = context_parallel_shard(mesh, tensors, [2] * 4, layout)
    module = parallelize_module(Attention(sdpa), mesh, ContextParallel(2))
    with ContextParallelPlan(mesh, layout=layout, seq_len=tensors[0].size(2)).attention():
        return differentiate(module, *shards, **call)


def by_plan(mesh: DeviceMesh, tensors: list[Tensor], layout: str, call: dict[str, Any]) -> list[Tensor]:
    plan = ContextParallelPlan(mesh, layout=layout, seq_len=tensors[0].size(2))
    q, k, v, dout = plan.shard(dict(zip("qkvo", tensors, strict=True)), 2).values()
    with plan.attention():
        results = differentiate(sdpa, q, k, v, dout, **call)
    assert plan.unshard(q, 2).equal(tensors[0])
    return results


def by_dtensors(mesh: DeviceMesh, tensors: list[Tensor], layout: str, call: dict[str, Any]) -> list[Tensor]:
    """With DTensors sharded over the mesh, in a block."""
    q, k, v, dout = context_parallel_shard(mesh, tensors, [2] * 4, layout)

    def of_dtensors(*qkv: Tensor, dim: int = 2, **call: Any) -> Tensor:
        out = sdpa(*(DTensor.from_local(t, mesh, [Shard(dim)], run_check=False) for t in qkv), **call)
        assert isinstance(out, DTensor)
        return out.to_local()

    with context_parallel(mesh, layout=Layout.named(layout, tensors[0].size(2), mesh.size())):
        tokens, heads = (differentiate(of_dtensors, q, k, v, dout, dim=dim, **call) for dim in (2, 1))
    assert all(map(torch.equal, tokens, heads))  # heads, as of tensor parallelism
    return tokens


def by_flex(mesh: DeviceMesh, tensors: list[Tensor], layout: str, call: dict[str, Any]) -> list[Tensor]:
    seq_len = tensors[0].size(2)
    mask = IntervalMask.causal(seq_len) if call.pop("is_causal") else IntervalMask.full(seq_len)
    block_mask = create_cp_block_mask(mask_mod_of(mask), 1, None, seq_len, seq_len, mesh, load_balancer=layout)
    module = parallelize_module(Attention(flex_attention), mesh, ContextParallel(2, FLEX))
    return differentiate(module, *context_parallel_shard(mesh, tensors, [2] * 4, layout), block_mask=block_mask, **call)


def differentiate(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **call: Any
) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves, **call)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


CASES = list(
    itertools.product(
        (False, True),  # causal
        ("contiguous", "zigzag"),  # without and with load balance
        (200, 202),  # 202 is no multiple of 2 * 4, nor of 4
        ((4, 4), (4, 2)),  # grouped heads
    )
)


def every_case(lengths: tuple[int, ...]) -> None:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for is_causal, layout, seq_len, heads in (case for case in CASES if case[2] in lengths):
        call = {"is_causal": is_causal, "enable_gqa": heads[0] != heads[1]}
        exact = differentiate(sdpa, *global_tensors(seq_len, heads, torch.float64), **call)
        tensors = global_tensors(seq_len, heads, torch.float32)
        for way in (by_context, by_plan, by_style, by_dtensors, by_flex):
            local = way(mesh, tensors, layout, dict(call))
            full = context_parallel_unshard(mesh, local, [2] * 4, Layout.named(layout, seq_len, dist.get_world_size()))
            assert_within_1e_6(full, exact, (way.__name__, is_causal, layout, seq_len, heads))


@pytest.mark.parametrize(("world_size", "lengths"), [(2, (202,)), pytest.param(4, (200, 202), marks=pytest.mark.long)])
def test_every_way_in_is_attention(world_size: int, lengths: tuple[int, ...]) -> None:
    run_ranks(world_size, every_case, lengths)


# ---- with tensor parallelism and FSDP2 ----------------------------------------------------------


class Layer(nn.Module):
    """Attention of a model written for one device, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, dtype=torch.float64) for _ in range(4))
        self.inner = Attention(sdpa)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, 8)).transpose(1, 2) for project in (self.q, self.k, self.v))
        return x + self.o(self.inner(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def ring_over_a_mesh() -> None:
    """A mesh of one dimension is its group; one of several is refused before any message."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    mask, layout = IntervalMask.causal(10), Layout.zigzag(10, 2)
    q, k, v = (torch.randn(1, 10, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    sequence = ShardedSequence(mask, layout, mesh["cp"])
    outs = [ring_attention(*(sequence.shard(x, dim=1) for x in (q, k, v)), sequence)]
    outs.append(
        ring_attention(
            *(layout.shard(x, 1, sequence.rank) for x in (q, k, v)), mask=mask, layout=layout, group=mesh["cp"]
        )
    )
    for out in outs:
        expected = attention(q, k, v, mask=mask)
        torch.testing.assert_close(layout.unshard(out, dim=1, group=mesh["cp"]), expected, rtol=0, atol=1e-5)
    with pytest.raises(InputError, match=r"dimensions \('dp', 'cp'\); pass one of them"):
        ShardedSequence(mask, layout, mesh)


def composed() -> None:
    """dp 1 x cp 2 x tp 2: outputs and every parameter's gradient against one process."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    x = torch.randn(2, 26, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    single, layers = Layer(), nn.Sequential(Layer(), Layer())
    layers[0].load_state_dict(single.state_dict())
    layers[1].load_state_dict(single.state_dict())
    exact = single(single(x))
    exact.square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in single.named_parameters()}

    projections = {name: ColwiseParallel() for name in "qkv"}
    data = mesh["dp", "cp"]._flatten("dp_cp_composed")
    for layer in layers:
        parallelize_module(layer, mesh["tp"], {**projections, "o": RowwiseParallel()})
        parallelize_module(layer, mesh["cp"], {"inner": ContextParallel(2)})  # in the plan below
        fully_shard(layer, mesh=data)
    plan = ContextParallelPlan(mesh["cp"], seq_len=26)
    with plan.attention():
        out = layers(plan.shard({"x": x})["x"])
        (out.square().sum() * data.size()).backward()  # FSDP2 averages; the sum is wanted
    full = plan.unshard(out.detach())
    torch.testing.assert_close(full, exact.detach(), rtol=0, atol=1e-11)
    for name, gradient in wanted.items():
        got = [layer.get_parameter(name).grad for layer in layers]
        total = sum(g.full_tensor() for g in got if isinstance(g, DTensor))
        torch.testing.assert_close(total, gradient, rtol=1e-11, atol=1e-11)


def test_style_composes_with_tensor_parallelism_and_fsdp() -> None:
    run_ranks(4, composed)


def test_a_mesh_is_its_group() -> None:
    run_ranks(4, ring_over_a_mesh)


# ---- bytes --------------------------------------------------------------------------------------


def bytes_of_documents(lengths: list[int], layout: Layout) -> dict[str, list[int]]:
    """Bytes that this rank sends, forward and backward, by the ring and by gathering keys and values."""
    transport = transport_of(dist.group.WORLD)
    q, k, v = (layout.shard(t, 2, transport.rank) for t in global_tensors(layout.seq_len, (4, 2), torch.float32)[:3])
    mask, sent = IntervalMask.documents(lengths), {}

    def by_ring(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        with context_parallel(dist.group.WORLD, layout=layout, mask=mask):
            return [sdpa(q, k, v, enable_gqa=True)]

    def by_gather(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [layout.unshard(t, 2, dist.group.WORLD) for t in (k, v)]

    for name, way in (("ring", by_ring), ("gather", by_gather)):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        before = transport.bytes_sent
        outs = way(*leaves)
        between = transport.bytes_sent
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
        sent[name] = [between - before, transport.bytes_sent - between]
    return sent


@pytest.mark.parametrize("layout", [pytest.param("contiguous", marks=pytest.mark.long), "balanced"])
def test_documents_move_as_planned_and_a_third_of_gathering(layout: str) -> None:
    """16 documents over 4 ranks, mean of 2 packings."""
    rng, ratios = random.Random(0), []
    for _ in range(2):
        bounds = sorted(rng.sample(range(1, 2048), 15))
        lengths = [b - a for a, b in itertools.pairwise([0, *bounds, 2048])]
        mask = IntervalMask.documents(lengths)
        sharded = Layout.balanced(mask, 4, chunk=64) if layout == "balanced" else Layout.contiguous(2048, 4)
        ranks = run_ranks(4, bytes_of_documents, lengths, sharded)
        cost = plan_attention(mask, sharded, num_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float32, batch=2)
        assert [rank["ring"] for rank in ranks] == [
            [rank.forward_bytes_sent, rank.backward_bytes_sent] for rank in cost.ranks
        ]
        ratios.append(sum(rank["ring"][0] for rank in ranks) / sum(rank["gather"][0] for rank in ranks))
    assert sum(ratios) / len(ratios) <= 0.3


# ---- refusals ----------------------------------------------------------------------------------


def test_context_around_a_style_brings_its_layout_and_mask() -> None:
    q, k, v, dout = global_tensors(26, (4, 4), torch.float64)
    mask, layout = IntervalMask.documents([11, 15]), Layout.striped(26, 2)
    exact = differentiate(sdpa, q, k, v, dout, attn_mask=dense(mask))

    def attend(group: Any) -> list[Tensor]:
        rank = group.transport.rank
        module = styled(ContextParallel(2), sdpa, group)
        with context_parallel(group, layout=layout, mask=mask):
            return differentiate(module, *(layout.shard(t, 2, rank) for t in (q, k, v, dout)), is_causal=True)

    for shards, wanted in zip(zip(*LoopbackWorld(2).run(attend), strict=True), exact, strict=True):
        torch.testing.assert_close(torch.stack(shards, 3).flatten(2, 3), wanted, rtol=0, atol=1e-12)


def test_a_style_that_knows_no_layout_is_refused() -> None:
    """Also where tokens of that size were sharded before, in one layout alone."""

    def attend(group: Any) -> None:
        (q,) = context_parallel_shard(group, [torch.zeros(1, 1, 8, 4)], [2])
        styled(ContextParallel(2), sdpa, group)(q, q, q)

    with pytest.raises(InputError, match=r"rank [01] has 4 local tokens of an unknown layout; expected the call in"):
        LoopbackWorld(2).run(attend)


def test_arguments_of_the_style_are_checked() -> None:
    with pytest.raises(InputError, match="seq_dim is 1; expected 2"):
        ContextParallel(1)


@pytest.mark.parametrize(
    ("buffers", "seq_dims", "message"),
    [
        ([torch.zeros(8)], [0, 0], r"buffers \[0\] and seq_dims \[0, 1\]"),
        ({"a": torch.zeros(8)}, {"b": 0}, r"buffers \['a'\] and seq_dims \['b'\]"),
        ([torch.zeros(8)], [1], r"buffer 0 is \(8,\), its sequence dim 1"),
        ([torch.zeros(8), torch.zeros(9)], [0, 0], r"buffers have \[8, 9\] tokens"),
        ([], [], "expected one dim for every buffer"),
        (torch.zeros(8), 1, "buffers is a Tensor; expected a list"),
        ([torch.zeros(8)], 1, "seq_dims is a int; expected a list"),
        ([[1, 2]], [0], "buffer 0 is a list, its sequence dim a int; expected a tensor or BlockMask"),
        ([torch.zeros(8)], [0.0], "buffer 0 is a Tensor, its sequence dim a float"),
        ([torch.zeros(8)], ["0"], "its sequence dim a str"),
    ],
)
def test_bad_buffers_are_refused(buffers: Any, seq_dims: Any, message: str) -> None:
    group = LoopbackWorld(2).groups[0]
    with pytest.raises(InputError, match=message):
        context_parallel_shard(group, buffers, seq_dims)
    if "have" not in message:

        def unshard(group: Any) -> None:
            context_parallel_unshard(group, buffers, seq_dims)

        with pytest.raises(InputError, match=message):
            LoopbackWorld(2).run(unshard)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda group: context_parallel_shard(8, [torch.zeros(8)], [0]), "mesh is a int; expected a DeviceMesh"),
        (lambda group: context_parallel_unshard(None, [torch.zeros(8)], [0]), "mesh is a NoneType"),
        (lambda group: context_parallel(None).__enter__(), "mesh is a NoneType"),
        (lambda group: ContextParallel(2)._apply(nn.Identity(), torch.zeros(2)), "mesh is a Tensor"),
        (lambda group: context_parallel_shard(group, [torch.zeros(8)], [0], 8), "load_balancer is a int"),
        (lambda group: context_parallel(group, buffers=torch.zeros(8)).__enter__(), "buffers is a Tensor"),
        (lambda group: context_parallel(group).__enter__(), "nothing tells the length of the sequence"),
        (lambda group: context_parallel(group, layout=8).__enter__(), "layout is a int; expected a Layout"),
        (lambda group: context_parallel(group, layout=None).__enter__(), "layout is a NoneType"),
        (lambda group: context_parallel(group, mask=torch.ones(8, 8)).__enter__(), "mask is a Tensor"),
        (lambda group: ContextParallelPlan(group), "nothing tells the length of the sequence; expected buf"),
        (lambda group: ContextParallelPlan(group, torch.ones(8, 8)), "mask is a Tensor"),
        (
            lambda group: ContextParallelPlan(group, IntervalMask.causal(8)).shard({"x": torch.zeros(1, 9)}),
            "the batch has 9 tokens in dim 1, the plan 8",
        ),
        (
            lambda group: context_parallel(group, buffers=["a"], buffer_seq_dims=[0]).__enter__(),
            "buffer 0 is a str, its sequence dim a int",
        ),
        (lambda group: create_cp_block_mask(None, 1, 1, 8, 8, group), "mask_mod is a NoneType; expected a function"),
        (lambda group: create_cp_block_mask(mask_mod_of, 1, 1, 8, 8, 3), "mesh is a int"),
        (lambda group: ContextParallel(2, "flex"), "attention_type is 'flex'"),
    ],
)
def test_wrong_types_are_named(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(LoopbackWorld(2).groups[0])


def test_a_call_of_one_rank_outside_of_a_plan_is_told_to_the_others() -> None:
    """Rank 0 learns it at once instead of at the timeout."""
    q = torch.zeros(1, 1, 4, 4)

    def attend(group: Any) -> BaseException | None:
        plan = ContextParallelPlan(group, seq_len=8)
        try:
            with plan.attention() if group.transport.rank == 0 else contextlib.nullcontext():
                styled(ContextParallel(2), sdpa, group)(q, q, q)
        except (InputError, RingMismatchError) as error:
            return error
        return None

    first, second = LoopbackWorld(2, timeout_seconds=20).run(attend)
    assert isinstance(first, RingMismatchError)
    assert "attention, refused: rank 1 has 4 local tokens" in str(first)
    assert isinstance(second, InputError)
