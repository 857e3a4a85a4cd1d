"""Recurrent layers over ranks: each document alone, joined, whatever the layout; what travels; what is refused.

Shape letters: B batch, S global tokens, C channels, W width, H heads, G heads of q and k, K key dim, V value dim.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import ringtile
import scan_oracle
import torch
import torch.distributed as dist
from pool import Pool, run_ranks
from ringtile import (
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    PeerLostError,
    RefusedError,
    RingMismatchError,
    ShardedSequence,
)
from ringtile.recurrent.documents import Forest, message_bytes, state_passes
from ringtile.transport.groups import transport_of
from torch import Tensor
from torch.nn import functional

Tensors = dict[str, Tensor]


class Case(NamedTuple):
    """A recurrent layer: ours of local tensors and a sequence, the oracle of global ones and of seq_idx."""

    ours: Callable[[Tensors, ShardedSequence], Tensor]
    oracle: Callable[[Tensors, Tensor], Tensor]
    shapes: dict[str, tuple[int, ...]]  # of a token, or of a parameter
    parameters: tuple[str, ...]  # tensors without tokens
    state_numel: int  # of one batch row


def _ours(name: str, **options: Any) -> Callable[[Tensors, ShardedSequence], Tensor]:
    return lambda tensors, sequence: getattr(ringtile, name)(sequence=sequence, **tensors, **options)


def _oracle(name: str, **options: Any) -> Callable[[Tensors, Tensor], Tensor]:
    return lambda tensors, seq_idx: getattr(scan_oracle, name)(
        **tensors, **options, seq_idx=seq_idx, initial_state=None
    )[0]


H, G, K, V, C, W = 4, 2, 3, 5, 6, 4
_DELTA = {"q": (G, K), "k": (G, K), "v": (H, V)}
CASES = {
    "conv": Case(
        _ours("causal_conv1d", activation="silu"),
        _oracle("causal_conv1d", activation="silu"),
        {"x": (C,), "weight": (C, W), "bias": (C,)},
        ("weight", "bias"),
        (W - 1) * C,
    ),
    "delta": Case(
        _ours("gated_delta_rule"),
        _oracle("gated_delta_rule", scale=K**-0.5),
        {**_DELTA, "g": (H,), "beta": (H,)},
        (),
        H * K * V,
    ),
    "kda": Case(
        _ours("gated_delta_rule", scale=0.7),
        _oracle("gated_delta_rule", scale=0.7),
        {**_DELTA, "q": (1, K), "k": (1, K), "g": (H, K), "beta": (H,)},
        (),
        H * K * V,
    ),
    "ssd": Case(
        _ours("ssd"),
        _oracle("ssd"),
        {"x": (H, V), "dt": (H,), "B": (1, K), "C": (1, K), "A": (H,), "D": (H,)},
        ("A", "D"),
        H * K * V,
    ),
    "selective": Case(
        _ours("selective_scan"),
        _oracle("selective_scan"),
        {"x": (C,), "dt": (C,), "B": (K,), "C": (K,), "A": (C, K), "D": (C,)},
        ("A", "D"),
        C * K,
    ),
}


def problem(case: Case, batch: int, seq_len: int, decay: float = 0.5) -> Tensors:
    """Random global tensors. decay: how strong the largest is, as the logarithm of what it leaves."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in case.shapes.items():
        size = shape if name in case.parameters else (batch, seq_len, *shape)
        x = torch.randn(size, generator=generator, dtype=torch.float64)
        if name == "g":
            x = -decay * x.abs()
        elif name == "A":
            x = -decay * (1 + x.abs())
        elif name in ("dt", "beta"):
            x = x.sigmoid()
        elif name == "k":
            x = functional.normalize(x, dim=-1)
        tensors[name] = x
    return tensors


def of_ranks(case: Case, tensors: Tensors, dout: Tensor, mask: IntervalMask, layout: Layout) -> tuple[Tensor, Tensors]:
    """out and the gradients of all tensors, from the ranks of a loopback world."""

    def rank(group: Any) -> tuple[Tensor, Tensors]:
        sequence = ShardedSequence(mask, layout, group)
        local = {
            name: (x.clone() if name in case.parameters else sequence.shard(x, 1)).detach().requires_grad_()
            for name, x in tensors.items()
        }
        out = case.ours(local, sequence)
        out.backward(sequence.shard(dout, 1))
        return out.detach(), {name: x.grad for name, x in local.items() if x.grad is not None}

    results = LoopbackWorld(layout.world_size).run(rank)
    gradients = {}
    for name in tensors:
        of_rank = [gradient[name] for _, gradient in results]
        gradients[name] = sum(of_rank[1:], of_rank[0]) if name in case.parameters else joined(of_rank, layout)
    return joined([out for out, _ in results], layout), gradients


def joined(shards: list[Tensor], layout: Layout) -> Tensor:
    positions = torch.cat([layout.positions(rank) for rank in range(layout.world_size)])
    return torch.cat(shards, 1)[:, positions.argsort()]


def of_oracle(case: Case, tensors: Tensors, dout: Tensor, seq_idx: Tensor) -> tuple[Tensor, Tensors]:
    """The same, token by token in one process."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out = case.oracle(leaves, seq_idx)
    out.backward(dout)
    return out.detach(), {name: x.grad for name, x in leaves.items() if x.grad is not None}


def seq_idx_of(rows: list[list[int]], seq_len: int, first: int = 1) -> Tensor:
    """int32 (B, S): documents of these lengths, the first one's number, then padding."""
    seq_idx = torch.full((len(rows), seq_len), -1, dtype=torch.int32)
    for row, lengths in enumerate(rows):
        seq_idx[row, : sum(lengths)] = torch.repeat_interleave(torch.tensor(lengths)).int() + first
    return seq_idx


# The first is cut within documents, at their ends (positions 8 and 16 of 48 over 3 ranks), in documents of one token.
ROWS = {"two rows": [[5, 3, 1, 1, 20, 16], [46]], "one row": [[8, 24, 14]], "cut nowhere": [[8, 8, 8, 8, 8, 6]]}
ROWS["padded"] = [[19, 2]]  # whole pieces are padding
SEQ_LEN = 48
LAYOUTS = {
    "contiguous": Layout.contiguous(SEQ_LEN, 3),
    "zigzag": Layout.zigzag(SEQ_LEN, 3),
    "many": Layout.from_runs(  # runs shorter than a convolution, in no order, of neighbors on one rank too
        [
            [(40, 1, 0, 8), (0, 1, 8, 5)],
            [(5, 1, 0, 1), (7, 1, 1, 1), (10, 1, 2, 20)],
            [(6, 1, 0, 1), (30, 1, 1, 10), (8, 1, 11, 2)],
        ]
    ),
    "one rank": Layout.from_runs([[(24, 1, 0, 24), (0, 1, 24, 24)]]),
}
QUICK = [("zigzag", "one row", 300.0), ("contiguous", "cut nowhere", 0.5)]
QUICK += [("many", "two rows", 0.0), ("zigzag", "padded", 0.0)]


CELLS = [  # name, layout, rows, decay: none in growing states, some, strong
    pytest.param(*cell, marks=() if cell[1:] in QUICK else pytest.mark.long)
    for cell in itertools.product(CASES, LAYOUTS, ROWS, (0.0, 0.5, 300.0))
    if cell[0] != "conv" or cell[3] == 0.0
]


@pytest.mark.parametrize(("name", "layout", "rows", "decay"), CELLS)
def test_ranks_compute_each_document_alone(name: str, layout: str, rows: str, decay: float) -> None:
    """To 48 tokens x 64 operations x 2^-52 of the largest number."""
    case, lengths = CASES[name], ROWS[rows]
    padding = SEQ_LEN - sum(lengths[0])
    tensors = problem(case, len(lengths), SEQ_LEN, decay)
    if decay == 0.0 and "beta" in tensors:
        tensors["beta"] = tensors["beta"] + 2  # |1 - beta| > 1: states grow
    for n, x in tensors.items():
        if n not in case.parameters:
            x[:, -padding:] = float("nan")
    dout = torch.randn(len(lengths), SEQ_LEN, *of_out(case), dtype=torch.float64)
    mask = IntervalMask.documents(lengths).padded(padding)
    out, gradients = of_ranks(case, tensors, dout, mask, LAYOUTS[layout])
    finite = {n: x.nan_to_num(0.0) for n, x in tensors.items()}  # the oracle multiplies padding by its gradient of 0
    expected, of_each = of_oracle(case, finite, dout, seq_idx_of(lengths, SEQ_LEN))
    assert_close(out, expected)
    for n, gradient in gradients.items():
        assert_close(gradient, of_each[n])


def of_out(case: Case) -> tuple[int, ...]:
    """The shape of a token's output."""
    return case.shapes.get("v", case.shapes.get("x", ()))


def assert_close(ours: Tensor, expected: Tensor) -> None:
    tolerance = 48 * 64 * 2.0**-52 * float(expected.abs().max())
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "layout", ["zigzag", *(pytest.param(n, marks=pytest.mark.long) for n in ("contiguous", "many"))]
)
@pytest.mark.parametrize("name", CASES)
def test_documents_do_not_reach_each_other(name: str, layout: str) -> None:
    """Another second document of three: no bit of the others' outputs and gradients changes. There is no decay."""
    case, rows = CASES[name], [[10, 24, 14]]
    mask, dout = IntervalMask.documents(rows), torch.randn(1, SEQ_LEN, *of_out(case), dtype=torch.float64)
    results = []
    for shift in (0.0, 1.0):
        tensors = problem(case, 1, SEQ_LEN, 0.0)
        for tensor_name, x in tensors.items():
            if tensor_name not in case.parameters:
                x[:, 10:34] += shift
        out, gradients = of_ranks(case, tensors, dout, mask, LAYOUTS[layout])
        results.append({"out": out} | {n: x for n, x in gradients.items() if n not in case.parameters})
    assert not torch.equal(results[0]["out"][:, 10:34], results[1]["out"][:, 10:34])
    for n, x in results[0].items():
        for of_others in (slice(0, 10), slice(34, None)):
            assert torch.equal(x[:, of_others], results[1][n][:, of_others]), n


# ---- what travels -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        *((name, (64, 512)) for name in CASES),
        *(pytest.param(name, (1024, 4096, 16384), marks=pytest.mark.long) for name in CASES),
    ],
)
def test_bytes_are_as_planned_and_do_not_depend_on_the_length(name: str, lengths: tuple[int, ...]) -> None:
    """The first of two cuts parts two documents, so nothing travels there; the second goes through a document."""
    case, sent = CASES[name], []
    for seq_len in lengths:
        mask = IntervalMask.documents([seq_len // 4, 3 * seq_len // 4])
        layout = Layout.zigzag(seq_len, 2)
        tensors = {n: x.float() for n, x in problem(case, 1, seq_len).items()}

        def rank(group: Any, tensors: Tensors = tensors, mask: Any = mask, layout: Any = layout) -> tuple[int, int]:
            sequence = ShardedSequence(mask, layout, group)
            local = {
                n: (x.clone() if n in case.parameters else sequence.shard(x, 1)).detach().requires_grad_()
                for n, x in tensors.items()
            }
            out = case.ours(local, sequence)
            forward = group.transport.bytes_sent
            out.sum().backward()
            return forward, group.transport.bytes_sent - forward

        sent.append(LoopbackWorld(2).run(rank))
    state_bytes, forest = 4 * case.state_numel, Forest.of(mask)
    assert message_bytes(forest, layout, state_bytes) == {(1, 0): state_bytes}
    assert [(cut.source, cut.target) for cut in state_passes(forest, layout)] == [(1, 0)]
    assert sent == len(lengths) * [[(0, state_bytes), (state_bytes, 0)]]  # forward, backward


# ---- refusals -----------------------------------------------------------------------------------


def test_what_is_refused_and_how() -> None:
    """Wrong tensors and options are drawn by faults/scan_calls.py."""
    case = CASES["delta"]
    tensors = problem(case, 1, SEQ_LEN)
    causal, one = IntervalMask.causal(SEQ_LEN), Layout.contiguous(SEQ_LEN, 1)

    def said(error: type[Exception], mask: Any = causal, layout: Any = one, **changes: Any) -> str:
        with pytest.raises(error) as caught:
            ringtile.gated_delta_rule(**{**tensors, **changes}, mask=mask, layout=layout)
        return str(caught.value)

    assert "token 5 (row 0) attends [1, 6); expected causal documents" in said(
        RefusedError, IntervalMask.sliding_window(SEQ_LEN, 5)
    )
    assert "token 0 (row 0) attends [0, 48)" in said(RefusedError, IntervalMask.full(SEQ_LEN))
    assert "token 0 (row 0) attends [0, 9)" in said(RefusedError, IntervalMask.prefix_lm(SEQ_LEN, 9))
    begin, end = causal.begin.clone(), causal.end.clone()
    begin[0, 7] = end[0, 7] = 0
    assert "token 8 (row 0) attends [0, 9)" in said(RefusedError, IntervalMask(begin, end))  # a document with a hole
    huge = ringtile.gated_delta_rule(**tensors, mask=causal, layout=one, scale=1e200)  # finite, its square is not
    assert huge.isfinite().all()
    assert "the mask has 2 rows, the batch 1" in said(InputError, IntervalMask.documents([[48], [48]]))
    assert "mask is a Tensor" in said(InputError, torch.ones(3))
    with pytest.raises(InputError, match="got a sequence and mask, layout or group"):
        ringtile.gated_delta_rule(**tensors, sequence=ShardedSequence(causal, one), mask=causal)


def rank_refuses() -> list[str]:
    """Rank 1 does what it must not; what each rank is told."""
    group = dist.new_group()
    rank, case = dist.get_rank(), CASES["delta"]
    messages = []

    def call(layout: Layout, mask: IntervalMask, error: type[Exception], scale: float = 1.0, **changes: Any) -> None:
        local = {n: layout.shard(x, 1, rank) for n, x in problem(case, 1, SEQ_LEN).items()} | changes
        with pytest.raises(error) as caught:
            ringtile.gated_delta_rule(**local, mask=mask, layout=layout, group=group, scale=scale)
        messages.append(str(caught.value))

    causal, zigzag = IntervalMask.causal(SEQ_LEN), Layout.zigzag(SEQ_LEN, 2)
    call(Layout.striped(SEQ_LEN, 2), causal, RefusedError)
    call(zigzag, causal, RingMismatchError, scale=1.0 + rank)
    call(zigzag, IntervalMask.documents([20 + rank, 28 - rank]), RingMismatchError)
    call(zigzag, causal, InputError if rank else RingMismatchError, **({"beta": torch.zeros(3)} if rank else {}))
    out = [None]
    for forward in (True, False):  # rank 1 goes backward where rank 0 goes forward
        local = {n: zigzag.shard(x, 1, rank).requires_grad_() for n, x in problem(case, 1, SEQ_LEN).items()}
        if forward or rank == 0:
            with pytest.raises(RingMismatchError) if not forward else pytest.MonkeyPatch.context() as caught:
                out[0] = ringtile.gated_delta_rule(**local, mask=causal, layout=zigzag, group=group)
        else:
            with pytest.raises(RingMismatchError) as caught:
                out[0].sum().backward()  # type: ignore[union-attr]
    messages.append(str(caught.value))  # type: ignore[union-attr]
    return messages


def test_ranks_that_disagree_are_named() -> None:
    for rank, (striped, scale, mask, refused, order) in enumerate(run_ranks(2, rank_refuses)):
        assert "holds every 2th token; expected runs of neighboring tokens" in striped
        assert f"disagree on scale in call 2 (gated_delta_rule forward): rank {rank} has {1.0 + rank}" in scale
        assert "disagree on mask digest" in mask
        assert "beta is (3,); expected (1, 24, 4)" in refused
        assert f"rank {rank} has gated_delta_rule {'backward' if rank else 'forward'}" in order


@pytest.fixture
def fresh_pool() -> Iterator[Callable[[int], Pool]]:
    pools: list[Pool] = []
    yield lambda size: pools.append(Pool(size)) or pools[-1]  # type: ignore[func-returns-value]
    for pool in pools:
        pool.close()


def scan_with_victim(direction: str) -> str:
    """Rank 1 of 3 is killed before it hands its state on; what the others are told."""
    transport, rank = transport_of(dist.group.WORLD), dist.get_rank()
    layout, case = Layout.contiguous(SEQ_LEN, 3), CASES["delta"]
    start_messages = transport.exchange

    def fatal(sends: Any, receives: Any, what: str) -> Any:
        if sends and transport._op.endswith(direction):
            os.kill(os.getpid(), signal.SIGKILL)
        return start_messages(sends, receives, what)

    if rank == 1:
        transport.exchange = fatal  # type: ignore[method-assign]
    local = {n: layout.shard(x, 1, rank).requires_grad_() for n, x in problem(case, 1, SEQ_LEN).items()}
    sequence = ShardedSequence(IntervalMask.causal(SEQ_LEN), layout, dist.group.WORLD)
    try:
        for _ in range(2):  # a rank that needs no other one is in the next call by then
            case.ours(local, sequence).sum().backward()
    except PeerLostError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_killed_rank_is_named(fresh_pool: Callable[[int], Pool], direction: str) -> None:
    outcomes = fresh_pool(3).outcomes(scan_with_victim, direction)
    assert isinstance(outcomes.pop(1), EOFError)
    for rank, message in zip((0, 2), outcomes, strict=True):
        expected = rf"rank 1 was lost in .* of call . \(gated_delta_rule (forward|backward)\) of rank {rank}: "
        assert re.match(expected, message), message
