"""`python -m benchmarks tree`: the tree and the rows compute the same numbers, and rows say what was measured."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from benchmarks import tree
from benchmarks.__main__ import main
from benchmarks.compare import results
from benchmarks.measure import PASSES


@pytest.mark.parametrize("case", tree.CASES)
def test_rows_and_the_tree_are_the_same_work(case: str) -> None:
    """23 tokens: a prompt of 11 and 3 completions of 4. In float32, sums of some ten terms of about 1."""
    workload = tree.Workload(case, "float32", 23, 4, 2, 8, num_completions=3)
    assert workload.lengths == (11, [4, 4, 4])
    inputs = tree.make_inputs(workload)
    found = {}
    for name in tree.BACKENDS:
        if (candidate := tree.make_candidate(name, workload, inputs)) is not None:
            found[name] = results(candidate)
    assert found.keys() == {*tree.BACKENDS} - ({"torch_mask"} if case != "attention" else set())
    of_rows = tree.rows_of(workload, found["ringtile"][0])
    torch.testing.assert_close(of_rows, found["ringtile_rows"][0], rtol=1e-4, atol=1e-5)
    if case == "attention":
        for mine, theirs in zip(found["ringtile"], found["torch_mask"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_report_has_a_row_for_each_backend_and_pass(tmp_path: pathlib.Path) -> None:
    sizes = ["--seq-len", "24", "--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "4", "--case", "delta"]
    command = ["tree", *sizes, "--threads", "1", "--repeats", "1"]
    assert main([*command, "--json", str(tmp_path / "bench.json")]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [(row["backend"], row["pass"]) for row in rows] == [
        (backend, name) for backend in ("ringtile", "ringtile_rows") for name in PASSES
    ]
