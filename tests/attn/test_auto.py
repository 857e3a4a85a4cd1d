"""Schemes that a call resolves: `auto` by measuring its candidates, alike on all ranks and still exact; `usp`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ringtile import (
    AttentionDropout,
    Config,
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RingMismatchError,
    ShardedSequence,
    plan,
    ring_attention,
)
from ringtile.attn import auto
from ringtile.cli import main
from ringtile.sequence.plan import Shape
from ringtile.transport import measure
from ringtile.transport.loopback import LoopbackGroup
from ringtile.transport.measure import hosts_of
from test_ring import FLOAT64_TOLERANCE, assert_close, problem, run_ring
from test_schemes import MASKS, SEQ_LEN, run_scheme

SHAPE = Shape(1, 4, 4, 8, 8, torch.float64)


@pytest.fixture
def seconds_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, int], float]], None]:
    """Stands for the clock: what a candidate takes, by its scheme and the rank."""

    def install(seconds: Callable[[str, int], float]) -> None:
        def took(run: Any, device: torch.device) -> float:
            sequence = run.args[0].sequence
            return seconds(sequence.scheme, sequence.rank)

        monkeypatch.setattr(measure, "_seconds", took)

    return install


def attend(group: LoopbackGroup, mask: IntervalMask = MASKS["full"], **options: Any) -> str:
    """Make a call and return the scheme that it was resolved to."""
    p = problem(1, mask.seq_len, 4, 4, 8, 8)
    world_size = group.transport.world_size
    sequence = ShardedSequence(mask, Layout.zigzag(mask.seq_len, world_size), group, scheme="auto")
    ring_attention(*(sequence.shard(x, 1) for x in (p.q, p.k, p.v)), sequence, **options)
    kernel, drops = options.get("attention_kernel", "auto"), "dropout" in options
    return auto.known_scheme(sequence, SHAPE, "cpu", kernel, drops)


def test_the_slowest_rank_of_a_scheme_counts(seconds_of: Any) -> None:
    """The ring is fastest on rank 0, but takes longest on rank 1."""
    of_schemes = {"ring": (1.0, 9.0), "all_gather": (2.0, 3.0), "ulysses": (5.0, 1.0)}
    seconds_of(lambda scheme, rank: of_schemes[scheme][rank])
    assert LoopbackWorld(2).run(attend) == ["all_gather"] * 2


@pytest.mark.parametrize(("seconds", "runs"), [(1e-3, 10), (0.02, 6), (1.0, 3)])
def test_candidates_take_turns_and_short_ones_run_more_often(seconds_of: Any, seconds: float, runs: int) -> None:
    """After a run that warms up. What slows the machine for a while, here in one round, decides nothing."""
    ran: list[str] = []

    def took(scheme: str, rank: int) -> float:
        ran.append(scheme)
        slow = 100 if scheme == "ring" and ran.count("ring") == 5 else 1
        return seconds * slow * (0.9 if scheme == "ring" else 1.0)

    seconds_of(lambda scheme, rank: took(scheme, rank) if rank == 0 else 0.0)
    assert LoopbackWorld(2).run(attend) == ["ring"] * 2
    assert ran == ["ring", "all_gather", "ulysses"] * runs


def test_every_candidate_may_be_taken_with_any_kernel_and_dropout(seconds_of: Any) -> None:
    dropout = AttentionDropout(0.1, torch.zeros(1, dtype=torch.int64), 0)
    choices: list[dict[str, Any]] = [{}, {"dropout": dropout}, {"attention_kernel": "aten"}]
    for name in ("ring", "all_gather", "ulysses"):
        seconds_of(lambda scheme, rank, name=name: float(scheme != name))
        for options in choices:
            assert LoopbackWorld(4).run(lambda group, options=options: attend(group, **options)) == [name] * 4


def test_a_kind_is_measured_once_and_masks_of_about_the_same_work_are_one_kind(seconds_of: Any) -> None:
    measured = []

    def seconds(scheme: str, rank: int) -> float:
        measured.append(scheme)
        return 1.0

    seconds_of(seconds)

    def on_rank(group: LoopbackGroup) -> list[int]:
        counts = []
        for lengths in ([1000, 1048], [1000, 1048], [990, 1058], [16] * 128):
            attend(group, IntervalMask.documents(lengths))
            counts.append(len(measured))
        return counts

    assert LoopbackWorld(1).run(on_rank) == [[0] * 4]  # nothing to choose
    of_world = LoopbackWorld(2).run(on_rank)
    once = len(measured) // 2
    assert once == 2 * 3 * 3  # ranks, candidates, runs
    assert of_world[0][-1] == of_world[1][-1] == len(measured)


@pytest.mark.parametrize("scheme", ["auto", "usp"])
def test_resolved_schemes_equal_one_rank_and_send_what_is_planned(scheme: str) -> None:
    """Measuring counts as no payload."""
    p = problem(2, SEQ_LEN, 6, 2)
    for mask in ("documents", "padding"):
        layout = Layout.zigzag(SEQ_LEN, 3)
        result, sent, _ = run_scheme(p, MASKS[mask], layout, scheme)
        expected = run_ring(p, MASKS[mask], Layout.contiguous(SEQ_LEN, 1))
        assert_close(result, expected, FLOAT64_TOLERANCE)
        of_schemes = [run_scheme(p, MASKS[mask], layout, name)[1] for name in auto.candidates((0, 0, 0))]
        assert sent in (of_schemes if scheme == "auto" else of_schemes[-1:])


def test_tensors_that_require_gradients_are_measured() -> None:
    """As in a training; over four ranks q, k and v of a share have one shape. In float64 schemes differ by the order of
    sums of at most SEQ_LEN terms near 1, some 1e-14; a wrong share is off by 0.1."""

    def gradients(group: LoopbackGroup, scheme: str) -> list[torch.Tensor]:
        p = problem(1, SEQ_LEN, 4, 2, 8, 8)
        sequence = ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 4), group, scheme=scheme)
        q, k, v = (sequence.shard(x, 1).requires_grad_() for x in (p.q, p.k, p.v))
        out = ring_attention(q, k, v, sequence)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    of_auto, of_ring = (LoopbackWorld(4).run(functools.partial(gradients, scheme=name)) for name in ("auto", "ring"))
    for ours, expected in zip(of_auto, of_ring, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_auto_and_another_scheme_are_told_apart() -> None:
    p = problem(1, SEQ_LEN, 4, 2)

    def on_rank(group: LoopbackGroup) -> None:
        scheme = ("auto", "ring")[group.transport.rank]
        sequence = ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 2), group, scheme=scheme)
        with pytest.raises(RingMismatchError, match=r"agree on hosts.*ring_attention|ring_attention.*agree on hosts"):
            ring_attention(*(sequence.shard(x, 1) for x in (p.q, p.k, p.v)), sequence)

    LoopbackWorld(2).run(on_rank)


def test_bad_arguments_are_refused_before_anything_is_measured() -> None:
    p = problem(1, SEQ_LEN, 4, 2)

    def on_rank(group: LoopbackGroup) -> None:
        sequence = ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 2), group, scheme="auto")
        q, k, v = (sequence.shard(x, 1) for x in (p.q, p.k, p.v))
        with pytest.raises(InputError, match="q has 23 tokens"):
            ring_attention(q[:, 1:], k, v, sequence)
        assert group.transport.bytes_sent == 0

    LoopbackWorld(2).run(on_rank)


def test_virtual_ranks_share_a_host() -> None:
    assert LoopbackWorld(2).run(lambda group: hosts_of(group.transport)) == [(0, 0)] * 2


def test_usp_without_a_number_is_ulysses_inside_hosts() -> None:
    for hosts, expected in (
        ((0, 0, 0, 0), "usp:4"),
        ((0, 0, 2, 2), "usp:2"),
        ((0, 1, 0, 1), "usp:1"),
        ((0, 0, 0, 3), "usp:1"),
        ((0, 0, 2, 2, 2, 2), "usp:2"),
        ((0, 0, 0, 3, 3, 3), "usp:3"),
    ):
        assert auto.usp_of_hosts(hosts) == expected
        assert (expected in auto.candidates(hosts)) == (expected not in ("usp:1", f"usp:{len(hosts)}"))


def test_plan_of_a_scheme_to_resolve_is_refused() -> None:
    Config(context_parallel_size=4, context_parallel_scheme="usp")
    for scheme in ("auto", "usp"):
        with pytest.raises(InputError, match=f"the scheme is {scheme}, which depends on the ranks' hosts; expected"):
            plan(
                *(MASKS["causal"], Layout.zigzag(SEQ_LEN, 2)),
                **{"num_heads": 4, "num_kv_heads": 4, "head_dim": 8},
                dtype=torch.float32,
                scheme=scheme,
            )


# ---- the command line ---------------------------------------------------------------------------


def test_plan_shows_every_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "plan --seq-len 64 --world-size 4 --num-heads 8 --head-dim 8 --dtype float32 --ranks-per-host 2"
    command = [*sizes.split(), "--rates", "1e9,1e9,1e6", "--json", str(tmp_path / "plan.json")]
    assert main([*command, "--scheme", "usp", "--plot", str(tmp_path / "plan.svg")]) == 0
    report = json.loads((tmp_path / "plan.json").read_text())
    names = [scheme["scheme"] for scheme in report["schemes"]]
    assert names == ["ring", "all_gather", "usp:2", "ulysses", "staged:2"]
    chosen = next(scheme for scheme in report["schemes"] if scheme["scheme"] == report["scheme"])
    assert report["scheme"] == "usp:2"
    assert chosen["bytes_within"] + chosen["bytes_between"] == report["forward_bytes"] + report["backward_bytes"]
    # Zigzag over two groups: as much work on every rank, and as many bytes.
    flops = report["forward_flops"] + report["backward_flops"]
    assert chosen["computing_s"] == pytest.approx(flops / 4 / 1e9)
    sent = chosen["bytes_within"] / 1e9 + chosen["bytes_between"] / 1e6
    assert sent / 4 <= chosen["sending_s"] < sent
    assert f"*  {chosen['scheme'].rjust(10)}" in capsys.readouterr().out
    assert "rank 3" in (tmp_path / "plan.svg").read_text()
    for wrong in (["--ranks-per-host", "0"], ["--rates", "fast"], ["--rates", "1"], ["--scheme", "auto"]):
        assert main([*command, *wrong]) == 2
        assert "expected" in capsys.readouterr().err
