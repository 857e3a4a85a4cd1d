"""`python -m benchmarks mlp` and `benchmarks loss`: all backends do the same work, and rows say what was measured."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import pathlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from benchmarks import loss, mlp
from benchmarks.__main__ import main
from benchmarks.cases import make_inputs
from benchmarks.compare import Candidate, errors, memory_of, results
from benchmarks.measure import PASSES

pytestmark = pytest.mark.usefixtures("short_samples")
TOKENS, E, F, V = 13, 8, 12, 30  # in 4 tiles: the last one is short
OPTIONS = {
    "mlp": ["--seq-len", "13", "--hidden-size", "8", "--intermediate-size", "12", "--num-tiles", "4"],
    "loss": ["--seq-len", "13", "--hidden-size", "8", "--vocab-size", "30", "--num-tiles", "4"],
}
ON_A_CPU = {
    "deepspeed": {"mlp", "loss"},
    "liger_kernel": {"mlp"},
}  # packages that may be missing, and the subjects they support on a CPU
BACKEND = {"deepspeed": "deepspeed", "liger_kernel": "liger"}
SUBJECTS = {"mlp": mlp, "loss": loss}


def available(subject: str) -> set[str]:
    """The backends that can run here."""
    missing = {
        BACKEND[package]
        for package, subjects in ON_A_CPU.items()
        if subject not in subjects or importlib.util.find_spec(package) is None
    }
    return set(SUBJECTS[subject].BACKENDS) - missing


def bench(tmp_path: pathlib.Path, subject: str, *options: str) -> dict[str, Any]:
    command = [subject, *OPTIONS[subject], "--threads", "1", "--repeats", "2", *options]
    assert main([*command, "--json", str(tmp_path / "bench.json")]) == 0
    report: dict[str, Any] = json.loads((tmp_path / "bench.json").read_text())
    return report


@pytest.mark.parametrize("name", ["attention", "loss", "mlp", "scan", "ring"])
def test_a_gpus_workloads_are_on_their_device(name: str) -> None:
    """On meta, where a tensor of another device is an error: all inputs, and the plain MLP, forward and backward. Sizes
    are cut to 64: the numbers of a GPU's workload take seconds to draw."""
    subject = importlib.import_module(f"benchmarks.{name}")
    quick = [each for each in subject.quick_comparisons() if each.workload.device == "cuda"]
    assert quick  # something to measure on a GPU
    for comparison in quick:
        sizes = {key: min(value, 64) for key, value in vars(comparison.workload).items() if type(value) is int}
        workload = dataclasses.replace(comparison.workload, device="meta", **sizes)
        inputs = make_inputs(workload) if name == "ring" else subject.make_inputs(workload)
        flat, _ = tree_flatten((tuple(inputs), list(inputs.mlp.parameters()) if name == "mlp" else ()))
        assert {x.device.type for x in flat if isinstance(x, torch.Tensor)} == {"meta"}
        if name == "mlp":
            assert all(x.is_meta for x in results(subject.make_candidate("plain", workload, inputs)))


# ---- the same work ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", mlp.CASES)
@pytest.mark.parametrize(
    "backend",  # of another library, which takes seconds to import: what is measured beside ringtile, no product code
    [pytest.param(name, marks=pytest.mark.long) if name == "deepspeed" else name for name in sorted(available("mlp"))],
)
def test_every_provider_computes_the_same_mlp(case: str, backend: str) -> None:
    """In float64, with numbers below 10, 1e-12 is some hundred roundings. The oracle is the formula, untiled."""
    workload = mlp.Workload(case, "float64", TOKENS, E, F, num_tiles=4)
    inputs = mlp.make_inputs(workload)
    candidate = mlp.make_candidate(backend, workload, inputs)
    if candidate is None:
        assert (backend, case) == ("checkpoint", "checkpointed")
        return
    gate, up, down = (weight.detach().clone().requires_grad_() for weight in inputs.mlp.parameters())
    x = inputs.x.detach().clone().requires_grad_()
    out = (nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    expected = (out.detach(), *torch.autograd.grad(out, (x, gate, up, down), inputs.dout))
    for _ in range(2):  # a second run does not add to the gradients of the first
        for mine, right in zip(results(candidate), expected, strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)
    for mine, right in zip(mlp.exact_results(workload, inputs), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", loss.CASES)
@pytest.mark.parametrize("backend", sorted(available("loss")))
def test_every_provider_computes_the_same_loss(case: str, backend: str) -> None:
    workload = loss.Workload(case, "float64", TOKENS, E, V, num_tiles=4)
    inputs = loss.make_inputs(workload)
    assert inputs.labels.ne(loss.IGNORE_INDEX).sum() == {"full": 13, "half-ignored": 7}[case]
    hidden, weight = (x.detach().clone().requires_grad_() for x in inputs[:2])
    mean = nn.functional.cross_entropy(hidden @ weight.t(), inputs.labels)
    expected = (mean.detach(), *torch.autograd.grad(mean, (hidden, weight)))
    for _ in range(2):
        for mine, right in zip(results(loss.make_candidate(backend, workload, inputs)), expected, strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=0, atol=1e-12)
    for mine, right in zip(loss.exact_results(workload, inputs), expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


def test_flops_are_those_of_the_products() -> None:
    """A product of (T, E) and (E, F) is T*E*F multiply-adds: a gated MLP has 3, and 6 in its backward."""
    unit = 2 * TOKENS * E * F
    mlp_workload = mlp.Workload("mlp", "float32", TOKENS, E, F, num_tiles=4)
    cost = mlp.cost_of(mlp_workload, mlp.make_inputs(mlp_workload))
    assert cost.flops == dict(zip(PASSES, (3 * unit, 6 * unit, 9 * unit), strict=True))
    tokens, weights = TOKENS * E * 4, 3 * E * F * 4
    forward, backward = tokens + weights + tokens, 2 * tokens + weights + tokens + weights
    assert cost.num_bytes == dict(zip(PASSES, (forward, backward, forward + backward), strict=True))
    unit = 2 * 7 * E * V  # only tokens with a label need their logits
    loss_workload = loss.Workload("half-ignored", "bfloat16", TOKENS, E, V, num_tiles=4)
    flops = loss.cost_of(loss_workload, loss.make_inputs(loss_workload)).flops
    assert flops == dict(zip(PASSES, (unit, 2 * unit, 3 * unit), strict=True))


def test_errors_are_the_largest_of_their_pass() -> None:
    right = tuple(torch.tensor(values, dtype=torch.float64) for values in ([3.0, 4.0], [1.0, 0.0], [0.0, 2.0]))
    got = (torch.tensor([3.0, 4.5]), torch.tensor([1.25, 0.0]), torch.tensor([0.0, 2.25]))
    largest, relative = errors(got, right)
    assert largest == dict(zip(PASSES, (0.5, 0.25, 0.5), strict=True))
    assert relative == dict(zip(PASSES, (0.1, 0.25, 0.25), strict=True))  # 0.5 / 5; 0.25 / 1, 0.25 / 2


@pytest.mark.long
def test_a_tiled_mlp_grows_less_than_a_plain_one(tmp_path: pathlib.Path) -> None:
    """512 tokens of 64, F = 4096, float32: gate, up, act and their product are 8 MiB each. The output and the gradients
    of x and of the three weights (1 MiB each) add 3.25 MiB. A tile needs a sixteenth of the 32 MiB."""
    workload = mlp.Workload("mlp", "float32", 512, 64, 4096, num_tiles=16)
    plain, tiled = (memory_of("mlp", name, workload)["forward+backward"] for name in ("plain", "ringtile"))
    assert plain > (32 + 3.25) * 2**20
    assert 3 * 2**20 < tiled < plain / 3


# ---- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", SUBJECTS)
def test_rows_name_what_ran_and_what_did_not(
    subject: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.compare.memory_of", lambda subject, name, workload: dict.fromkeys(PASSES, 7))
    report = bench(tmp_path, subject, "--dtype", "bfloat16")
    ran = available(subject)
    sizes = {"mlp": {"hidden_size": E, "intermediate_size": F}, "loss": {"hidden_size": E, "vocab_size": V}}[subject]
    assert {(row["backend"], row["pass"]) for row in report["rows"]} == {(n, which) for n in ran for which in PASSES}
    for row in report["rows"]:
        assert row.items() >= (sizes | {"seq_len": TOKENS, "num_tiles": 4, "world_size": 1, "peak_bytes": 7}).items()
        assert row["dtype"] == "bfloat16"
        assert row["median_s"] > 0
        assert 0 < row["rms_error"] < 0.05  # bfloat16 rounds to 2^-9 of each number, and products of products of them
        assert set(row["ratio_to"]) == ran - {row["backend"]}
    skipped = {reason.split(",")[0] for reason in report["machine"]["skipped"]}
    assert skipped == set(SUBJECTS[subject].BACKENDS) - ran
    text = capsys.readouterr().out
    for name in skipped:
        assert f"\n {name}: " in text
    if importlib.util.find_spec("deepspeed") is None:
        assert "\n deepspeed: not installed: No module named 'deepspeed'" in text


@pytest.mark.parametrize("subject", SUBJECTS)
def test_quick_has_workloads_that_can_be_measured(subject: str) -> None:
    module = SUBJECTS[subject]
    workloads = [comparison.workload for comparison in module.quick_comparisons()]
    assert len(set(workloads)) == len(workloads)
    for comparison in module.quick_comparisons():
        assert set(comparison.backends) <= set(module.BACKENDS)
        assert comparison.memory
        module.check(dataclasses.replace(comparison.workload, device="cpu"))


def test_a_provider_without_backward_has_one_pass() -> None:
    out = torch.ones(3)
    assert [list(found) for found in errors(results(Candidate(lambda: out, None)), (out.double(), out.double()))] == [
        ["forward"],
        ["forward"],
    ]
