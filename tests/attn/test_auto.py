"""Schemes that a call resolves: `auto` by the bytes of its candidates, alike on all ranks and still exact; `usp`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_calls import FLOAT64_TOLERANCE, MASKS, SEQ_LEN, assert_close, problem, run, run_ring
from ringtile import (
    Config,
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RingMismatchError,
    ShardedSequence,
    plan_attention,
    ring_attention,
)
from ringtile import scheme as schemes
from ringtile.cli import main
from ringtile.sequence.plan import Shape, cheapest
from ringtile.transport.loopback import LoopbackGroup


def on_hosts(names: tuple[str, ...], function: Callable[[LoopbackGroup], Any]) -> list[Any]:
    """Run ranks that take themselves for those of these hosts."""

    def on_rank(group: LoopbackGroup) -> Any:
        group.transport.hosts = tuple(map(names.index, names))
        return function(group)

    return LoopbackWorld(len(names)).run(on_rank)


def received(mask: IntervalMask, hosts: tuple[int, ...], shape: Shape, scheme: str, layout: Layout) -> int:
    """By the definition: what the busiest rank receives of other hosts; of all ranks where there is one host."""
    of_scheme = plan_attention(
        mask,
        layout,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        scheme=scheme,
    )
    forward, backward = of_scheme.sent_bytes
    ranks = range(len(hosts))
    return max(
        sum(
            int(forward[sender, rank] + backward[sender, rank])
            for sender in ranks
            if hosts[sender] != hosts[rank] or len(set(hosts)) == 1
        )
        for rank in ranks
    )


@pytest.mark.parametrize("hosts", ["aaaa", "abcd", "aabb"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("mask", ["causal", "full", "window", "documents"])
def test_auto_receives_the_fewest_bytes_over_the_slowest_link(mask: str, heads: tuple[int, int], hosts: str) -> None:
    """The ring when equal; the same on every rank, and by no measuring: nothing is computed, and nothing travels."""
    shape, layout = Shape(1, *heads, 8, 8, torch.float32), Layout.zigzag(SEQ_LEN, 4)
    names = tuple(hosts)
    numbers = tuple(map(names.index, names))

    def on_rank(group: LoopbackGroup) -> tuple[str, int]:
        sequence = ShardedSequence(MASKS[mask], layout, group, scheme="auto")
        return sequence.resolved(shape).scheme, group.transport.bytes_sent

    tried = ["ring", "all_gather", "ulysses", "usp:2"] if hosts == "aabb" else ["ring", "all_gather", "ulysses"]
    expected = min(tried, key=lambda scheme: received(MASKS[mask], numbers, shape, scheme, layout))
    assert on_hosts(names, on_rank) == [(expected, 0)] * 4


def test_auto_takes_each_of_its_candidates_somewhere() -> None:
    """With many kv heads ulysses moves less than a ring of full attention; a narrow window is a ring's."""
    full, window = IntervalMask.full(64), IntervalMask.sliding_window(64, 2)

    def on_rank(group: LoopbackGroup) -> list[str]:
        found = []
        for mask, layout in ((full, Layout.zigzag(64, 4)), (window, Layout.contiguous(64, 4))):
            sequence = ShardedSequence(mask, layout, group, scheme="auto")
            found.append(sequence.resolved(Shape(1, 8, 8, 8, 8, torch.float32)).scheme)
        return found

    assert on_hosts(("a",) * 4, on_rank) == [["ulysses", "ring"]] * 4


@pytest.mark.parametrize("scheme", ["auto", "usp"])
@pytest.mark.parametrize("world_size", [3, 4])
def test_resolved_schemes_equal_one_rank_and_send_what_is_planned(world_size: int, scheme: str) -> None:
    """Over four ranks q, k and v of a share have one shape."""
    p = problem(2, SEQ_LEN, *((6, 2) if world_size == 3 else (4, 2)), 8, 8)
    for mask in ("documents", "padding"):
        layout = Layout.zigzag(SEQ_LEN, world_size)
        ran = run(p, MASKS[mask], layout, scheme)
        assert_close(ran.results, run_ring(p, MASKS[mask], Layout.contiguous(SEQ_LEN, 1)), FLOAT64_TOLERANCE)
        of_schemes = [run(p, MASKS[mask], layout, name).sent for name in ("ring", "ulysses")]
        assert ran.sent in (of_schemes if scheme == "auto" else of_schemes[-1:])


def test_auto_and_another_scheme_are_told_apart() -> None:
    p = problem(1, SEQ_LEN, 4, 2)

    def on_rank(group: LoopbackGroup) -> None:
        scheme = ("auto", "all_gather")[group.transport.rank]
        sequence = ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 2), group, scheme=scheme)
        with pytest.raises(RingMismatchError, match="disagree on scheme"):
            ring_attention(*(sequence.shard(x, 1) for x in (p.q, p.k, p.v)), sequence)

    LoopbackWorld(2).run(on_rank)


def test_bad_arguments_are_refused_before_anything_is_asked() -> None:
    p = problem(1, SEQ_LEN, 4, 2)

    def on_rank(group: LoopbackGroup) -> None:
        sequence = ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 2), group, scheme="auto")
        q, k, v = (sequence.shard(x, 1) for x in (p.q, p.k, p.v))
        with pytest.raises(InputError, match="q has 23 tokens"):
            ring_attention(q[:, 1:], k, v, sequence)
        assert group.transport.bytes_sent == 0

    LoopbackWorld(2).run(on_rank)


def test_virtual_ranks_share_a_host() -> None:
    assert LoopbackWorld(2).run(lambda group: group.transport.find_hosts()) == [(0, 0)] * 2


def test_usp_without_a_number_is_ulysses_inside_hosts() -> None:
    for hosts, expected in (
        ((0, 0, 0, 0), "usp:4"),
        ((0, 0, 2, 2), "usp:2"),
        ((0, 1, 0, 1), "usp:1"),
        ((0, 0, 0, 3), "usp:1"),
        ((0, 0, 2, 2, 2, 2), "usp:2"),
        ((0, 0, 0, 3, 3, 3), "usp:3"),
    ):
        assert schemes.usp_of_hosts(hosts) == expected
        tried = schemes.candidates(hosts, 12, 12)
        assert (expected in tried) == (expected not in ("usp:1", f"usp:{len(hosts)}"))


def test_auto_leaves_no_rank_of_many_hosts_idle() -> None:
    """64 ranks, 8 of a host. ulysses would send least, and half of the ranks would have no head of 32."""
    world_size, seq_len = 64, 64 * 16
    hosts, mask = tuple(rank // 8 for rank in range(world_size)), IntervalMask.causal(seq_len)
    layout = Layout.zigzag(seq_len, world_size)
    for num_kv_heads in (8, 4, 2):
        shape = Shape(1, 32, num_kv_heads, 128, 128, torch.bfloat16)
        names = ("ring", "ulysses", "usp:2", "usp:4", "usp:8")
        over_network = {name: received(mask, hosts, shape, name, layout) for name in names}
        # Of 56 ranks: keys twice, 2 bytes a number, and gradients back, 4; of each pair of chunks three of four travel.
        assert over_network["ring"] == 56 * 16 * num_kv_heads * 256 * 6
        for size in (2, 4, 8):
            assert over_network[f"usp:{size}"] == over_network["ring"] // min(size, num_kv_heads)
        assert over_network["ulysses"] < over_network["ring"]
        assert cheapest(mask, layout, shape, hosts) == f"usp:{num_kv_heads}"  # the fewest that send so little
    assert schemes.candidates(hosts, 32, 8) == ["ring", "usp:2", "usp:4", "usp:8"]
    assert schemes.candidates(hosts, 64, 8) == ["ring", "ulysses", "usp:2", "usp:4", "usp:8"]
    assert schemes.candidates((0,) * 6, 8, 8) == ["ring"]  # 2, 2, 1, 1, 1, 1 heads


def test_plan_of_a_scheme_to_resolve_is_refused() -> None:
    Config(context_parallel_size=4, context_parallel_scheme="usp")
    for scheme in ("auto", "usp"):
        with pytest.raises(InputError, match=f"the scheme is {scheme}, which depends on the ranks' hosts; expected"):
            plan_attention(
                *(MASKS["causal"], Layout.zigzag(SEQ_LEN, 2)),
                **{"num_heads": 4, "num_kv_heads": 4, "head_dim": 8},
                dtype=torch.float32,
                scheme=scheme,
            )


# ---- the command line ---------------------------------------------------------------------------


def test_plan_shows_every_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "plan --seq-len 64 --world-size 4 --num-heads 8 --head-dim 8 --dtype float32 --ranks-per-host 2"
    command = [*sizes.split(), "--rates", "1e9,1e9,1e6", "--json", str(tmp_path / "plan.json")]
    assert main([*command, "--scheme", "usp"]) == 0
    report = json.loads((tmp_path / "plan.json").read_text())
    names = [scheme["scheme"] for scheme in report["schemes"]]
    assert names == ["ring", "all_gather", "usp:2", "ulysses"]
    chosen = next(scheme for scheme in report["schemes"] if scheme["scheme"] == report["scheme"])
    assert report["scheme"] == "usp:2"
    assert chosen["bytes_within"] + chosen["bytes_between"] == report["forward_bytes"] + report["backward_bytes"]
    # Zigzag over two groups: as much work on every rank, and as many bytes.
    flops = report["forward_flops"] + report["backward_flops"]
    assert chosen["computing_s"] == pytest.approx(flops / 4 / 1e9)
    sent = chosen["bytes_within"] / 1e9 + chosen["bytes_between"] / 1e6
    assert sent / 4 <= chosen["sending_s"] < sent
    assert chosen["together_s"] == pytest.approx(chosen["computing_s"] + chosen["exposed_s"])
    assert sum(round["mean"] for round in chosen["rounds"]) == pytest.approx(chosen["computing_s"])
    printed = capsys.readouterr().out
    assert f"*  {chosen['scheme'].rjust(10)}" in printed
    assert "Rounds of usp:2, forward and backward:" in printed
    assert main([*command, "--scheme", "auto"]) == 0
    assert "*     ulysses" in capsys.readouterr().out
    for wrong in (["--ranks-per-host", "0"], ["--rates", "fast"], ["--rates", "1"], ["--rates", "1e-300,1e9"]):
        assert main([*command, *wrong]) == 2
        assert "expected" in capsys.readouterr().err
