"""`scheme: auto`: rates from a file or the cache, alike on all ranks; the model against the plan; still exact."""

from __future__ import annotations

import json
import re
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pool import run_ranks
from ringtile import (
    AttentionDropout,
    Config,
    ConfigError,
    InputError,
    IntervalMask,
    Layout,
    LoopbackWorld,
    RingMismatch,
    ShardedSequence,
    plan,
    ring_attention,
)
from ringtile.bench import transport as bench
from ringtile.cli import main
from ringtile.sequence.price import COST_KINDS, Prices, Shape, candidates, usp_of_hosts
from ringtile.transport import placement
from ringtile.transport.groups import transport_of
from ringtile.transport.loopback import LoopbackGroup
from ringtile.transport.rates import Kernel, Link, Rates, cache_path, cached_rates, cpu_name, known_rates, rates_json
from ringtile.transport.rates import with_threads as with_num_threads
from strategies import layouts, masks
from test_ring import FLOAT64_TOLERANCE, assert_close, problem, run_ring
from test_schemes import MASKS, SEQ_LEN, run_scheme

KERNEL = Kernel(forward_flops_per_s=1e9, backward_flops_per_s=1e9, call_s=0.0)
SLOW = Link(latency_s=1e-3, bytes_per_s=1e6)
FAST = Link(latency_s=1e-9, bytes_per_s=1e12)


def rates_of(within: Link = FAST, between: Link | None = FAST, **more: Any) -> Rates:
    return Rates(within=within, between=between, kernels={"float32": KERNEL}, **more)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path("cpu")
    path.parent.mkdir()
    return path


def written(path: Path, rates: Rates) -> str:
    path.write_text(json.dumps(rates_json(rates)))
    return str(path)


# ---- the model ----------------------------------------------------------------------------------


@given(st.data())
def test_model_sends_and_computes_what_is_planned(data: st.DataObject) -> None:
    world_size, rows = data.draw(st.sampled_from([1, 2, 3, 4, 6])), data.draw(st.integers(1, 2))
    seq_len = world_size + data.draw(st.integers(0, 20))
    mask, layout = data.draw(masks(rows, seq_len)), data.draw(layouts(seq_len, world_size))
    num_kv_heads = data.draw(st.integers(1, 4))
    num_heads = num_kv_heads * data.draw(st.integers(1, 3))
    names = [*candidates(world_size, num_heads), "staged:3"]
    name, dtype = data.draw(st.sampled_from(names)), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    shape = Shape(2, num_heads, num_kv_heads, 4, 6, dtype)
    price = Prices(mask, layout, tuple(rank // 2 for rank in range(world_size)), rates_of()).of(name, shape)
    cost = plan(
        *(mask, layout),
        **{"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": 4, "v_head_dim": 6, "batch": 2},
        dtype=dtype,
        scheme=name,
    )
    of_ranks = zip(price.forward.num_bytes, price.backward.num_bytes, price.flops, cost.ranks, strict=True)
    for forward, backward, flops, rank in of_ranks:
        assert int(forward.sum()) == rank.forward_bytes_sent
        assert int(backward.sum()) == rank.backward_bytes_sent
        assert float(flops) == rank.forward_flops + rank.backward_flops
    assert price.num_bytes.sum(0).tolist() == [
        rank.forward_bytes_received + rank.backward_bytes_received for rank in cost.ranks
    ]
    assert price.imbalance == pytest.approx(cost.imbalance)


def test_kernels_and_messages_of_a_rank_never_overlap_themselves() -> None:
    """On a rank one kernel runs at a time, and on a link one message each way."""
    rates = rates_of(Link(latency_s=0.0, bytes_per_s=1e8), SLOW)
    prices = Prices(IntervalMask.causal(64), Layout.zigzag(64, 4), (0, 0, 1, 1), rates)
    for name in candidates(4, 8):
        price = prices.of(name, Shape(1, 8, 2, 8, 8, torch.float32), events=True)
        for events in (price.forward.events.tolist(), price.backward.events.tolist()):
            lanes: dict[tuple[Any, ...], float] = {}
            for kind, source, to, _, begin, end in events:
                far = source // 2 != to // 2
                is_kernel = COST_KINDS[int(kind)] == "kernel"
                for lane in [("kernel", to)] if is_kernel else [("out", source, far), ("in", to, far)]:
                    latency = SLOW.latency_s if far and not is_kernel else 0.0
                    assert begin >= lanes.get(lane, 0.0) - 1e-12, (name, lane)
                    lanes[lane] = end - latency
        assert price.seconds > float(price.flops.max()) / 1e9


def best(rates: Rates, hosts: tuple[int, ...], mask: IntervalMask, shape: Shape, layout: str = "zigzag") -> str:
    prices = Prices(mask, Layout.named(layout, mask.seq_len, len(hosts)), hosts, rates)
    return prices.cheapest(shape, whole=False)


def test_cheapest_is_what_each_scheme_is_for() -> None:
    many, few = Shape(1, 4, 4, 64, 64, torch.float32), Shape(1, 32, 1, 64, 64, torch.float32)
    causal, window = IntervalMask.causal(1024), IntervalMask.sliding_window(1024, 16)
    one_host, two_hosts = (0,) * 4, (0, 0, 1, 1)
    copied = Link(latency_s=0.0, bytes_per_s=1e7, overlap=0.0)
    assert best(rates_of(copied), one_host, causal, many) == "ulysses"  # fewest bytes, and nothing hides them
    assert best(rates_of(SLOW), one_host, causal, few) in ("ring", "all_gather")  # keys are few, queries many
    assert best(rates_of(SLOW), one_host, window, many, "contiguous") in ("ring", "all_gather")  # a halo
    grouped = Shape(1, 8, 2, 64, 64, torch.float32)
    assert best(rates_of(copied, Link(latency_s=0.0, bytes_per_s=2e5)), two_hosts, causal, grouped) == "usp:2"


def test_stages_are_for_memory_and_never_taken() -> None:
    """Even where the model finds them fastest, because their messages travel behind the kernels of another stage."""
    shape, mask = Shape(1, 16, 16, 64, 64, torch.float32), IntervalMask.full(512)
    rates = rates_of(Link(latency_s=0.0, bytes_per_s=1e7))
    prices = Prices(mask, Layout.contiguous(512, 4), (0,) * 4, rates)
    assert min(candidates(4, 16), key=lambda name: prices.of(name, shape).seconds).startswith("staged")
    assert not prices.cheapest(shape, whole=False).startswith("staged")


def test_usp_without_a_number_is_ulysses_inside_hosts() -> None:
    for hosts, expected in (
        ((0, 0, 0, 0), "usp:4"),
        ((0, 0, 2, 2), "usp:2"),
        ((0, 1, 0, 1), "usp:1"),
        ((0, 0, 0, 3), "usp:1"),
        ((0, 0, 2, 2, 2, 2), "usp:2"),
        ((0, 0, 0, 3, 3, 3), "usp:3"),
    ):
        assert usp_of_hosts(hosts) == expected


# ---- on ranks -----------------------------------------------------------------------------------


def settled(group: LoopbackGroup, paths: list[str], **options: Any) -> str:
    """The scheme of a call, with rates of its own on each rank."""
    p = problem(1, SEQ_LEN, 4, 4, 8, 8)
    placement.use_rates(group.transport, paths[group.transport.rank])
    sequence = ShardedSequence(MASKS["full"], Layout.zigzag(SEQ_LEN, len(paths)), group, scheme="auto")
    ring_attention(*(sequence.shard(x, 1) for x in (p.q, p.k, p.v)), sequence, **options)
    return next(key for key in sequence._settled if isinstance(key, str))


COSTLY_CALLS = {"float32": Kernel(forward_flops_per_s=1e9, backward_flops_per_s=1e9, call_s=1.0)}


def test_all_ranks_choose_by_the_rates_of_rank_0(tmp_path: Path) -> None:
    """By those of one rank the two rounds of a ring hide its messages, by those of the other a call costs a second."""
    hidden = written(tmp_path / "hidden.json", rates_of(Link(latency_s=0.0, bytes_per_s=1e9)))
    costly = written(tmp_path / "costly.json", Rates(within=FAST, kernels=COSTLY_CALLS))
    assert LoopbackWorld(2).run(lambda group: settled(group, [hidden, costly])) == ["ring"] * 2
    assert LoopbackWorld(2).run(lambda group: settled(group, [costly, hidden])) == ["all_gather"] * 2


def test_auto_leaves_out_what_a_call_cannot_have(tmp_path: Path) -> None:
    """ulysses would be fastest, but attention dropout and aten's kernels are refused where ranks share heads."""
    copied = rates_of(Link(latency_s=0.0, bytes_per_s=1e5, overlap=0.0))
    path, shape = written(tmp_path / "rates.json", copied), Shape(1, 4, 4, 8, 8, torch.float64)
    assert best(copied, (0,) * 4, MASKS["full"], shape) == "ulysses"
    dropout = AttentionDropout(0.1, torch.zeros(1, dtype=torch.int64), 0)
    choices: list[dict[str, Any]] = [{"dropout": dropout}, {"attention_kernel": "aten"}]
    for options in choices:
        chosen = LoopbackWorld(4).run(lambda group, options=options: settled(group, [path] * 4, **options))
        assert set(chosen) <= {"ring", "all_gather"}
    assert LoopbackWorld(4).run(lambda group: settled(group, [path] * 4)) == ["ulysses"] * 4


@pytest.mark.parametrize(("scheme", "within"), [("auto", FAST), ("auto", SLOW), ("usp", FAST)])
def test_open_schemes_equal_one_rank(scheme: str, within: Link, cache: Path) -> None:
    """And send nothing but what the plan of the scheme that they settle on has."""
    here = {"machine": socket.gethostname(), "device": cpu_name()}
    written(cache, rates_of(within, **here))
    p = problem(2, SEQ_LEN, 6, 2)
    for mask in ("documents", "padding"):
        layout = Layout.zigzag(SEQ_LEN, 3)
        result, sent, _ = run_scheme(p, MASKS[mask], layout, scheme)
        expected = run_ring(p, MASKS[mask], Layout.contiguous(SEQ_LEN, 1))
        assert_close(result, expected, FLOAT64_TOLERANCE)
        name = "usp:3" if scheme == "usp" else None
        names = [name] if name else candidates(3, 6)
        plans = [
            plan(
                *(MASKS[mask], layout),
                **{"num_heads": 6, "num_kv_heads": 2, "head_dim": p.q.size(3), "v_head_dim": p.v.size(3), "batch": 2},
                dtype=p.q.dtype,
                scheme=each,
            )
            for each in names
        ]
        assert sent in [[(r.forward_bytes_sent, r.backward_bytes_sent) for r in each.ranks] for each in plans]


def test_auto_and_another_scheme_are_told_apart(cache: Path) -> None:
    p = problem(1, SEQ_LEN, 4, 2)

    def on_rank(group: LoopbackGroup) -> None:
        scheme = ("auto", "ring")[group.transport.rank]
        sequence = ShardedSequence(MASKS["causal"], Layout.zigzag(SEQ_LEN, 2), group, scheme=scheme)
        with pytest.raises(RingMismatch, match=r"agree on hosts.*ring_attention|ring_attention.*agree on hosts"):
            ring_attention(*(sequence.shard(x, 1) for x in (p.q, p.k, p.v)), sequence)

    LoopbackWorld(2).run(on_rank)


def test_rates_that_rank_0_cannot_read_are_told_to_all(tmp_path: Path) -> None:
    def on_rank(group: LoopbackGroup) -> None:
        expected = ConfigError if group.transport.rank == 0 else RingMismatch
        with pytest.raises(expected, match=r"rates of .*none\.json.*No such file"):
            settled(group, [str(tmp_path / "none.json")] * 2)

    LoopbackWorld(2).run(on_rank)


def test_virtual_ranks_share_a_host() -> None:
    assert LoopbackWorld(2).run(lambda group: placement.hosts_of(group.transport)) == [(0, 0)] * 2


# ---- rates --------------------------------------------------------------------------------------


def test_what_was_measured_is_found_again(cache: Path) -> None:
    assert cached_rates("cpu") is None
    rates = rates_of(SLOW, None, machine=socket.gethostname(), device=cpu_name(), threads=2)
    written(cache, rates)
    assert cached_rates("cpu") == rates
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert known_rates("cpu", None, num_hosts=1).within == SLOW
    with pytest.warns(UserWarning, match="messages between hosts are, .*ringtile bench transport"):
        assert known_rates("cpu", None, num_hosts=2).between is not None
    kernel = with_num_threads(rates, 6).kernels["float32"]
    assert (kernel.forward_flops_per_s, kernel.call_s) == (3e9, 0.0)
    cache.unlink()
    with pytest.warns(UserWarning, match="links and kernels are, .*ringtile bench transport"):
        known_rates("cpu", None, num_hosts=1)


def spoiled(change: Callable[[dict[str, Any]], Any]) -> str:
    fields = rates_json(rates_of(machine=socket.gethostname(), device=cpu_name()))
    change(fields)
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds NoneType; expected a mapping"),
        ("\0", "not YAML"),
        ("{" * 1000, "not YAML"),
        ("[1]", "holds list; expected a mapping"),
        ("{}", "kernels is missing"),
        (spoiled(lambda x: x.update(kernels={})), "kernels is empty"),
        (spoiled(lambda x: x["within"].update(bytes_per_s=0)), r"bytes_per_s is 0"),
        (spoiled(lambda x: x["within"].update(latency_s=-1.0)), r"latency_s is -1"),
        (spoiled(lambda x: x["within"].update(overlap=1.5)), r"overlap is 1\.5"),
        (spoiled(lambda x: x["kernels"]["float32"].update(call_s="x")), r"call_s is 'x'"),
        (spoiled(lambda x: x.update(links=1)), "unknown key links"),
        (spoiled(lambda x: x.update(machine="another")), "are of another, .*; expected"),
        (spoiled(lambda x: x.update(device="8086")), "8086; expected"),
        (spoiled(lambda x: x.pop("machine")), "are of no machine"),
    ],
)
def test_a_cache_that_is_not_this_machines_is_refused(content: str, message: str, cache: Path) -> None:
    cache.write_text(content)
    with pytest.raises(
        ConfigError, match=rf"^rates of {re.escape(str(cache))}.*{message}.*remove it and measure again"
    ):
        cached_rates("cpu")


def test_a_cache_that_others_can_change_is_refused(cache: Path, tmp_path: Path) -> None:
    written(tmp_path / "elsewhere", rates_of(machine=socket.gethostname(), device=cpu_name()))
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="expected a regular file"):
        cached_rates("cpu")
    cache.unlink()
    written(cache, rates_of(machine=socket.gethostname(), device=cpu_name()))
    cache.chmod(0o666)
    with pytest.raises(ConfigError, match="not everybody can write"):
        cached_rates("cpu")


def test_rates_in_a_configuration_need_auto(tmp_path: Path) -> None:
    assert Config(context_parallel_scheme="auto", context_parallel_rates="x.json").context_parallel_rates == "x.json"
    Config(context_parallel_size=4, context_parallel_scheme="usp")
    with pytest.raises(ConfigError, match=r"context_parallel_rates is .x\.json., but context_parallel_scheme is ring"):
        Config(context_parallel_rates="x.json")


def test_plan_of_an_open_scheme_is_refused() -> None:
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
    path = written(tmp_path / "rates.json", rates_of(Link(latency_s=0.0, bytes_per_s=1e9, overlap=0.0), SLOW))
    sizes = "plan --seq-len 64 --world-size 4 --num-heads 8 --head-dim 8 --dtype float32 --ranks-per-host 2"
    command = [*sizes.split(), "--rates", path, "--scheme", "auto", "--json", str(tmp_path / "plan.json")]
    assert main([*command, "--plot", str(tmp_path / "plan.svg")]) == 0
    report = json.loads((tmp_path / "plan.json").read_text())
    names = [scheme["scheme"] for scheme in report["schemes"]]
    assert names == ["ring", "all_gather", "usp:2", "ulysses", "staged:2"]
    chosen = next(scheme for scheme in report["schemes"] if scheme["scheme"] == report["scheme"])
    assert chosen["seconds"] <= 1.02 * min(scheme["seconds"] for scheme in report["schemes"])
    assert chosen["bytes_within"] + chosen["bytes_between"] == report["forward_bytes"] + report["backward_bytes"]
    assert f"*  {chosen['scheme'].rjust(10)}" in capsys.readouterr().out
    assert "rank 3" in (tmp_path / "plan.svg").read_text()
    for wrong in (["--ranks-per-host", "0"], ["--rates", str(tmp_path / "none")]):
        assert main([*command, *wrong]) == 2
        assert "expected" in capsys.readouterr().err


def measured() -> tuple[bench.Report, tuple[int, ...], int]:
    """A report, and the hosts of a new group, with the payload that asking for them took."""
    bench.SIZES, bench.FITTED, bench.SAMPLE_SECONDS = (1 << 10, 1 << 16), (1 << 10, 1 << 16), 1e-4  # type: ignore[assignment]
    group = dist.new_group()
    hosts = placement.hosts_of(transport_of(group))
    return bench._measure(2, "cpu"), hosts, transport_of(group).bytes_sent


def test_bench_measures_every_link_and_kernel() -> None:
    (report, *of_group), (other, *_) = run_ranks(2, measured)
    assert of_group == [(0, 0), 0]
    assert report.rates.within == other.rates.within
    assert report.rates.between is None
    assert set(report.rates.kernels) == {"float32", "bfloat16", "float16", "float64"}
    assert [(row["carrier"], row["num_bytes"]) for row in report.rows] == [
        (carrier, num_bytes) for num_bytes in (1 << 10, 1 << 16) for carrier in ("shared memory", "gloo")
    ]
    assert report.rates.machine == socket.gethostname()
    assert Rates.of(rates_json(report.rates)) == report.rates


@pytest.mark.parametrize(
    "hosts", [(0, 0), (0, 1), (0, 0, 2, 2), (0, 1, 0, 1), (0, 0, 0, 3), (0, 1, 2), (0, 0, 2, 2, 4, 4)]
)
def test_bench_sends_on_every_link(hosts: tuple[int, ...]) -> None:
    """Whom a rank sends to receives from it, within its host or to another; all ranks have the same patterns."""
    of_ranks = [bench._patterns(hosts, rank) for rank in range(len(hosts))]
    for of_link in zip(*of_ranks, strict=True):
        links = {pattern.link for pattern in of_link}
        assert len(links) == 1
        sending = [rank for rank, pattern in enumerate(of_link) if pattern.to is not None]
        assert sending
        for rank in sending:
            to = of_link[rank].to
            assert to is not None
            assert of_link[to].source == rank != to
            assert (hosts[to] == hosts[rank]) == (links == {"within"})
        assert sum(pattern.source is not None for pattern in of_link) == len(sending)


@pytest.mark.parametrize("options", [["--world-size", "1"], ["--device", "tpu"], ["--repeats", "0"]])
def test_bench_of_nothing_is_refused(options: list[str], cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transport", *options]) == 2
    assert "expected" in capsys.readouterr().err
