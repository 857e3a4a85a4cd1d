"""Recurrent layers in the heads scheme: bit for bit one process, in any layout; what travels; which scheme is chosen.

Shape letters: B batch, S global tokens, H heads, G heads of q and k, K key dim, V value dim, W ranks.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import test_recurrent_ranks as ranks
import torch
import torch.distributed as dist
from pool import run_ranks
from ringtile import InputError, IntervalMask, Layout, LoopbackWorld, RefusedError, RingMismatchError, ShardedSequence
from ringtile.planner.recurrent_layer import cost, size_of
from ringtile.recurrent.documents import Forest
from scan_oracle import PARAMETERS, Layer, layer, problem
from test_recurrent_ranks import CASES, ROWS, SEQ_LEN, assert_close, bytes_sent, of_ranks, on_rank

H, G, K, V = 8, 4, 3, 5
KINDS = {"delta": "gated_delta", "kda": "kda", "ssd": "ssd", "ssd of groups": "ssd", "selective": "selective"}
ADDED = {  # by several ranks
    "kda": {"q", "k"},
    "ssd": {"B", "C", "A", "D"},
    "ssd of groups": {"A"},
    "selective": {"B", "C", "A", "D"},
    "delta": set(),
}
NAMES = [*KINDS]


def case(name: str, scheme: str | None = "heads") -> Layer:
    """Of groups there is no D."""
    groups = G if name in ("delta", "ssd of groups") else 1
    of_name = layer(name.removesuffix(" of groups"), H, groups, K, V, H)._replace(of_ranks={"scheme": scheme})
    if name == "ssd of groups":
        del of_name.shapes["D"]
    return of_name


def layout_of(name: str, world_size: int) -> Layout:
    if name == "uneven":
        bounds = [0, 7, *(40 + rank for rank in range(world_size - 2)), SEQ_LEN]
        return Layout.from_runs([[(a, 1, 0, b - a)] for a, b in itertools.pairwise(bounds)])
    return ranks.LAYOUTS[name] if name in ("many", "one rank") else Layout.named(name, SEQ_LEN, world_size)


QUICK = [("delta", "zigzag", 3, "two rows", torch.bfloat16), ("kda", "striped", 3, "padded", torch.float32)]
QUICK += [
    ("kda", "one rank", 1, "one row", torch.float32),
    ("ssd", "uneven", 4, "one row", torch.float64),
    ("ssd of groups", "zigzag", 2, "two rows", torch.float32),
    ("selective", "zigzag", 3, "two rows", torch.float32),
]
CELLS = [
    pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.long)
    for cell in itertools.product(
        NAMES,
        ("contiguous", "zigzag", "striped", "uneven", "many", "one rank"),
        (1, 2, 3, 4),
        ROWS,
        (torch.float64, torch.float32, torch.bfloat16),
    )
    if {"many": 3, "one rank": 1}.get(cell[1], cell[2]) == cell[2] and (cell[2] > 1 or cell[1] == "one rank")
]


@pytest.mark.parametrize(("name", "layout", "world_size", "rows", "dtype"), CELLS)
def test_heads_are_one_process_bit_for_bit(
    name: str, layout: str, world_size: int, rows: str, dtype: torch.dtype
) -> None:
    """Uneven shares too: 4 head groups over 3 ranks.

    Gradients that ranks add are the same up to that sum's order.
    """
    lengths = ROWS[rows]
    padding = SEQ_LEN - sum(lengths[0])
    tensors = {n: x.to(dtype) for n, x in problem(case(name), len(lengths), SEQ_LEN).items()}
    for n, x in tensors.items():
        if n not in PARAMETERS:
            x[:, -padding:] = float("nan")
    dout = torch.randn(len(lengths), SEQ_LEN, *case(name).of_out).to(dtype)
    mask = IntervalMask.documents(lengths).padded(padding)
    out, gradients = of_ranks(case(name), tensors, dout, mask, layout_of(layout, world_size))
    alone, of_one = of_ranks(case(name, "states"), tensors, dout, mask, Layout.contiguous(SEQ_LEN, 1))
    assert torch.equal(out, alone)
    assert gradients.keys() == tensors.keys()
    for n, gradient in gradients.items():
        if n not in ADDED[name]:
            assert torch.equal(gradient, of_one[n]), n
        elif dtype == torch.float64:
            assert_close(gradient, of_one[n])


def test_what_ranks_add_is_summed_in_float32() -> None:
    """Equal heads, of which those of the other ranks have a 1024th of the first one's dout: a rank's share is less than
    half an ulp, in bfloat16, of the gradient of a B that all heads share, that of three is more."""
    of_case = case("ssd")
    tensors = {n: x.bfloat16() for n, x in problem(of_case, 1, SEQ_LEN).items()}
    for n, dim in (("x", 2), ("dt", 2), ("A", 0), ("D", 0)):
        tensors[n] = tensors[n].narrow(dim, 0, 1).expand_as(tensors[n]).contiguous()
    dout = torch.randn(1, SEQ_LEN, 1, V).bfloat16() * torch.tensor([1, 0, *6 * [2.0**-10]]).bfloat16()[:, None]
    mask = IntervalMask.causal(SEQ_LEN)
    douts = (dout * (torch.arange(H) == 0)[:, None], dout)
    first, summed = (of_ranks(of_case, tensors, x, mask, Layout.zigzag(SEQ_LEN, 4))[1] for x in douts)
    for n in ("B", "C"):
        assert torch.equal(summed[n], (first[n].float() * (1 + 3 * 2.0**-9)).bfloat16())


IN_EVERY_RUN = [("states", "zigzag"), ("heads", "striped")]


@pytest.mark.parametrize(
    ("name", "scheme", "layout"),
    [
        pytest.param(name, *cell, marks=() if cell in IN_EVERY_RUN else pytest.mark.long)
        for name in ("convolution", *NAMES)
        for cell in (*IN_EVERY_RUN, ("states", "contiguous"), ("states", "many"), ("heads", "zigzag"))
        if name != "convolution" or cell[0] == "states"
    ],
)
def test_documents_do_not_reach_each_other(name: str, scheme: str, layout: str) -> None:
    """Another second document of three: no bit of the others' outputs and gradients changes. There is no decay."""
    of_name = CASES[name] if name == "convolution" else case(name, scheme)
    mask, results = IntervalMask.documents([[10, 24, 14]]), []
    dout = torch.randn(1, SEQ_LEN, *of_name.of_out, dtype=torch.float64)
    for shift in (0.0, 1.0):
        tensors = problem(of_name, 1, SEQ_LEN, 0.0)
        for n, x in tensors.items():
            if n not in PARAMETERS:
                x[:, 10:34] += shift
        out, gradients = of_ranks(of_name, tensors, dout, mask, layout_of(layout, 3))
        results.append({"out": out} | {n: x for n, x in gradients.items() if n not in PARAMETERS})
    assert not torch.equal(results[0]["out"][:, 10:34], results[1]["out"][:, 10:34])
    for n, x in results[0].items():
        for of_others in (slice(0, 10), slice(34, None)):
            assert torch.equal(x[:, of_others], results[1][n][:, of_others]), n


# ---- what travels -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "seq_len"),
    [
        *((name, 64) for name in NAMES),
        *(pytest.param(name, n, marks=pytest.mark.long) for name in NAMES for n in (1024, 4096, 16384)),
    ],
)
def test_bytes_are_as_planned(name: str, seq_len: int) -> None:
    """In both schemes, of uneven shares: 4 head groups, or 8, over 3 ranks."""
    mask, layout = IntervalMask.documents([seq_len // 4, 3 * seq_len // 4]), Layout.zigzag(seq_len, 3)
    groups, value_dim = G if name in ("delta", "ssd of groups") else 1, 1 if name == "selective" else V
    size = size_of(KINDS[name], H, groups, K, value_dim, torch.float32, batch=2)
    for scheme in ("states", "heads"):
        planned = cost(scheme, Forest.of(mask), layout, size)
        assert bytes_sent(case(name, scheme), 2, mask, layout) == list(zip(*planned, strict=True))


# ---- which scheme -------------------------------------------------------------------------------


def scheme_run(name: str, scheme: str | None, of_sequence: str, world_size: int, mask: IntervalMask) -> str:
    """By what travels: in states as much as planned, in heads more."""
    layout = Layout.contiguous(SEQ_LEN, world_size)
    tensors = problem(case(name), 1, SEQ_LEN)

    def rank(group: Any) -> int:
        sequence = ShardedSequence(mask, layout, group, scheme=of_sequence)
        return on_rank(case(name, scheme), tensors, sequence)[2][0]

    size = size_of(KINDS[name], H, G if name == "delta" else 1, K, V, torch.float64, batch=1)
    total = sum(LoopbackWorld(world_size).run(rank))
    by_scheme = {sum(cost("states", Forest.of(mask), layout, size).forward_sent): "states"}
    if world_size <= size.num_head_groups:
        by_scheme[sum(cost("heads", Forest.of(mask), layout, size).forward_sent)] = "heads"
    return by_scheme[total]


def test_the_scheme_is_the_one_asked_for_or_the_attentions() -> None:
    causal = IntervalMask.causal(SEQ_LEN)
    assert scheme_run("kda", None, "ring", 2, causal) == "states"
    assert scheme_run("kda", None, "all_gather", 2, causal) == "states"
    assert scheme_run("kda", None, "ulysses", 2, causal) == "heads"
    assert scheme_run("kda", None, "usp:2", 4, causal) == "states"
    assert scheme_run("kda", "states", "ulysses", 2, causal) == "states"
    assert scheme_run("kda", "heads", "ring", 2, causal) == "heads"
    assert scheme_run("delta", None, "ulysses", 6, causal) == "states"  # there are 4 groups


def test_auto_passes_states_where_they_can_follow_the_layout() -> None:
    """Whatever the sequence's own scheme; their bytes do not grow with the sequence."""
    causal = IntervalMask.causal(SEQ_LEN)
    assert scheme_run("kda", "auto", "ulysses", 2, causal) == "states"
    assert scheme_run("delta", "auto", "ulysses", 6, causal) == "states"  # there are 4 groups
    striped = Layout.striped(SEQ_LEN, 2)  # no state can follow
    tensors = problem(case("delta"), 1, SEQ_LEN)
    dout = torch.randn(1, SEQ_LEN, *case("delta").of_out, dtype=torch.float64)
    outs = [
        of_ranks(case("delta", scheme), tensors, dout, IntervalMask.causal(SEQ_LEN), striped)[0]
        for scheme in ("auto", "heads")
    ]
    assert torch.equal(*outs)


# ---- refusals -----------------------------------------------------------------------------------


def test_what_the_scheme_cannot_do_is_refused() -> None:
    causal = IntervalMask.causal(SEQ_LEN)

    def said(scheme: str, error: type[Exception], layout: Layout) -> list[str]:
        tensors = problem(case("delta"), 1, SEQ_LEN)

        def rank(group: Any) -> str:
            sequence = ShardedSequence(causal, layout, group)
            with pytest.raises(error) as caught:
                case("delta", scheme).ours({n: sequence.shard(x, 1) for n, x in tensors.items()}, sequence)
            return str(caught.value)

        return LoopbackWorld(layout.world_size).run(rank)

    for message in said("heads", RefusedError, Layout.contiguous(SEQ_LEN, 5)):
        assert "with 4 heads, or groups of heads that share q and k (B and C), over 5 ranks; expected" in message
    for message in said("states", RefusedError, Layout.striped(SEQ_LEN, 2)):
        assert "or the scheme heads" in message
    for message in said("rings", InputError, Layout.contiguous(SEQ_LEN, 2)):
        assert "the scheme is 'rings'; expected states, heads, auto, or None" in message


def ranks_disagree() -> list[str]:
    group, rank = dist.group.WORLD, dist.get_rank()
    sequence = ShardedSequence(IntervalMask.causal(SEQ_LEN), Layout.zigzag(SEQ_LEN, 2), group)
    local = {n: sequence.shard(x, 1) for n, x in problem(case("delta"), 1, SEQ_LEN).items()}
    with pytest.raises(RingMismatchError) as scheme:
        case("delta", ("states", "heads")[rank]).ours(local, sequence)
    with pytest.raises(RingMismatchError) as dtypes:
        case("delta").ours(local | {"g": local["g"].to((torch.float64, torch.float32)[rank])}, sequence)
    local["v"].requires_grad_()
    local["g"].requires_grad_(rank == 1)
    out = case("delta").ours(local, sequence)
    with pytest.raises(RingMismatchError) as needed:
        out.sum().backward()
    local["g"].requires_grad_()
    case("delta").ours(local, sequence).sum().backward()
    assert local["q"].grad is None
    return [str(scheme.value), str(dtypes.value), str(needed.value), str(bool(local["v"].grad.isfinite().all()))]


def test_ranks_that_disagree_are_named() -> None:
    for scheme, dtypes, needed, after in run_ranks(2, ranks_disagree):
        assert "disagree on scheme in call" in scheme
        assert "disagree on dtypes in call" in dtypes
        assert "disagree on inputs that need gradients in call" in needed
        assert after == "True"


def test_a_sequence_that_is_let_go_of_is_freed() -> None:
    sequence = ShardedSequence(IntervalMask.documents([SEQ_LEN]), Layout.contiguous(SEQ_LEN, 1))
    case("delta", None).ours(problem(case("delta"), 1, SEQ_LEN), sequence)
    seen = weakref.ref(sequence)
    del sequence
    gc.collect()
    assert seen() is None
