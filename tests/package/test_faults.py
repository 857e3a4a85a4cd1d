"""`make faults` is green only if every campaign made its trials and none was a bug; mutants break lines that exist.
A small number of its trials, with a fixed seed, is made here."""

import json

import pytest
from faults import __main__ as faults
from faults.counts import Counts
from mutants import MUTANTS, ROOT
from pool import run_program

# Hostile calls of each boundary in every run; `make faults` makes more of the same.
TRIALS = {"op_calls": 80, "scan_calls": 25, "torch_interface": 25}


@pytest.mark.parametrize("name", TRIALS)
def test_hostile_calls_are_right_or_refused_by_name(name: str) -> None:
    """And neither always: a boundary that refuses everything is no better."""
    campaign = f"import dataclasses, json; from faults import {name}; counts = {name}.campaign({TRIALS[name]}, 0)"
    done = run_program(f"{campaign}; print('counts', json.dumps(dataclasses.asdict(counts)))")
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("counts ")]
    counts = Counts(**json.loads(line.removeprefix("counts ")))
    assert counts.bugs == 0, counts.notes
    assert min(counts.right, counts.named) > TRIALS[name] / 8


@pytest.mark.parametrize("bug", [None, "no trials", *Counts.BUGS])
def test_faults_fail_with_any_bug(bug, monkeypatch, capsys):
    campaigns = {"ring_kills": Counts(named=5), "op_calls": Counts(right=1_200, named=34)}
    if bug == "no trials":
        campaigns["ring_kills"] = Counts()
    elif bug is not None:
        setattr(campaigns["ring_kills"], bug, 1)
    monkeypatch.setattr(faults, "in_a_process", lambda name, trials, seed: campaigns[name])
    monkeypatch.setattr("sys.argv", ["faults", *campaigns])
    assert faults.main() == (0 if bug is None else 1)
    *_, ring, ops, everything = capsys.readouterr().out.splitlines()
    assert ring.endswith("FAILED") == (bug is not None)
    assert ops.split() == ["op_calls", "1,234", "1,200", "34", "0", "0", "0", "0", "0"]
    assert everything.split()[0] == "all"


def test_a_campaign_that_ends_without_counts_is_a_crash():
    counts = faults.in_a_process("no_such_campaign", None, 0)
    assert counts.crashes == counts.bugs == 1
    assert "No module named 'faults.no_such_campaign'" in counts.notes[0]


def test_every_mutant_breaks_one_line_that_is_there() -> None:
    for mutant in MUTANTS:
        assert (ROOT / mutant.file).read_text().count(mutant.line) == 1, mutant.name
        kind, *rest = mutant.test.split()
        path = f"tests/{kind}/{rest[0]}.c" if kind in ("c", "emulator") else kind
        assert (ROOT / path).exists(), mutant.name
