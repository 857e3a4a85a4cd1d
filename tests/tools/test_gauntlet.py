"""`python -m tools.gauntlet`: the oracle, the blocks that stand in for a GPU's kernels, and the verdicts."""

import dataclasses
import json
import linecache
import math
import pathlib
import subprocess
import sys
from typing import Any

import mutants_of_peers
import pytest
import torch
from ringtile.errors import ConfigError
from torch.nn import functional

from tools.gauntlet import __main__ as table
from tools.gauntlet import attention_cases, block_on_cpu, judge, training_cases
from tools.gauntlet.attention_cases import Outputs, exact
from tools.gauntlet.backends import backend, backends

ROOT = pathlib.Path(__file__).parents[2]
CASES = {case.name: case for case in attention_cases.CASES}


@pytest.mark.parametrize("name", ["causal", "bidirectional", "documents", "window", "prefix", "kv heads < ranks"])
def test_oracle_is_scaled_dot_product_attention(name: str) -> None:
    case = CASES[name]
    q, k, v, dout, _ = case.tensors(torch.float64)
    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
    out = functional.scaled_dot_product_attention(*leaves, attn_mask=case.attends()[:, None], enable_gqa=True)
    out.backward(dout.transpose(1, 2))
    expected = [out.detach(), *(x.grad for x in leaves)]
    for got, wanted in zip(exact(case, case.tensors(torch.float64)).named().values(), expected, strict=True):
        assert wanted is not None
        torch.testing.assert_close(got, wanted.transpose(1, 2))


@pytest.mark.parametrize("name", ["causal", "bidirectional", "window", "softcap", "one kv head", "value dim"])
def test_block_on_cpu_is_attention(name: str) -> None:
    """What others' rings call on a CPU adds no error of its own."""
    case = CASES[name]
    inputs = case.tensors(torch.float32)
    q, k, v, dout, _ = inputs
    left = -1 if case.window is None else case.window - 1
    parts = (1 / math.sqrt(case.head_dim), case.causal, left, -1, case.softcap)
    out, lse = block_on_cpu.forward(q, k, v, *parts)
    found = judge.compare(case, Outputs(out, *block_on_cpu.backward(dout, q, k, v, out, lse, *parts)), torch.float32)
    assert found["excess"] <= 1.0


def test_block_on_cpu_aligns_a_causal_mask_at_the_end() -> None:
    """As flash-attn does where there are more keys than queries."""
    q, k, v, *_ = CASES["causal"].tensors(torch.float32)
    whole, _ = block_on_cpu.forward(q, k, v, 1.0, True, -1, -1, 0.0)
    half, _ = block_on_cpu.forward(q[:, 32:], k, v, 1.0, True, -1, -1, 0.0)
    torch.testing.assert_close(half, whole[:, 32:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_process_is_exact_and_a_dropped_mask_is_not(dtype: torch.dtype) -> None:
    case = CASES["window"]
    of_one_process = exact(case, case.tensors(dtype), dtype)
    assert judge.compare(case, of_one_process, dtype)["excess"] <= 1.0
    without_window = dataclasses.replace(case, window=None)
    assert judge.compare(case, exact(without_window, case.tensors(dtype), dtype), dtype)["excess"] > 4.0


def test_verdicts() -> None:
    exact_rank = {"excess": 0.5, "difference": 1e-7, "limit": 2e-7, "tensor": "dq"}
    wrong_rank = {"excess": 9.0, "difference": 0.5, "limit": 2e-7, "tensor": "dk"}
    said = {kind: {"kind": kind, "words": "why"} for kind in ("refused", "crashed", "not offered")}
    hangs = TimeoutError("no answer")
    for results, expected in (
        ([exact_rank, exact_rank], "exact"),
        ([exact_rank, wrong_rank], "wrong"),
        ([said["refused"], said["refused"]], "refused"),
        ([said["refused"], said["crashed"]], "crashed"),
        ([said["refused"], hangs], "hangs"),
        ([EOFError("the process died"), hangs], "crashed"),
        ([said["not offered"]] * 2, "not offered"),
    ):
        assert judge.verdict(results)["verdict"] == expected
    assert judge.verdict([{**exact_rank, "excess": math.inf, "difference": math.nan}])["verdict"] == "wrong"


def test_a_refusal_is_a_statement_and_has_words() -> None:
    def raises(statement: str) -> bool:
        namespace: dict[str, Any] = {"torch": torch}
        path = pathlib.Path(__file__).with_name("never_written.py")
        linecache.cache[str(path)] = (len(statement), None, [statement], str(path))
        try:
            exec(compile(statement, str(path), "exec"), namespace)
        except Exception as error:
            return judge.is_deliberate(error)
        raise AssertionError("nothing was raised")

    assert raises("raise ValueError('no windows')")
    assert raises("assert False, 'no windows'")
    assert not raises("assert False")
    assert not raises("torch.zeros(2) + torch.zeros(3)")


def test_every_case_and_backend_is_named_once() -> None:
    names = [case.name for case in attention_cases.CASES]
    trained = [case.name for case in training_cases.CASES]
    assert len({*names}) == len(names)
    assert all(sum(row) == case.seq_len for case in attention_cases.CASES for row in case.documents)
    assert len({*trained}) == len(trained)
    for one in backends().values():
        assert {*one.documented} <= {*names, *trained}
    with pytest.raises(ConfigError, match="BACKEND is nobody's; expected all, or one of ringtile"):
        backend("nobody's")


def test_page_says_what_was_found() -> None:
    rows = [
        {"backend": "ringtile", "case": "causal", "verdict": "exact", "words": ""},
        {"backend": "accelerate", "case": "causal", "verdict": "wrong", "words": "", "difference": 2.0},
        {"backend": "accelerate", "case": "sinks", "verdict": "refused", "words": "Error: no | sinks"},
        {"backend": "ringtile", "case": "sinks", "verdict": "exact", "words": "", "trains": True},
        {"backend": "accelerate", "case": "sinks", "verdict": "crashed", "words": "Error: sinks", "trains": True},
    ]
    page = table.page([{"trains": False, "documented": "", **row} for row in rows])
    assert "| causal | exact | **wrong** 2e+00 |" in page
    assert "| sinks |  | refused |" in page
    assert "| sinks | exact | **crashed** | gpt-oss: sinks and windows |" in page
    assert "| `accelerate` | sinks | refused: Error: no sinks |" in page
    assert "| `accelerate` | sinks (training) | crashed: Error: sinks |" in page


def test_page_lists_the_bugs_that_are_put_into_ringtile() -> None:
    assert mutants_of_peers.table() in mutants_of_peers.PAGE.read_text(encoding="ascii")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ringtile_is_judged(tmp_path: pathlib.Path) -> None:
    """A case of attention on 4 ranks, and one of training."""
    report = tmp_path / "report.json"
    cases = ("--case", "documents", "--case", "recurrent packed")
    command = [sys.executable, "-m", "tools.gauntlet", "ringtile", *cases, "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["verdict"] for row in json.loads(report.read_text())["rows"]] == ["exact", "exact"]
