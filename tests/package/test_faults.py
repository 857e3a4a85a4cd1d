"""`make faults` is green only if every campaign made its trials and none was a bug; mutants break lines that exist."""

import pytest
from faults import __main__ as faults
from faults.counts import Counts
from mutants import MUTANTS, ROOT


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
