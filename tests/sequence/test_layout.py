"""Layouts against the definition of a partition, and sharding against plain indexing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ringtile import ops
from ringtile.errors import InputError, LayoutError, RingMismatchError
from ringtile.sequence.layout import CHUNKS_PER_RANK, Layout, Run
from ringtile.transport.groups import all_gather_seq
from ringtile.transport.loopback import LoopbackGroup, LoopbackWorld
from strategies import layouts, random_layouts
from torch import Tensor

WORLDS = st.integers(1, 6)


@given(WORLDS, st.integers(0, 30), st.data())
def test_every_position_is_held_once(world_size: int, extra: int, data: st.DataObject) -> None:
    layout = data.draw(layouts(world_size + extra, world_size))
    held = torch.cat([layout.positions(rank) for rank in range(world_size)])
    assert torch.equal(held.sort().values, torch.arange(layout.seq_len))
    assert [layout.local_len(rank) for rank in range(world_size)] == [
        layout.positions(rank).numel() for rank in range(world_size)
    ]


@given(WORLDS, st.integers(1, 5))
def test_named_layouts_are_what_the_papers_say(world_size: int, chunk: int) -> None:
    seq_len = 2 * world_size * chunk
    halves = torch.arange(seq_len).view(2 * world_size, chunk)
    for rank in range(world_size):
        contiguous = Layout.contiguous(seq_len, world_size).positions(rank)
        assert torch.equal(contiguous, torch.arange(seq_len).view(world_size, -1)[rank])
        zigzag = Layout.zigzag(seq_len, world_size).positions(rank)
        assert torch.equal(zigzag, torch.cat((halves[rank], halves[-1 - rank])))
        striped = Layout.striped(seq_len, world_size).positions(rank)
        assert torch.equal(striped, torch.arange(seq_len)[rank::world_size])


@given(WORLDS, st.integers(0, 40), st.sampled_from(list(CHUNKS_PER_RANK)))
def test_lengths_that_do_not_divide_differ_by_one_per_chunk(world_size: int, extra: int, name: str) -> None:
    multiple = Layout.multiple(name, world_size)
    layout = Layout.named(name, multiple + extra, world_size)
    chunks = [run.length for rank in range(world_size) for run in layout.runs(rank)]
    assert max(chunks) - min(chunks) <= 1
    if extra % multiple == 0:
        assert len({layout.local_len(rank) for rank in range(world_size)}) == 1


@pytest.mark.parametrize(("name", "multiple"), [("contiguous", 4), ("zigzag", 8), ("striped", 4)])
def test_multiple_is_the_shortest_sequence_too(name: str, multiple: int) -> None:
    assert Layout.multiple(name, 4) == multiple
    Layout.named(name, multiple, 4)
    with pytest.raises(
        LayoutError, match=f"a {name} layout of {multiple - 1} tokens over 4 ranks: expected {multiple}"
    ):
        Layout.named(name, multiple - 1, 4)


@given(WORLDS, st.integers(0, 20), st.data())
def test_equal_content_is_equal(world_size: int, extra: int, data: st.DataObject) -> None:
    layout = data.draw(random_layouts(world_size + extra, world_size))
    again = Layout.from_tensor(layout.tensor.clone())
    assert again == layout
    assert hash(again) == hash(layout)
    assert Layout.from_runs([layout.runs(rank) for rank in range(world_size)]) == layout


def test_different_layouts_differ() -> None:
    assert Layout.contiguous(8, 2) != Layout.zigzag(8, 2)
    assert Layout.contiguous(8, 2) != Layout.contiguous(9, 2)


# ---- tensors ------------------------------------------------------------------------------------

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.complex128]


@pytest.mark.in_torch_too(long=True)
@given(WORLDS, st.integers(0, 20), st.integers(-3, 2), st.sampled_from(DTYPES), st.booleans(), st.data())
def test_shard_takes_the_tokens_of_the_rank(
    world_size: int, extra: int, dim: int, dtype: torch.dtype, transposed: bool, data: st.DataObject
) -> None:
    layout = data.draw(layouts(world_size + extra, world_size))
    shape = [3, 2, 4]
    shape[dim] = layout.seq_len
    x = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    if transposed:
        x = x.transpose(0, 2).contiguous().transpose(0, 2)
    for rank in range(world_size):
        assert torch.equal(layout.shard(x, dim, rank), x.index_select(dim, layout.positions(rank)))


@pytest.mark.in_torch_too(long=True)
@given(st.integers(1, 3), st.integers(0, 4), st.data())
def test_shard_has_the_gradient_of_indexing(world_size: int, extra: int, data: st.DataObject) -> None:
    layout = data.draw(layouts(world_size + extra, world_size))
    rank = data.draw(st.integers(0, world_size - 1))
    x = torch.randn(2, layout.seq_len, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layout.shard(x, 1, rank), (x,))
    weight = torch.randn(2, layout.local_len(rank), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((layout.shard(x, 1, rank) * weight).sum(), x)
    (expected,) = torch.autograd.grad((x.index_select(1, layout.positions(rank)) * weight).sum(), x)
    assert torch.equal(gradient, expected)


# ---- all ranks ----------------------------------------------------------------------------------


def gather_and_differentiate(
    group: LoopbackGroup, layout: Layout, x: Tensor, dim: int, weights: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """unshard(shard(x)) on one rank, and the gradient of its weighted sum in the local tokens."""
    rank = group.transport.rank
    local = x.index_select(dim, layout.positions(rank)).requires_grad_(x.is_floating_point())
    full = layout.unshard(local, dim, group)
    if x.is_floating_point():
        (full * weights[rank]).sum().backward()
    return full.detach(), local.grad if local.grad is not None else local


@given(st.integers(1, 4), st.integers(0, 9), st.integers(-3, 2), st.sampled_from(DTYPES), st.data())
def test_unshard_puts_the_pieces_back(
    world_size: int, extra: int, dim: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Integers up to 60 times weights up to 4 ranks * 3: every sum is exact in bfloat16's 8 bits or in float32."""
    layout = data.draw(layouts(world_size + extra, world_size))
    shape = [2, 1, 3]
    shape[dim] = layout.seq_len
    x = (torch.arange(torch.Size(shape).numel()) % 61).view(shape).to(dtype)
    weights = [torch.randint(0, 4, shape).to(dtype) for _ in range(world_size)]
    results = LoopbackWorld(world_size).run(lambda group: gather_and_differentiate(group, layout, x, dim, weights))
    for rank, (full, gradient) in enumerate(results):
        assert torch.equal(full, x)
        if x.is_floating_point():
            assert torch.equal(gradient, sum(weights).index_select(dim, layout.positions(rank)))


def test_unshard_gradient_is_added_in_float32() -> None:
    """256 + 1 is 256 in bfloat16: adding four ranks' gradients there would lose all the ones."""
    layout = Layout.contiguous(4, 4)

    def gradient(group: LoopbackGroup) -> Tensor:
        local = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
        full = layout.unshard(local, 0, group)
        full.backward(torch.full((4,), 256.0 if group.transport.rank == 0 else 1.0, dtype=torch.bfloat16))
        assert local.grad is not None
        return local.grad

    expected = torch.tensor([256.0 + 3]).bfloat16()  # 260: rounded once
    assert [result.item() for result in LoopbackWorld(4).run(gradient)] == [expected.item()] * 4


def test_unshard_can_be_differentiated_twice() -> None:
    layout = Layout.zigzag(5, 1)
    local = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layout.unshard(x, 1) ** 2, (local,))


def test_unshard_compiles_whole() -> None:
    layout = Layout.zigzag(6, 1)
    local = torch.randn(2, 6, requires_grad=True)
    compiled = torch.compile(lambda x: layout.unshard(2 * x, -1), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(local), (2 * local).index_select(1, layout.positions(0).argsort()))


@pytest.mark.parametrize("is_gradient", [False, True])
def test_unshard_keeps_its_schema(is_gradient: bool) -> None:
    x, layout = torch.randn(2, 4, requires_grad=True), Layout.striped(4, 1).tensor
    torch.library.opcheck(torch.ops.ringtile.unshard.default, (x, layout, 1, 4, is_gradient, ""))


def test_shard_without_tokens_may_have_any_strides() -> None:
    """Such as the features of a rank without an image, transposed."""
    layout = torch.tensor([[0, 0, 1, 0, 6]])  # all of them on rank 0
    whole = torch.arange(24.0).view(4, 6).t()

    def gather(group: LoopbackGroup) -> Tensor:
        mine = whole if group.transport.rank == 0 else whole[:0]
        return all_gather_seq(mine, layout, 0, 6, group)

    for full in LoopbackWorld(2).run(gather):
        assert torch.equal(full, whole)


def test_unshard_of_ranks_that_disagree_is_refused() -> None:
    def gather(group: LoopbackGroup) -> Tensor:
        layout = Layout.zigzag(8, 2) if group.transport.rank == 0 else Layout.contiguous(8, 2)
        return layout.unshard(torch.zeros(4), 0, group)

    with pytest.raises(RingMismatchError, match="layout"):
        LoopbackWorld(2).run(gather)


@pytest.mark.parametrize(
    ("local", "dim", "layout", "message"),
    [
        (torch.zeros(2, 7), 1, Layout.zigzag(8, 1), r"\(2, 7\), dim 1; expected size 8 in dim on rank 0"),
        (torch.zeros(2, 8), 2, Layout.zigzag(8, 1), r"local is \(2, 8\), dim 2; expected one of its dims"),
        (
            torch.zeros(2, 4),
            1,
            Layout.zigzag(8, 2),
            "the layout is for 2 ranks, the group has 1; expected the same number",
        ),
    ],
)
def test_unshard_refuses_what_does_not_fit(local: Tensor, dim: int, layout: Layout, message: str) -> None:
    with pytest.raises(InputError, match=message):
        layout.unshard(local, dim)


# ---- refusals -----------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "no ranks": (lambda: Layout.contiguous(4, 0), "world_size is 0; expected at least 1"),
    "no ranks, documents": (lambda: Layout.per_document([4], 0), "world_size is 0; expected at least 1"),
    "negative document": (lambda: Layout.per_document([-1, 4], 1), "lengths >= 0"),
    "no runs": (lambda: Layout.from_runs([]), "seq_len is 0; expected 1.."),
    "idle rank": (lambda: Layout.from_runs([[(0, 1, 0, 4)], []]), "rank 1 holds no token; expected at least one"),
    "held twice": (
        lambda: Layout.from_runs([[(0, 1, 0, 4)], [(3, 1, 0, 4)]]),
        "position 3 is held 2 times; expected every position exactly once",
    ),
    "held by none": (lambda: Layout.from_runs([[(0, 2, 0, 2)], [(2, 1, 0, 2)]]), "position 1 is held 0 times"),
    "outside": (lambda: Layout.from_runs([[(1, 1, 0, 4)]]), r"global_begin=1.* positions in 0\.\.3"),
    "stride 0": (lambda: Layout.from_runs([[(0, 0, 0, 2)]]), "stride=0.* expected length >= 1, stride >= 1"),
    "length 0": (lambda: Layout.from_runs([[(0, 1, 0, 2), (2, 1, 2, 0)]]), "length=0.* expected length >= 1"),
    "local hole": (lambda: Layout.from_runs([[(0, 1, 1, 4)]]), "local_begin=1.* expected local_begin 0"),
    "local overlap": (lambda: Layout.from_runs([[(0, 1, 0, 2), (2, 1, 1, 2)]]), "expected local_begin 2"),
    "negative": (lambda: Layout.from_runs([[(-1, 1, 0, 2)]]), r"the run \(-1, 1, 0, 2\); expected .* integers in 0"),
    "too large": (lambda: Layout.from_runs([[(0, 1, 0, 2**40)]]), r"integers in 0\.\.2147483647"),
    "not a number": (lambda: Layout.from_runs([[(0, 1, 0, 1.5)]]), "expected .* integers"),
    "three numbers": (lambda: Layout.from_runs([[(0, 1, 2)]]), r"\(global_begin, stride, local_begin, length\)"),
    "unknown name": (
        lambda: Layout.named("zebra", 8, 2),
        "layout is 'zebra'; expected one of contiguous, zigzag, striped",
    ),
    "unknown rank": (lambda: Layout.striped(8, 2).runs(2), r"rank is 2; expected 0\.\.1"),
    "negative rank": (lambda: Layout.striped(8, 2).positions(-1), r"rank is -1; expected 0\.\.1"),
    "tensor ranks": (
        lambda: Layout.from_tensor(torch.tensor([[1, 0, 1, 0, 2], [0, 2, 1, 0, 2]])),
        r"ranks of the runs are \[1, 0\]; expected 0, \.\.\., W-1",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_layout_is_refused_by_name(case: str) -> None:
    call, message = REFUSALS[case]
    with pytest.raises(LayoutError, match=message):
        call()


@pytest.mark.parametrize("tensor", [torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 5), torch.zeros(0, 5).long()])
def test_bad_layout_tensor_is_refused(tensor: Tensor) -> None:
    with pytest.raises(InputError, match=r"expected int64 \(R, 5\), not empty"):
        Layout.from_tensor(tensor)


@pytest.mark.parametrize(("dim", "expected"), [(0, "size 8 in dim"), (2, "one of its dims"), (-3, "one of its dims")])
def test_shard_refuses_a_tensor_of_another_length(dim: int, expected: str) -> None:
    with pytest.raises(InputError, match=rf"x is \(3, 8\), dim {dim}; expected {expected}"):
        Layout.zigzag(8, 2).shard(torch.zeros(3, 8), dim, 0)


def test_layout_is_immutable() -> None:
    with pytest.raises(AttributeError):
        Layout.zigzag(8, 2).seq_len = 9  # type: ignore[misc]


def test_run_reads_as_a_tuple() -> None:
    assert Layout.zigzag(8, 2).runs(0) == (Run(0, 1, 0, 2), (6, 1, 2, 2))


def test_a_check_takes_time_and_memory_for_the_runs_alone() -> None:
    """A byte and a step for each position would be 4 GiB and seconds, and a count of them more than there is."""
    length = 2**32
    ops.layout_check(torch.tensor([[0, 0, 1, 0, length]]), length, 1)
    with pytest.raises(RuntimeError, match="exactly once"):
        ops.layout_check(torch.tensor([[0, 0, 1, 0, 5]]), length, 1)
    assert Layout.striped(2**31 - 1, 64).world_size == 64
    with pytest.raises(LayoutError, match="exactly once"):
        Layout.from_runs([[(0, 1, 0, 2**30)], [(5, 1, 0, 2**30 - 5)]])
