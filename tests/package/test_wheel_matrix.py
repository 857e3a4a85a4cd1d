"""tools/wheel/matrix.py without a network: its rows, how it reads what the tests of a row print, and its table."""

import importlib.util
import json
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def _load():
    spec = importlib.util.spec_from_file_location("wheel_matrix", ROOT / "tools" / "wheel" / "matrix.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


matrix = _load()


def test_rows_ask_for_versions_and_tests_that_exist():
    """Only a row without tests lacks the packages that the wheel needs."""
    for row in matrix.ROWS:
        assert re.fullmatch(r"3\.\d+", row.python)
        assert re.fullmatch(r"(2\.\d+)?", row.torch)
        assert (row.extra is None) == (not row.tests)
        assert all((ROOT / test).is_file() for test in row.tests)
    assert len(set(matrix.ROWS)) == len(matrix.ROWS)


SUITE, REFUSAL = matrix.Row("3.11", "2.13"), matrix.Row("3.11", "2.10", extra=None, tests=())
SUMMARY = "3 passed, 2 skipped, 115 deselected, 18 warnings in 101.23s (0:01:41)"
FAILURE = "==== 1 failed, 122 passed, 115 deselected in 9.10s ===="


@pytest.mark.parametrize(
    ("row", "text", "status", "verdict"),
    [
        (SUITE, f"...\n{SUMMARY}\n", 0, "3 passed, 2 skipped"),
        (SUITE, f"9 passed in 0.1s\n...\n{SUMMARY}\nleaked objects\n", 0, "3 passed, 2 skipped"),  # the last one counts
        (SUITE, f"...\n{FAILURE}\n", 1, "FAILED: 1 failed, 122 passed, 115 deselected"),
        (
            SUITE,
            f"...\n{SUMMARY}\n",
            -11,
            "FAILED: 3 passed, 2 skipped, 115 deselected, 18 warnings",
        ),  # died at its end
        (SUITE, "", 0, "FAILED: see the log"),
        (REFUSAL, "refused: torch 2.10 is too old\n", 0, "refused: torch 2.10 is too old"),
        (REFUSAL, "", 0, "FAILED: see the log"),  # the ops loaded, or the error is another one
        (REFUSAL, "refused: torch 2.10 is too old\n", 1, "FAILED: refused: torch 2.10 is too old"),
    ],
)
def test_verdict_of_a_row(row, text, status, verdict, tmp_path):
    """The row's Python prints `text` and ends with `status`."""
    (tmp_path / "text").write_text(text)
    python = tmp_path / "python"
    end = f"kill {status} $$" if status < 0 else f"exit {status}"
    python.write_text(f"#!/bin/sh\ncat {tmp_path}/text\n{end}\n")
    python.chmod(0o755)
    assert matrix.verdict(row, str(python), tmp_path / "row.log") == verdict


def test_main_writes_kept_and_new_results_into_the_page_and_names_failures(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{matrix.BEGIN}an old table\n{matrix.END}after\n")
    monkeypatch.setattr(matrix, "PAGE", page)
    monkeypatch.setattr(
        matrix, "ROWS", [matrix.Row("3.11", "2.11"), matrix.Row("3.12", ""), matrix.Row("3.13", "2.10")]
    )
    result = {"versions": {"python": "3.11.7", "torch": "2.11.0"}, "date": "2026-11-23"}
    verdicts = {0: "3 passed", 2: "FAILED: a | b"}

    def try_row(number, wheel, folder, releases):
        given.append(releases)
        (folder / f"row-{number}.json").write_text(json.dumps({**result, "verdict": verdicts[number]}))

    given = []
    monkeypatch.setattr(matrix, "try_row", try_row)
    matrix.main(pathlib.Path("a.whl"), tmp_path / "rows", ["0", "transformers==5.25.0"])
    with pytest.raises(SystemExit, match="failed: row-2; logs in"):
        matrix.main(pathlib.Path("a.whl"), tmp_path / "rows", ["2"])
    assert given == [["transformers==5.25.0"], []]
    before, _, _, *rows, after = [line for line in page.read_text().split("\n") if line and "<!--" not in line]
    assert (before, after) == ("before", "after")
    assert [row.split(" | ")[-2] for row in rows] == ["3 passed", "not tried", "FAILED: a \\| b"]
