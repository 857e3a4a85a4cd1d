"""Recurrent layers over ranks: each document alone, joined, whatever the layout; what travels; what is refused.

Shape letters: B batch, S global tokens, C channels, H heads, G heads of q and k, K key dim, V value dim.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import signal
from collections.abc import Sequence
from typing import Any

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
from scan_oracle import KINDS, PARAMETERS, Layer, Tensors, layer, problem
from torch import Tensor

H, G, K, V, C = 4, 2, 3, 5, 6
CASES = {
    kind: layer(kind, H, G if kind == "delta" else 1, K, V, C, **({"scale": 0.7} if kind == "kda" else {}))
    for kind in KINDS
}


def on_rank(
    case: Layer, tensors: Tensors, sequence: ShardedSequence, dout: Tensor | None = None
) -> tuple[Tensor, Tensors, tuple[int, int]]:
    """This rank's output, gradients, and bytes sent forward and backward. dout: None for that of the output's sum."""
    local = {
        name: (x.clone() if name in PARAMETERS else sequence.shard(x, 1)).detach().requires_grad_()
        for name, x in tensors.items()
    }
    transport = sequence.transport
    begin = transport.bytes_sent
    out = case.ours(local, sequence)
    middle = transport.bytes_sent
    out.backward(torch.ones_like(out) if dout is None else sequence.shard(dout, 1))
    gradients = {name: x.grad for name, x in local.items() if x.grad is not None}
    return out.detach(), gradients, (middle - begin, transport.bytes_sent - middle)


def of_ranks(
    case: Layer, tensors: Tensors, dout: Tensor | None, mask: IntervalMask, layout: Layout
) -> tuple[Tensor, Tensors]:
    """out and the gradients of all tensors, from the ranks of a loopback world."""
    of_each = LoopbackWorld(layout.world_size).run(
        lambda group: on_rank(case, tensors, ShardedSequence(mask, layout, group), dout)
    )
    return together(of_each, layout)


def together(of_each: list[tuple[Tensor, Tensors, tuple[int, int]]], layout: Layout) -> tuple[Tensor, Tensors]:
    outs, gradients, _ = zip(*of_each, strict=True)
    whole = {}
    for name in gradients[0]:
        of_rank = [each[name] for each in gradients]
        whole[name] = sum(of_rank[1:], of_rank[0]) if name in PARAMETERS else joined(of_rank, layout)
    return joined(outs, layout), whole


def bytes_sent(case: Layer, batch: int, mask: IntervalMask, layout: Layout) -> list[tuple[int, int]]:
    """By rank, in the forward and in the backward, in float32."""
    tensors = {name: x.float() for name, x in problem(case, batch, layout.seq_len).items()}
    return LoopbackWorld(layout.world_size).run(
        lambda group: on_rank(case, tensors, ShardedSequence(mask, layout, group))[2]
    )


def joined(shards: Sequence[Tensor], layout: Layout) -> Tensor:
    positions = torch.cat([layout.positions(rank) for rank in range(layout.world_size)])
    return torch.cat(shards, 1)[:, positions.argsort()]


def of_oracle(case: Layer, tensors: Tensors, dout: Tensor, seq_idx: Tensor) -> tuple[Tensor, Tensors]:
    """The same, token by token in one process."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out, _ = case.alone(scan_oracle, leaves, seq_idx)
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
    if cell[0] != "convolution" or cell[3] == 0.0
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
        if n not in PARAMETERS:
            x[:, -padding:] = float("nan")
    dout = torch.randn(len(lengths), SEQ_LEN, *case.of_out, dtype=torch.float64)
    mask = IntervalMask.documents(lengths).padded(padding)
    out, gradients = of_ranks(case, tensors, dout, mask, LAYOUTS[layout])
    expected, of_each = of_oracle(case, tensors, dout, seq_idx_of(lengths, SEQ_LEN))
    assert_close(out, expected)
    for n, gradient in gradients.items():
        assert_close(gradient, of_each[n])


def test_the_gradient_of_a_parameter_is_summed_over_stretches_in_float32() -> None:
    """That of D by each token is dout x, of 8 channels: 8 by the last, which comes first, and an 512th of that by the
    32 others, less than half an ulp of it in bfloat16. Each is a stretch."""
    case = layer("ssd", 1, 1, K, 8, C)
    tensors = {name: x.bfloat16() for name, x in problem(case, 1, 33).items()}
    tensors["x"].fill_(1)
    dout = torch.full_like(tensors["x"], 2.0**-9)
    dout[:, -1] = 1
    layout = Layout.from_runs([[(32 - i, 1, i, 1) for i in range(33)]])
    _, gradients = of_ranks(case, tensors, dout, IntervalMask.causal(33), layout)
    assert gradients["D"].tolist() == [8 + 32 / 64]


def assert_close(ours: Tensor, expected: Tensor) -> None:
    tolerance = 48 * 64 * 2.0**-52 * float(expected.abs().max())
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)


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
        sent.append(bytes_sent(case, 1, mask, layout))
    state_bytes, forest = 4 * math.prod(case.state), Forest.of(mask)
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


@pytest.mark.parametrize("direction", [pytest.param("forward", marks=pytest.mark.long), "backward"])
def test_a_killed_rank_is_named(direction: str) -> None:
    with contextlib.closing(Pool(3)) as pool:
        outcomes = pool.outcomes(scan_with_victim, direction)
    assert isinstance(outcomes.pop(1), EOFError)
    for rank, message in zip((0, 2), outcomes, strict=True):
        expected = rf"rank 1 was lost in .* of call . \(gated_delta_rule (forward|backward)\) of rank {rank}: "
        assert re.match(expected, message), message
