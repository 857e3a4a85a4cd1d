"""`python -m benchmarks scan`: both backends do the same work, and rows say what was measured."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from benchmarks import scan
from benchmarks.__main__ import main
from benchmarks.compare import results
from benchmarks.measure import PASSES


@pytest.mark.parametrize("case", scan.CASES)
def test_every_provider_computes_the_same_recurrence(case: str) -> None:
    """In float32, sums of some hundred terms of about 1."""
    workload = scan.Workload(case, "float32", 70, 4, 2, 8)
    inputs = scan.make_inputs(workload)
    exact = scan.exact_results(workload, inputs)
    for name in scan.BACKENDS:
        for _ in range(2):  # a second run does not add to the gradients of the first
            for mine, right in zip(results(scan.make_candidate(name, workload, inputs)), exact, strict=True):
                torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


def test_flops_are_those_of_the_products_with_the_state() -> None:
    workload = scan.Workload("delta", "float32", 70, 4, 2, 8)
    cost = scan.cost_of(workload, scan.make_inputs(workload))
    unit = 2 * 70 * 4 * 8 * 8
    assert cost.flops == dict(zip(PASSES, (3 * unit, 6 * unit, 9 * unit), strict=True))


@pytest.mark.long
def test_report_has_a_row_for_each_provider_and_pass(tmp_path: pathlib.Path) -> None:
    sizes = ["--seq-len", "9", "--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "4", "--case", "delta"]
    command = ["scan", *sizes, "--threads", "1", "--repeats", "1", "--backend", "ringtile"]
    assert main([*command, "--json", str(tmp_path / "bench.json")]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [(row["backend"], row["pass"]) for row in rows] == [("ringtile", name) for name in PASSES]
    assert all(row["peak_bytes"] is not None and row["max_error"] < 1e-5 for row in rows)
