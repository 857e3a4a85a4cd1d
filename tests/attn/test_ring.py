"""The ring over virtual ranks against attention from its definition, and against itself on one rank.

Shape letters: B batch, S global tokens, N local tokens, H query heads, G kv heads, D head dim, Dv value head dim,
W ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import Attention, dense_attention, dense_gradients
from ringtile import InputError, IntervalMask, Layout, LoopbackWorld, ShardedSequence, ops, ring_attention
from ringtile.transport.loopback import LoopbackGroup, LoopbackTransport
from ringtile.transport.transport import Exchange
from strategies import any_masks, dense, layouts
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Problem(NamedTuple):
    """Global inputs and cotangents."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


def problem(
    batch: int = 1,
    seq_len: int = 48,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = (batch, seq_len)
    tensors = (
        normal(*tokens, num_heads, head_dim),
        normal(*tokens, num_kv_heads, head_dim),
        normal(*tokens, num_kv_heads, v_head_dim),
        normal(*tokens, num_heads, v_head_dim),
    )
    dlse = normal(batch, num_heads, seq_len).to(ops.state_dtype(dtype))
    return Problem(*(x.to(dtype) for x in tensors), dlse)


def run_ring(
    p: Problem, mask: IntervalMask, layout: Layout, scale: float | None = None, softcap: float = 0.0
) -> Attention:
    """The ring on W virtual ranks, forward and backward, put together to global tensors."""

    def on_rank(group: LoopbackGroup) -> Attention:
        rank = group.transport.rank
        q, k, v = (layout.shard(x.detach(), 1, rank).requires_grad_() for x in (p.q, p.k, p.v))
        out, lse = ring_attention(
            q, k, v, ShardedSequence(mask, layout, group), scale=scale, softcap=softcap, return_lse=True
        )
        cotangents = [layout.shard(p.dout, 1, rank), layout.shard(p.dlse, 2, rank)]
        return Attention(out.detach(), lse.detach(), *torch.autograd.grad([out, lse], [q, k, v], cotangents))

    return assemble(LoopbackWorld(layout.world_size).run(on_rank), layout)


def assemble(of_ranks: list[Attention], layout: Layout) -> Attention:
    order = torch.argsort(torch.cat([layout.positions(rank) for rank in range(layout.world_size)]))
    return Attention(
        *(
            torch.cat(pieces, dim=2 if name == "lse" else 1).index_select(2 if name == "lse" else 1, order)
            for name, pieces in zip(Attention._fields, zip(*of_ranks, strict=True), strict=True)
        )
    )


def assert_close(got: Attention, expected: Attention, tolerance: float) -> None:
    """Relative to the largest magnitude of each tensor; -inf only where expected."""
    for name, x, y in zip(Attention._fields, got, expected, strict=True):
        finite = y.isfinite()
        assert torch.equal(x.isfinite(), finite), name
        y, x = y[finite], x.double()[finite]
        error = (x - y).abs().max().item() if y.numel() else 0.0
        assert error <= tolerance * max(1.0, y.abs().max().item() if y.numel() else 0.0), (name, error)


# float64 state: every number is a sum of at most S <= 40 keys (dk: S queries x H / G heads) of products of at most
# D <= 24 terms, so rounding stays below some S D eps = 1e-13 of the largest magnitude; exp and tanh of the kernel are
# good to a few eps of their argument.
FLOAT64_TOLERANCE = 1e-12


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, IntervalMask, Layout, float | None, float]:
    world_size = draw(st.integers(1, 8))
    batch, seq_len = draw(st.integers(1, 2)), draw(st.integers(world_size, 40))
    num_kv_heads = draw(st.integers(1, 3))
    p = problem(
        batch,
        seq_len,
        num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads,
        draw(st.integers(1, 24)),
        draw(st.integers(1, 24)),
        seed=draw(st.integers(0, 1000)),
    )
    scale = draw(st.sampled_from([None, 0.3]))
    softcap = draw(st.sampled_from([0.0, 2.0]))
    return p, draw(any_masks(batch, seq_len)), draw(layouts(seq_len, world_size)), scale, softcap


@given(cases())
@example((problem(seq_len=8), IntervalMask.causal(8), Layout.striped(8, 8), None, 0.0))  # one token a rank
def test_ring_equals_the_definition(case: tuple[Problem, IntervalMask, Layout, float | None, float]) -> None:
    p, mask, layout, scale, softcap = case
    expected = dense_gradients(p.q, p.k, p.v, dense(mask), p.dout, p.dlse, scale, softcap)
    assert_close(run_ring(p, mask, layout, scale, softcap), expected, FLOAT64_TOLERANCE)


MASKS = {
    "full": IntervalMask.full(48),
    "causal": IntervalMask.causal(48),
    "documents": IntervalMask.documents([13, 1, 20, 14]),
    "documents-bidirectional": IntervalMask.documents([13, 1, 20, 14], causal=False),
    "window": IntervalMask.sliding_window(48, 7),
    "prefix": IntervalMask.prefix_lm(48, 11),
    "chunked": IntervalMask.chunked(48, 10),
    "padding": IntervalMask.from_padding(torch.tensor([[0] * 5 + [1] * 43])),
    "tree": IntervalMask.tree([-1, 0, 1, 1, 0, -1, 5, 5], [9, 7, 3, 6, 5, 8, 4, 4]).padded(2),
}


def assert_within_8_ulp(ring: Attention, single: Attention, where: object) -> None:
    """Of the largest magnitude in the row.

    A row of out is what one query and head has. Gradients are sums over S terms that cancel, so a row's own magnitude
    says nothing of its rounding; their row, like that of lse, is one head of one sequence.
    """
    row_dims = {"out": -1, "lse": -1, "dq": (1, 3), "dk": (1, 3), "dv": (1, 3)}
    for field, x, y in zip(Attention._fields, ring, single, strict=True):
        finite = y.isfinite()
        assert torch.equal(finite, x.isfinite())
        x, y = x.where(finite, 0.0), y.where(finite, 0.0)
        ulp = torch.finfo(torch.float32).eps * y.abs().amax(row_dims[field], keepdim=True)
        assert ((x - y).abs() <= 8 * ulp).all(), (field, where, ((x - y).abs() / ulp).max())


def _cells() -> Iterator[Any]:
    """Every mask in zigzag; test_ring_equals_the_definition draws every mask and layout in every run."""
    for name, layout in itertools.product(MASKS, ("contiguous", "zigzag", "striped")):
        of_every_run = layout == "zigzag" or name in ("causal", "documents", "padding")
        yield pytest.param(name, layout, marks=() if of_every_run else pytest.mark.long)


@pytest.mark.parametrize(("name", "layout"), _cells())
def test_ring_does_not_depend_on_the_world_size(name: str, layout: str) -> None:
    """float32: W = 2, 3, 4, 8 against W = 1."""
    p = problem(dtype=torch.float32)
    single = run_ring(p, MASKS[name], Layout.contiguous(48, 1))
    for world_size in (2, 3, 4, 8):
        assert_within_8_ulp(run_ring(p, MASKS[name], Layout.named(layout, 48, world_size)), single, world_size)


@pytest.mark.parametrize("mask", [IntervalMask.causal(512), IntervalMask.full(512)], ids=["causal", "full"])
def test_ring_of_many_tokens_does_not_depend_on_the_world_size(mask: IntervalMask) -> None:
    """Long enough for every round to merge: a log-sum-exp rounded to float32 in between would lose 4 ulp each time."""
    p = problem(1, 512, head_dim=64, v_head_dim=64, dtype=torch.float32)
    single = run_ring(p, mask, Layout.contiguous(512, 1))
    for world_size in (2, 8):
        assert_within_8_ulp(run_ring(p, mask, Layout.zigzag(512, world_size)), single, world_size)


# In float32 the largest error of the other masks is that of a row with two or three keys, where both are exact to 4 ulp
# and chance says whose is larger.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("full", torch.float32), ("causal", torch.float16), ("documents", torch.bfloat16), ("window", torch.float16)]
    + [
        pytest.param(name, dtype, marks=pytest.mark.long)
        for name, dtype in itertools.product(("full", "causal", "documents", "window"), (torch.bfloat16, torch.float16))
    ],
)
def test_ring_is_not_less_exact_than_torch(name: str, dtype: torch.dtype) -> None:
    """max |ours - float64| <= max |torch's attention in the same dtype - float64|, for out, dq, dk, dv."""
    seq_len = 256
    mask = {
        "full": IntervalMask.full(seq_len),
        "causal": IntervalMask.causal(seq_len),
        "documents": IntervalMask.documents([100, 30, 126]),
        "window": IntervalMask.sliding_window(seq_len, 50),
    }[name]
    p = problem(4, seq_len, num_heads=4, num_kv_heads=4, head_dim=64, v_head_dim=64, dtype=dtype)
    exact = dense_gradients(p.q, p.k, p.v, dense(mask), p.dout)
    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (p.q, p.k, p.v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=dense(mask)[:, None])
    torchs = (out, *torch.autograd.grad(out, leaves, p.dout.transpose(1, 2)))
    for world_size in (1, 4):
        ours = run_ring(p._replace(dlse=torch.zeros_like(p.dlse)), mask, Layout.zigzag(seq_len, world_size))
        for field, theirs in zip(("out", "dq", "dk", "dv"), torchs, strict=True):
            expected = getattr(exact, field)
            our_error = (getattr(ours, field).double() - expected).abs().max()
            torch_error = (theirs.detach().transpose(1, 2).double() - expected).abs().max()
            assert our_error <= torch_error, (field, world_size, our_error, torch_error)


# ---- corners of the numbers ---------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    "mask",
    [
        IntervalMask.causal(48),
        IntervalMask.sliding_window(48, 5) & IntervalMask.documents([13, 35]),
        IntervalMask.from_padding(torch.tensor([[0] * 20 + [1] * 28] * 2)),
    ],
)
def test_what_memory_held_leaves_no_trace(mask: IntervalMask, world_size: int) -> None:
    """torch fills what is empty with NaN where algorithms are to be deterministic."""
    p = problem(batch=2, dtype=torch.bfloat16)
    for layout in (Layout.contiguous(48, world_size), Layout.striped(48, world_size)):
        expected = run_ring(p, mask, layout)
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.empty(3).isnan().all()
            poisoned = run_ring(p, mask, layout)
        finally:
            torch.use_deterministic_algorithms(False)
        for x, y in zip(poisoned, expected, strict=True):
            assert not x.isnan().any()
            assert torch.equal(x, y)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_and_inf_stay_where_the_definition_puts_them(poison: float) -> None:
    p = problem()
    p.v[0, 20, 0, 3] = poison
    mask = IntervalMask.documents([13, 20, 15])
    ring = run_ring(p, mask, Layout.zigzag(48, 3))
    expected, _ = dense_attention(p.q, p.k, p.v, dense(mask))
    # The definition multiplies the poison by the exact zeros of the mask; a key that is not attended has no say.
    reached = torch.zeros(48, dtype=torch.bool)
    reached[20:33] = True
    assert torch.equal(ring.out[0].isfinite().all(-1).all(-1), ~reached)
    assert torch.equal(ring.out[0, 20:33].isfinite(), expected[0, 20:33].isfinite())


@pytest.mark.parametrize("scheme", ["ring", "all_gather"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kernel", ["ringtile", "aten"])
def test_scores_of_minus_infinity_alone_weigh_nothing(kernel: str, world_size: int, scheme: str) -> None:
    """As no key does: the first queries attend nothing else, and later ones find the same as without those keys.

    A kernel that reports them as weights would spoil what others merge. And an infinite v leaves no finite number in
    that element of the queries that attend it, whatever their scores, on any number of ranks, and all others as they
    are; aten's kernels may spread it.
    """
    p, mask, layout = problem(v_head_dim=16), IntervalMask.causal(48), Layout.zigzag(48, world_size)
    p.k[:, :24] = -torch.inf
    p.q.abs_()
    expected, of_lse = dense_attention(p.q, p.k, p.v, dense(mask))
    finite = torch.ones_like(expected, dtype=torch.bool)
    if kernel == "ringtile":
        p.v[0, 30, 0, 3] = p.v[0, 10, 0, 5] = torch.inf
        finite[0, 30:, :2, 3] = finite[0, 10:, :2, 5] = False

    def on_rank(group: LoopbackGroup) -> tuple[Tensor, Tensor]:
        sequence = ShardedSequence(mask, layout, group, scheme=scheme)
        q, k, v = (sequence.shard(x.detach(), 1) for x in (p.q, p.k, p.v))
        out, lse = ring_attention(q, k, v, sequence, attention_kernel=kernel, return_lse=True)
        return sequence.unshard(out, 1), sequence.unshard(lse, 2)

    out, lse = LoopbackWorld(world_size).run(on_rank)[0]
    assert torch.equal(out[:, :24][finite[:, :24]], torch.zeros_like(out[:, :24])[finite[:, :24]])
    assert torch.equal(lse[..., :24], torch.full_like(lse[..., :24], -torch.inf))
    torch.testing.assert_close(lse[..., 24:], of_lse[..., 24:], rtol=0, atol=FLOAT64_TOLERANCE)
    assert torch.equal(out.isfinite(), finite)
    torch.testing.assert_close(out[finite], expected[finite], rtol=0, atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kernel", ["ringtile", "aten"])
def test_gradients_of_scores_of_minus_infinity_alone_are_not_finite(kernel: str, world_size: int) -> None:
    """Those of the first document; those of the second one are what they are without it."""
    p, mask, layout = problem(v_head_dim=16), IntervalMask.documents([24, 24]), Layout.zigzag(48, world_size)

    def on_rank(group: LoopbackGroup) -> tuple[Tensor, ...]:
        sequence = ShardedSequence(mask, layout, group)
        *leaves, dout = (sequence.shard(x.detach(), 1).requires_grad_() for x in (p.q, p.k, p.v, p.dout))
        out = ring_attention(*leaves, sequence, attention_kernel=kernel)
        return tuple(sequence.unshard(x, 1) for x in torch.autograd.grad(out, leaves, dout.detach()))

    expected = LoopbackWorld(world_size).run(on_rank)[0]
    p.k[:, :24], p.q[:, :24] = -torch.inf, p.q[:, :24].abs()
    for x, y in zip(LoopbackWorld(world_size).run(on_rank)[0], expected, strict=True):
        assert not x[:, :24].isfinite().any()
        assert torch.equal(x[:, 24:], y[:, 24:])


def test_bits_are_the_same_every_time_and_for_any_number_of_threads() -> None:
    p = problem(batch=2, dtype=torch.float32)
    runs = []
    for num_threads in (1, 1, 2):
        torch.set_num_threads(num_threads)
        runs.append(run_ring(p, MASKS["causal"], Layout.zigzag(48, 3)))
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))


def test_strided_views_go_in_as_they_are() -> None:
    """(B, H, S, D) tensors transposed, as transformers hands them over, and a slice of a fused projection."""
    p = problem(batch=2)
    expected = run_ring(p, MASKS["causal"], Layout.zigzag(48, 2))
    fused = torch.cat([p.q.flatten(2), p.k.flatten(2)], dim=2)
    q, k = fused[:, :, : 4 * 16].unflatten(2, (4, 16)), fused[:, :, 4 * 16 :].unflatten(2, (2, 16))
    v = p.v.transpose(1, 2).contiguous().transpose(1, 2)
    layout = Layout.zigzag(48, 2)

    def on_rank(group: LoopbackGroup) -> Tensor:
        local = [x[:, layout.positions(group.transport.rank)[0] :][:, :12] for x in (q, k, v)]
        head, tail = Layout.from_runs([[(0, 1, 0, 12)], [(12, 1, 0, 12)]]), IntervalMask.causal(24)
        return ring_attention(*local, ShardedSequence(tail, head, group))

    assert q.stride(1) != 4 * 16
    assert v.stride(1) == 8
    half = torch.cat(LoopbackWorld(2).run(on_rank), dim=1)
    torch.testing.assert_close(half, expected.out[:, :24], rtol=0, atol=FLOAT64_TOLERANCE)


# ---- autograd around the ring -------------------------------------------------------------------


def ring_gradients(use: Callable[[Tensor, Tensor, Tensor, LoopbackGroup], Tensor], layout: Layout) -> list[Any]:
    """Gradients of q, k, v by rank, of sum(use(q, k, v, group))."""
    p = problem()

    def on_rank(group: LoopbackGroup) -> list[Tensor | None]:
        leaves = [layout.shard(x, 1, group.transport.rank).requires_grad_() for x in (p.q, p.k, p.v)]
        use(*leaves, group).sum().backward()  # reentrant checkpoints know no torch.autograd.grad
        return [leaf.grad for leaf in leaves]

    return LoopbackWorld(layout.world_size).run(on_rank)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_ring_under_checkpointing_has_the_same_gradients(use_reentrant: bool) -> None:
    layout = Layout.zigzag(48, 2)

    def plain(q: Tensor, k: Tensor, v: Tensor, group: LoopbackGroup) -> Tensor:
        return ring_attention(q, k, v, ShardedSequence(MASKS["causal"], layout, group)).sin()

    def checkpointed(q: Tensor, k: Tensor, v: Tensor, group: LoopbackGroup) -> Tensor:
        out = checkpoint(plain, q, k, v, group, use_reentrant=use_reentrant)
        assert isinstance(out, Tensor)
        return out

    for got, expected in zip(ring_gradients(checkpointed, layout), ring_gradients(plain, layout), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_ring_used_twice_in_one_graph() -> None:
    """Two masks and two layouts of one sequence, one after the other: gradients add up."""
    layout = Layout.zigzag(48, 2)

    def once(name: str) -> Callable[[Tensor, Tensor, Tensor, LoopbackGroup], Tensor]:
        return lambda q, k, v, group: ring_attention(q, k, v, ShardedSequence(MASKS[name], layout, group))

    def twice(q: Tensor, k: Tensor, v: Tensor, group: LoopbackGroup) -> Tensor:
        return once("causal")(q, k, v, group) + once("window")(q, k, v, group)

    causal, window = ring_gradients(once("causal"), layout), ring_gradients(once("window"), layout)
    for rank, got in enumerate(ring_gradients(twice, layout)):
        for x, y, z in zip(got, causal[rank], window[rank], strict=True):
            torch.testing.assert_close(x, y + z, rtol=0, atol=FLOAT64_TOLERANCE)


def test_two_worlds_at_once_do_not_meet() -> None:
    """Two models in two threads, each with ranks, mask and layout of its own."""
    p = problem()
    jobs = [("causal", Layout.zigzag(48, 2)), ("window", Layout.striped(48, 3))]
    with ThreadPoolExecutor(2) as pool:
        rings = list(pool.map(lambda job: [run_ring(p, MASKS[job[0]], job[1]) for _ in range(5)], jobs))
    for (name, layout), results in zip(jobs, rings, strict=True):
        expected = run_ring(p, MASKS[name], layout)
        for result in results:
            assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


# ---- the op -------------------------------------------------------------------------------------


def op_arguments(mask: IntervalMask) -> tuple[Any, ...]:
    p = problem(batch=2, seq_len=6, head_dim=4, v_head_dim=3)
    layout = Layout.contiguous(6, 1)
    q, k, v = (x.requires_grad_() for x in (p.q, p.k, p.v))
    sinks, rows = torch.ones(4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1])
    names = "", "ringtile", "ring"
    return q, k, v, *mask.bounds, layout.tensor, sinks, rows, [0.5, 0.0, 0.3], [1, 2, 3], *names


OF_SIX = [IntervalMask.causal(6), IntervalMask.shared_prefix(2, [2, 2])]


@pytest.mark.parametrize("mask", OF_SIX, ids=["one side", "two sides"])
def test_op_passes_opcheck(mask: IntervalMask) -> None:
    torch.library.opcheck(torch.ops.ringtile.ring_attention.default, op_arguments(mask))


@pytest.mark.parametrize("mask", OF_SIX, ids=["one side", "two sides"])
def test_backward_op_passes_opcheck(mask: IntervalMask) -> None:
    q, k, v, *others = (x.detach() if isinstance(x, Tensor) else x for x in op_arguments(mask))
    out, lse = torch.ops.ringtile.ring_attention(q, k, v, *others)
    arguments = (torch.ones_like(out), torch.zeros_like(lse), out, lse, q, k, v, *others)
    torch.library.opcheck(torch.ops.ringtile.ring_attention_backward.default, arguments)


@pytest.mark.parametrize("name", ["documents", "tree"])
def test_ring_compiles_into_one_graph(name: str) -> None:
    p = problem()
    sequence = ShardedSequence(MASKS[name], Layout.contiguous(48, 1))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q * 2, k, v, sequence).sin()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for function in (layer, compiled):
        leaves = [x.clone().requires_grad_() for x in (p.q, p.k, p.v)]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, p.dout)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# ---- what it refuses ----------------------------------------------------------------------------


THREE_ROWS = ShardedSequence(IntervalMask(*torch.zeros(2, 3, 48, dtype=torch.int32)), Layout.contiguous(48, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 48, 4)}, "q has shape"),
        ({"k": torch.zeros(1, 48, 2, 16)}, "k has dtype torch.float32 but q has torch.float64"),
        ({"v": torch.zeros(1, 48, 2, 8, dtype=torch.float64, device="meta")}, "v is on meta but q is on cpu"),
        ({"q": torch.zeros(1, 48, 3, 16, dtype=torch.float64)}, "multiple of the kv heads"),
        ({"q": torch.zeros(1, 48, 16, 4, dtype=torch.float64).transpose(2, 3)}, "stride 4 in its last dim"),
        ({"q": torch.zeros(1, 47, 4, 16, dtype=torch.float64)}, "q has 47 tokens.*rank 0 48 of 48"),
        ({"sequence": THREE_ROWS}, "mask has 3 rows, the batch 1"),
        ({"scale": torch.nan}, "scale is nan"),
        ({"softcap": -1.0}, "softcap -1"),
        ({"sequence": None}, "mask is a NoneType; expected an IntervalMask"),
        ({"sequence": 3}, "sequence is a int; expected a ShardedSequence, or mask="),
        ({"mask": MASKS["causal"]}, "got a sequence and mask, layout or group"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    p = problem()
    sequence = ShardedSequence(MASKS["causal"], Layout.contiguous(48, 1))
    with pytest.raises(InputError, match=message):
        ring_attention(**{"q": p.q, "k": p.k, "v": p.v, "sequence": sequence, **change})


def test_messages_of_at_most_two_rounds_are_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of one round and partial gradients of another: memory does not grow with the number of ranks."""
    alive: list[int] = []
    exchange = LoopbackTransport.exchange

    def exchange_and_count(self: LoopbackTransport, *arguments: Any) -> Exchange:
        started = exchange(self, *arguments)
        alive.append(len(self._under_way))
        return started

    monkeypatch.setattr(LoopbackTransport, "exchange", exchange_and_count)
    run_ring(problem(), MASKS["causal"], Layout.zigzag(48, 6))
    assert max(alive) == 2
