"""`python -m benchmarks`: its counts, its rows, its refusals. Speed is not asserted: tests share the machine."""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import dense_gradients
from pool import CONTEXT, run_ranks
from ringtile import ops
from ringtile.errors import ConfigError
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from benchmarks import attention, compare, measure, ring
from benchmarks.__main__ import SUBJECTS, main
from benchmarks.cases import Workload, bytes_of, flops_of, make_case, make_inputs
from benchmarks.compare import results
from benchmarks.measure import (
    PASSES,
    Sample,
    mean_sample,
    take_turns,
    waited_seconds,
)
from benchmarks.peak import Peak, compiled

ROW_KEYS = {
    *("case", "dtype", "seq_len", "head_dim", "num_heads", "num_kv_heads", "world_size", "device", "threads", "scheme"),
    *("backend", "pass", "median_s", "spread", "waited", "flops", "bytes", "peak_bytes"),
    *("fraction_of_peak", "max_error", "rms_error", "ratio_to"),
}
MACHINE_KEYS = {  # of every machine; one with tiles says more
    *("cpu", "cores", "isa", "system", "python", "torch", "load_average"),
    *("copy_bytes_per_s", "peak_flops_per_s", "skipped"),
}
TINY = ["--seq-len", "24", "--head-dim", "8", "--num-heads", "4", "--num-kv-heads", "2", "--repeats", "2"]
S = 24
pytestmark = pytest.mark.usefixtures("short_samples")
CASES = ("full", "causal", "window-5", "documents-3", "padding")


def bench(tmp_path: pathlib.Path, *options: str) -> dict[str, Any]:
    assert main([*options, "--json", str(tmp_path / "bench.json")]) == 0
    report: dict[str, Any] = json.loads((tmp_path / "bench.json").read_text())
    return report


def attends(case: str) -> Tensor:
    """bool (B, S, S), [query, key], from the definition of each case."""
    query, key = torch.arange(S)[:, None], torch.arange(S)
    causal = key <= query
    if case == "padding":  # the second row has S / 2 tokens
        short = causal & (query < S // 2)
        return torch.stack((causal, short))
    return {
        "full": torch.ones(S, S, dtype=torch.bool),
        "causal": causal,
        "window-5": causal & (query - key < 5),
        "documents-3": causal & (query // 8 == key // 8),
    }[case][None]


# ---- counting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_flops_are_those_of_unmasked_pairs(case: str) -> None:
    """A pair costs D multiply-adds in Q K^T and D in P V; the backward has five such products. There are 4 heads."""
    workload = Workload(case, "float32", S, head_dim=8, num_heads=4, num_kv_heads=2)
    mask = make_case(case, S).mask
    pairs = int(attends(case).sum())
    assert flops_of(workload, mask) == dict(
        zip(PASSES, (2 * 2 * pairs * 4 * 8, 5 * 2 * pairs * 4 * 8, 7 * 2 * pairs * 4 * 8), strict=True)
    )


def test_bytes_are_every_input_and_output_once() -> None:
    """3 rows of S tokens, 4 query and 2 kv heads of 8 numbers: bfloat16, and a float32 log-sum-exp per query head."""
    workload = Workload("full", "bfloat16", S, head_dim=8, num_heads=4, num_kv_heads=2)
    q, kv, lse = 3 * S * 4 * 8 * 2, 3 * S * 2 * 8 * 2, 3 * S * 4 * 4
    forward = (q + kv + kv) + (q + lse)  # q, k, v; out, lse
    backward = (q + kv + kv + q + q + lse) + (q + kv + kv)  # q, k, v, out, dout, lse; dq, dk, dv
    assert bytes_of(workload, batch=3) == dict(zip(PASSES, (forward, backward, forward + backward), strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["ringtile", "torch", "torch_mask", "torch_per_document"])
def test_every_provider_computes_the_same_attention(case: str, backend: str) -> None:
    """Times compare only if all do the same work. In float64, numbers below 10: 1e-12 is some hundred roundings."""
    workload = Workload(case, "float64", S, head_dim=8, num_heads=4, num_kv_heads=2)
    made = make_case(case, S)
    attend = attention.BACKENDS[backend].make(made)
    if attend is None:
        cases = {"torch": ("full", "causal"), "torch_per_document": ("documents-3", "padding")}
        assert case not in cases[backend]
        return
    inputs = make_inputs(workload)
    expected = dense_gradients(inputs.q, inputs.k, inputs.v, attends(case), inputs.dout)
    got = results(attention.attend_candidate(attend, inputs))
    for mine, right in zip(got, (expected.out, expected.dq, expected.dk, expected.dv), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


# ---- measuring ----------------------------------------------------------------------------------


def test_candidates_take_turns_and_medians_are_kept() -> None:
    order: list[str] = []

    def sampler(name: str, seconds: list[float]) -> Any:
        def sample() -> Sample:
            order.append(name)
            return Sample({"forward": seconds.pop(0)}, waited=0.0)

        return sample

    taken = take_turns({"a": sampler("a", [5.0, 1.0, 3.0]), "b": sampler("b", [1.0, 1.0, 9.0])}, repeats=3)
    assert order == ["a", "b"] * 3
    assert taken["a"]["forward"] == (3.0, 2 / 3, 0.0)  # quartiles of 1, 3, 5 are 2 and 4
    assert taken["b"]["forward"].median == 1.0
    assert take_turns({"a": sampler("a", [2.0])}, repeats=1) == {"a": {"forward": (2.0, 0.0, 0.0)}}


def test_a_sample_that_waited_for_a_core_is_taken_again() -> None:
    """A quiet sample takes 10 seconds here; the seconds of a disturbed one identify it."""

    def taken(waited: list[float]) -> Any:
        def sample() -> Sample:
            share = waited.pop(0)
            return Sample({"forward": share or 10.0}, share)

        return take_turns({"a": sample}, repeats=2)["a"]["forward"]

    waited = [0.5, 0.0, 0.3, 0.0, 0.9]
    assert taken(waited) == (10.0, 0.0, 0.0)
    assert waited == [0.9]
    waited = [0.5, 0.25, 0.75, 1.0, 0.9]  # never quiet: the best two of four
    assert taken(waited) == (0.375, pytest.approx(1 / 3), 0.5)
    assert waited == [0.9]


def test_waiting_for_a_core_is_seen() -> None:
    """With more busy threads than cores one always waits, and the scheduler reports it."""
    before = waited_seconds()
    Peak().run()
    busy = torch.multiprocessing.get_context("fork")
    spinners = [busy.Process(target=spin, daemon=True) for _ in range(2 * torch.get_num_threads())]
    for spinner in spinners:
        spinner.start()
    while waited_seconds() - before < 0.01:  # the test's timeout ends this if waiting is never seen
        sum(range(1_000_000))
    for spinner in spinners:
        spinner.kill()
        spinner.join()


def spin() -> None:
    while True:
        pass


def test_short_runs_are_repeated_within_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run takes 3 s and reports 1 s and 2 s; the sample is their mean, whatever their number."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def run() -> dict[str, float]:
        now[0] += 3
        return {"forward": 1.0, "backward": 2.0}

    assert mean_sample(run, at_least=10).seconds == {"forward": 1.0, "backward": 2.0}
    assert now[0] == 12
    mean_sample(run, at_least=0)
    assert now[0] == 15


def test_peak_counts_what_its_threads_do() -> None:
    peak = Peak()
    torch.set_num_threads(1)
    peak.run()
    alone = peak.flops
    torch.set_num_threads(2)
    peak.run()
    assert peak.flops == 2 * alone > 0
    assert all(compiled(isa).flops_per_iteration() > 0 for isa in ops.ISA_NAMES)  # of any CPU, by any
    if "amx_bf16" in ops.ISA_NAMES:  # tiles run nowhere else than on AMX, and compile anywhere
        assert compiled("amx_bf16", tiles=True).flops_per_iteration() == 4 * 2 * 16 * 16 * 32


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attention_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One small bench of all cases, without flex, which takes half a minute to compile."""
    folder = tmp_path_factory.mktemp("bench")
    options = [option for case in CASES for option in ("--case", case)]
    for backend in ("ringtile", "torch", "torch_mask", "torch_per_document"):
        options += ["--backend", backend]
    options += ["--dtype", "bfloat16", "--plot", str(folder / "roofline.png")]
    report = bench(folder, "attention", *TINY, *options)
    assert (folder / "roofline.png").stat().st_size > 0
    return report


def test_rows_have_the_keys_that_readers_rely_on(attention_report: dict[str, Any]) -> None:
    assert set(attention_report["machine"]) >= MACHINE_KEYS
    for row in attention_report["rows"]:
        assert set(row) == ROW_KEYS
        assert row["pass"] in PASSES
        assert row["median_s"] > 0
        assert 0 < row["max_error"] < 0.1
        assert row["fraction_of_peak"] == pytest.approx(
            row["flops"] / row["median_s"] / attention_report["machine"]["peak_flops_per_s"], rel=100
        )


def test_every_case_is_compared_with_what_can_compute_it(attention_report: dict[str, Any]) -> None:
    others = {
        "full": {"torch", "torch_mask"},
        "causal": {"torch", "torch_mask"},
        "window-5": {"torch_mask"},
        "documents-3": {"torch_mask", "torch_per_document"},
        "padding": {"torch_mask", "torch_per_document"},
    }
    rows = [row for row in attention_report["rows"] if row["backend"] == "ringtile"]
    assert [(row["case"], row["pass"]) for row in rows] == [(case, which) for case in CASES for which in PASSES]
    for row in rows:
        assert set(row["ratio_to"]) == others[row["case"]]
        for other in attention_report["rows"]:
            if (other["case"], other["pass"]) == (row["case"], row["pass"]) and other is not row:
                assert row["ratio_to"][other["backend"]] == other["median_s"] / row["median_s"]


def test_memory_is_measured_in_a_process_of_its_own(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S = 4096, 4 heads of 8, float32: q and out are 512 KiB each, k and v half of that."""
    monkeypatch.setattr(compare.multiprocessing, "get_context", lambda method: CONTEXT)  # has imported torch
    options = ["--case", "causal", "--dtype", "float32", "--backend", "ringtile", "--memory", *TINY]
    options[options.index("24")] = "4096"
    rows = {row["pass"]: row["peak_bytes"] for row in bench(tmp_path, "attention", *options)["rows"]}
    assert 512 << 10 <= rows["forward"] <= rows["backward"] == rows["forward+backward"] < 64 << 20


def serve_quickly(*arguments: Any) -> None:
    """A rank of the bench, whose samples are short too."""
    measure.SAMPLE_SECONDS, measure.COPY_BYTES = 0.005, 1 << 20
    ring.serve_rank(*arguments)


def test_ring_moves_what_is_planned(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks of 12 tokens, zigzag: rank 0 needs all 12 keys of rank 1, which needs 6 of rank 0's. A key and its
    value are 2 heads x 16 numbers x 4 bytes; they travel again in the backward, and their gradients travel back."""
    ranks = functools.partial(start_processes, serve_quickly)  # from the server, which has imported torch

    def start(function: Any, arguments: Any, **options: Any) -> Any:
        return ranks(arguments, **{**options, "start_method": "forkserver"})

    monkeypatch.setattr(ring, "start_processes", start)
    schemes = ["--scheme", "ring", "--scheme", "ulysses"]
    report = bench(tmp_path, "ring", "--case", "causal", "--dtype", "float32", *schemes, *TINY)
    assert set(report["machine"]) >= MACHINE_KEYS
    rows = {(row["backend"], row["pass"]): row for row in report["rows"] if row["scheme"] == "ring"}
    ran = {"ringtile", "ringtile_alone", "torch", "all_gather_by_hand"}
    if importlib.util.find_spec("ringmaster"):
        ran |= {"ringmaster", "ringmaster_ulysses"}
    assert set(rows) == {(name, which) for name in ran for which in PASSES}
    skipped = {reason.split(",")[0] for reason in report["machine"]["skipped"]}
    assert skipped == set(ring.BACKENDS) - ran  # backends that are not installed are named
    row = rows["ringtile", "forward+backward"]
    assert set(row) == ROW_KEYS | {"compute_share", "wait_share", "overhead_share", "bytes_moved", "plan_bytes"}
    assert row["bytes_moved"] == row["plan_bytes"] == 18 * (2 * 16 * 4) * 3
    assert row["compute_share"] + row["wait_share"] + row["overhead_share"] == pytest.approx(1)
    assert row["world_size"] == 2
    assert set(row["ratio_to"]) == ran - {"ringtile"}
    ulysses = {(row["backend"], row["pass"]): row for row in report["rows"] if row["scheme"] == "ulysses"}
    assert {name for name, _ in ulysses} == ran - {"ringtile_alone"}
    # Each of 24 tokens: 2 heads of q there and of out back (32 bytes each), 1 of k and v there (64). The backward: dout
    # there and dq back, dk and dv back.
    row = ulysses["ringtile", "forward+backward"]
    assert row["bytes_moved"] == row["plan_bytes"] == 24 * 2 * (2 * (32 + 32) + 64)


def by_hand() -> list[Tensor]:
    """Attention of this rank's tokens and its gradients by hand, full and causal, in float64."""
    found: list[Tensor] = []
    for case in ("full", "causal"):
        workload = Workload(case, "float64", S, head_dim=8, num_heads=4, num_kv_heads=2, world_size=2)
        context = ring.RankContext(workload, make_case(case, S), ring.make_layout(workload), dist.get_rank())
        local = ring.all_gather_local(context, make_inputs(workload))
        assert local is not None
        q, k, v, dout = local.inputs
        out = local.attend(q, k, v)
        found += [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
    return found


def test_attention_by_hand_is_attention() -> None:
    ranks = run_ranks(2, by_hand)
    for i, case in enumerate(("full", "causal")):
        workload = Workload(case, "float64", S, head_dim=8, num_heads=4, num_kv_heads=2)
        q, k, v, dout = (x.detach() for x in make_inputs(workload))
        attend = torch.ones(1, S, S, dtype=torch.bool) if case == "full" else torch.ones(1, S, S).tril().bool()
        expected = dense_gradients(q, k, v, attend, dout, torch.zeros(1, 4, S, dtype=torch.float64))
        exact = (expected.out, expected.dq, expected.dk, expected.dv)
        for j, want in enumerate(exact):
            got = torch.cat([rank[4 * i + j] for rank in ranks], 1)
            assert (got - want).abs().max() <= 1e-12


def test_heads_that_cannot_be_shared_are_refused() -> None:
    """3 kv heads cannot be shared by 2 ranks. The ring itself accepts them: it shards the sequence only."""
    workload = Workload("causal", "float32", 8, head_dim=8, num_heads=3, num_kv_heads=3, world_size=2)
    context = ring.RankContext(workload, make_case("causal", 8), ring.make_layout(workload), rank=0)
    with pytest.raises(ConfigError, match="3 kv heads over 2 ranks; expected"):
        ring.share_of_heads(context, make_inputs(workload))


def test_quick_covers_what_the_documentation_quotes() -> None:
    workloads = [comparison.workload for comparison in attention.quick_comparisons()]
    assert len(set(workloads)) == len(workloads)
    for case, dtype, seq_len, head_dim in [
        ("full", "float32", 2048, 128),
        ("full", "float32", 2048, 64),
        ("causal", "float32", 4096, 128),
        ("causal", "float32", 4096, 64),
        ("causal", "bfloat16", 4096, 128),
        ("causal", "float32", 512, 128),
        ("causal", "float32", 128, 128),
        ("documents-8", "float32", 8192, 128),
        ("window-1024", "float32", 8192, 64),
    ]:
        assert Workload(case, dtype, seq_len, head_dim) in workloads
    assert Workload("causal", "float32", 8192, 64, world_size=2) in [
        quick.workload for quick in ring.quick_comparisons()
    ]
    for subject in (attention, ring):
        for comparison in subject.quick_comparisons():
            assert set(comparison.backends) <= set(subject.BACKENDS)
            if comparison.workload.device == "cpu":
                subject.check(comparison.workload)


@pytest.mark.parametrize("case", ["", "cuasal", "window", "window-", "window-0", "documents-25", "full-2", "window--3"])
def test_unknown_case_is_refused(case: str) -> None:
    with pytest.raises(ConfigError, match="expected full, causal, padding"):
        make_case(case, S)


@pytest.mark.parametrize(
    "options",
    [
        ["attention", "--backend", "flash"],
        ["ring", "--backend", "flex"],
        ["attention", "--dtype", "int8"],
        ["attention", "--repeats", "0"],
        ["attention", "--threads", "0"],
        ["attention", "--seq-len", "0"],
        ["attention", "--num-heads", "3", "--num-kv-heads", "2"],
        ["attention", "--quick", "--seq-len", "77"],
        ["attention", "--case", "window-5", "--backend", "torch", "--seq-len", "8", "--repeats", "1"],
        ["ring", "--world-size", "0"],
        ["ring", "--head-dim", "513"],
        ["attention", "--num-kv-heads", "-1"],
        ["attention", "--hidden-size", "8"],
        ["attention", "--device", "tpu"],
        *([] if torch.cuda.is_available() else [[subject, "--device", "cuda"] for subject in SUBJECTS]),
        ["ring", "--seq-len", "2"],  # zigzag over 2 ranks has 4 chunks
        ["attention", "--plot", "/dev/null/roofline.png"],
        ["mlp", "--backend", "torch"],
        ["mlp", "--case", "full"],
        ["mlp", "--head-dim", "8"],
        ["mlp", "--num-tiles", "0"],
        ["loss", "--intermediate-size", "8"],
        ["loss", "--vocab-size", "-1"],
        ["loss", "--case", "causal"],
        ["mlp", "--case", "checkpointed", "--backend", "checkpoint", "--seq-len", "4", "--hidden-size", "4"],
    ],
)
def test_impossible_choice_is_one_line_and_status_2(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([options[0], "--repeats", "1", *options[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmarks: error: ")
    assert error.count("\n") == 1
    assert "expected" in error


def test_ring_alone_runs_the_rings_kernels() -> None:
    """A ring of one rank has no peers, so its blocks are all of the attention."""
    workload = Workload("documents-3", "float64", S, head_dim=8, num_heads=4, num_kv_heads=2)
    context = ring.RankContext(workload, make_case(workload.case, S), ring.make_layout(workload), rank=0)
    inputs = make_inputs(workload)
    expected = dense_gradients(inputs.q, inputs.k, inputs.v, attends(workload.case), inputs.dout)
    got = results(ring.ringtile_alone_local(context, inputs).candidate)
    for mine, right in zip(got, (expected.out, expected.dq, expected.dk, expected.dv), strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)
