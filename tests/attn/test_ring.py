"""The ring beside the table of test_attention_table.py: many tokens, exactness beside torch, corners of the numbers,
autograd around it, its op, what it refuses.

Shape letters: B batch, S global tokens, N local tokens, H query heads, G kv heads, D head dim, W ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accuracy import assert_not_less_exact, assert_within_ulp
from attention_calls import FLOAT64_TOLERANCE, MASKS, Problem, assert_close, problem, run, run_ring
from oracle import Attention, dense_attention, gradients_with_sinks
from pool import run_ranks
from ringtile import InputError, IntervalMask, Layout, LoopbackWorld, ShardedSequence, ring_attention
from ringtile.transport.loopback import LoopbackGroup, LoopbackTransport
from ringtile.transport.transport import Exchange
from strategies import dense
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@pytest.mark.parametrize("mask", [IntervalMask.causal(512), IntervalMask.full(512)], ids=["causal", "full"])
def test_ring_of_many_tokens_does_not_depend_on_the_world_size(mask: IntervalMask) -> None:
    """Long enough for every round to merge: a log-sum-exp rounded to float32 in between would lose 4 ulp each time."""
    p = problem(1, 512, head_dim=64, v_head_dim=64, dtype=torch.float32)
    single = run_ring(p, mask, Layout.contiguous(512, 1))
    for world_size in (2, 8):
        assert_within_ulp(run_ring(p, mask, Layout.zigzag(512, world_size)), single, 8, torch.float32)


EXACT = {
    "full": IntervalMask.full(256),
    "causal": IntervalMask.causal(256),
    "documents": IntervalMask.documents([100, 30, 126]),
    "window": IntervalMask.sliding_window(256, 50),
    "tree": IntervalMask.tree([-1, 0, 1, 1, 0, 4], [100, 40, 30, 26, 20, 40]),
    "sinks": IntervalMask.causal(256),
}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
OF_EVERY_RUN = [  # mask, dtype, kv heads, head dim
    *(("full", F32, 4, 64), ("causal", F16, 4, 64), ("documents", BF16, 4, 64), ("window", F16, 4, 64)),
    *(("tree", F32, 4, 64), ("sinks", BF16, 4, 64), ("causal", F32, 4, 128), ("full", F16, 1, 128)),
]
OF_MANY = itertools.product(EXACT, (BF16, F16), (1, 4), (64, 128))


def by_torch(p: Problem, mask: IntervalMask, sinks: Tensor | None) -> list[Tensor]:
    """out, dq, dk, dv by torch's attention; with sinks, and their gradient, as transformers computes them."""
    leaves = [x.clone().requires_grad_() for x in (p.q, p.k, p.v, *([] if sinks is None else [sinks]))]
    q, k, v = (x.transpose(1, 2) for x in leaves[:3])
    if sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense(mask)[:, None], enable_gqa=True)
    else:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        scores = (q @ k.transpose(2, 3) * q.size(3) ** -0.5).masked_fill(~dense(mask)[:, None], -torch.inf)
        scores = torch.cat([scores, leaves[3][:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
        out = scores.softmax(-1)[..., :-1] @ v
    return [out.transpose(1, 2), *torch.autograd.grad(out, leaves, p.dout.transpose(1, 2))]


@pytest.mark.parametrize(
    ("name", "dtype", "num_kv_heads", "head_dim"),
    OF_EVERY_RUN + [pytest.param(*case, marks=pytest.mark.long) for case in OF_MANY if case not in OF_EVERY_RUN],
)
def test_ring_is_not_less_exact_than_torch(name: str, dtype: torch.dtype, num_kv_heads: int, head_dim: int) -> None:
    """out, dq, dk, dv and the gradient of sinks obey the accuracy rule beside torch's attention in the same dtype."""
    mask, sinks = EXACT[name], torch.linspace(-1, 2, 4).to(dtype) if name == "sinks" else None
    p = problem(4, 256, 4, num_kv_heads, head_dim, head_dim, dtype)
    exact, of_sinks = gradients_with_sinks(p.q, p.k, p.v, dense(mask), p.dout, None, sinks)
    torchs = by_torch(p, mask, sinks)
    for world_size in (1, 4):
        ran = run(p, mask, Layout.zigzag(256, world_size), sinks=sinks, of_lse=False)
        rows = [(field, getattr(ran.results, field), getattr(exact, field)) for field in ("out", "dq", "dk", "dv")]
        # Of several ranks, each rounds its own gradient of the sinks.
        rows += [("dsinks", ran.dsinks, of_sinks)] if sinks is not None and world_size == 1 else []
        for (field, ours, expected), theirs in zip(rows, torchs, strict=False):
            assert_not_less_exact(ours, theirs, expected, f"{field} of {world_size}")


# ---- corners of the numbers ---------------------------------------------------------------------


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

    out, lse, *_ = run(p, mask, layout, scheme, attention_kernel=kernel, of_lse=False).results
    assert torch.equal(out[:, :24][finite[:, :24]], torch.zeros_like(out[:, :24])[finite[:, :24]])
    assert torch.equal(lse[..., :24], torch.full_like(lse[..., :24], -torch.inf))
    torch.testing.assert_close(lse[..., 24:], of_lse[..., 24:], rtol=0, atol=FLOAT64_TOLERANCE)
    assert torch.equal(out.isfinite(), finite)
    torch.testing.assert_close(out[finite], expected[finite], rtol=0, atol=FLOAT64_TOLERANCE)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kernel", ["ringtile", "aten"])
def test_gradients_of_scores_of_minus_infinity_alone_are_not_finite(kernel: str, world_size: int) -> None:
    """Those of the first document; those of the second one are what they are without it, if added in another order."""
    p, mask, layout = problem(v_head_dim=16), IntervalMask.documents([24, 24]), Layout.zigzag(48, world_size)

    options = {"attention_kernel": kernel, "return_lse": False}
    _, _, *expected = run(p, mask, layout, **options).results
    p.k[:, :24], p.q[:, :24] = -torch.inf, p.q[:, :24].abs()
    for x, y in zip(run(p, mask, layout, **options).results[2:], expected, strict=True):
        assert not x[:, :24].isfinite().any()
        torch.testing.assert_close(x[:, 24:], y[:, 24:], rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


NOT_FINITE = {  # the tensor, its elements and what they hold, in kv head 0 of token 20
    "an infinite value": ("v", 3, torch.inf),
    "a value that is no number": ("v", 3, torch.nan),
    "an infinite key": ("k", 3, -torch.inf),
    "no number in a key": ("k", 3, torch.nan),
    "a key of no weight": ("k", slice(None), -torch.inf),
}


def where_finite(p: Problem, attend: Tensor) -> Attention:
    """Which elements are finite, by the rule: a score of inf or NaN leaves no number to its query, one of -inf weighs
    nothing, and a value spoils the same element of out. In the backward a query that is spoiled spoils its dq, and dk
    of the keys that it attends; by its score, dv too; and 0 times what is not finite is no number."""
    each = p.q.size(2) // p.k.size(2)
    q, k, v = p.q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(each, 1) for x in (p.k, p.v))
    attend = attend[:, None]
    scores = sum(q[..., None, i] * k[..., None, :, i] for i in range(q.size(3)))
    lost = (attend & ~(scores < torch.inf)).any(-1)
    out = lost[..., None] | (attend[..., None] & ~v.isfinite()[:, :, None]).any(3)
    row = out.any(-1)
    dq = row[..., None] | (attend[..., None] & ~k.isfinite()[:, :, None]).any(3)
    dk, dv = ((attend & x[..., None]).any(2).unflatten(1, (-1, each)).any(2) for x in (row, lost))
    of_keys = (x.transpose(1, 2)[..., None].expand_as(y) for x, y in ((dk, p.k), (dv, p.v)))
    return Attention(*(~x for x in (out.transpose(1, 2), lost, dq.transpose(1, 2), *of_keys)))


@pytest.mark.parametrize("scheme", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("what", NOT_FINITE)
def test_what_is_not_finite_reaches_the_queries_that_attend_it_alone(what: str, world_size: int, scheme: str) -> None:
    """In the same elements for any number of ranks, forward and backward; all others are what they were."""
    p, mask, layout = problem(), MASKS["documents"], Layout.zigzag(48, world_size)
    p.q.abs_()  # so that the scores of a key of -inf are -inf
    options: dict[str, Any] = {"of_lse": False, "attention_kernel": "ringtile"}
    clean = run(p, mask, layout, scheme, **options).results
    name, elements, value = NOT_FINITE[what]
    getattr(p, name)[0, 20, 0, elements] = value
    got, finite = run(p, mask, layout, scheme, **options).results, where_finite(p, dense(mask))
    knows = dense(mask)[0, :, 20]
    for field, x, y, expected in zip(Attention._fields, got, clean, finite, strict=True):
        assert torch.equal(x.isfinite(), expected), field
        alone = expected & ~(dense(mask)[0, knows].any(0) if field in ("dk", "dv") else knows).view(
            (1, 1, -1) if field == "lse" else (1, -1, 1, 1)
        )
        torch.testing.assert_close(x[alone], y[alone], rtol=FLOAT64_TOLERANCE, atol=FLOAT64_TOLERANCE)


def test_messages_around_an_idle_round_keep_their_order() -> None:
    """Rank 2 is idle in round 2 alone: keys of round 3 that left before the gradients of round 1 would be taken for
    them."""
    begin, end = [6, 2, 5, 3, 3, 2, 3, 6], [6, 4, 6, 5, 5, 6, 4, 8]
    mask = IntervalMask(*(torch.tensor([each], dtype=torch.int32) for each in (begin, end)))
    p = problem(seq_len=8, v_head_dim=16)  # keys and gradients of one size
    whole = run_ring(p, mask, Layout.contiguous(8, 1))
    assert_close(run_ring(p, mask, Layout.contiguous(8, 4)), whole, FLOAT64_TOLERANCE)


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


@pytest.mark.parametrize(
    "mask", [pytest.param(OF_SIX[0], marks=pytest.mark.long), OF_SIX[1]], ids=["one side", "two sides"]
)
def test_ops_pass_opcheck(mask: IntervalMask) -> None:
    torch.library.opcheck(torch.ops.ringtile.ring_attention.default, op_arguments(mask))
    q, k, v, *others = (x.detach() if isinstance(x, Tensor) else x for x in op_arguments(mask))
    out, lse = torch.ops.ringtile.ring_attention(q, k, v, *others)
    arguments = (torch.ones_like(out), torch.zeros_like(lse), out, lse, q, k, v, *others)
    torch.library.opcheck(torch.ops.ringtile.ring_attention_backward.default, arguments)


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
        ({"attention_kernel": "cudnn"}, "attention_kernel is 'cudnn'; expected one of auto, ringtile, aten"),
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
