"""tools/wheel/matrix.py without a network: its rows, its table, and how it reads what the tests of a row print."""

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


# ---- rows ---------------------------------------------------------------------------------------


def test_rows_ask_for_versions_and_tests_that_exist():
    for row in matrix.ROWS:
        assert re.fullmatch(r"3\.\d+", row.python)
        assert re.fullmatch(r"(2\.\d+)?", row.torch)
        assert row.extra is None or re.fullmatch(r"(\[\w+\])?", row.extra)
        assert all((ROOT / test).is_file() for test in row.tests)
    assert len(set(matrix.ROWS)) == len(matrix.ROWS)


def test_only_a_row_without_tests_lacks_the_packages_that_the_wheel_needs():
    assert all((row.extra is None) == (not row.tests) for row in matrix.ROWS)


def test_lowest_versions_are_those_of_pyproject(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text(
        """[build-system]
requires = ["torch>=2.11"]
[project]
dependencies = ["torch>=2.11", "rich>=13"]
dev = ["ringtile[hf]", "pytest>=8", "trl>=1.16; python_version >= '3.11'", "trl>=1.9; python_version < '3.11'"]
"""
    )
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    assert matrix.lowest() == ["rich==13", "trl==1.9"]  # 1.9 is below 1.16


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        (matrix.Row("3.11", "2.13"), [["torch==2.13.*", "ringtile[dev] @ file:///a/b.whl"]]),
        (matrix.Row("3.11", "", ("c==1",), ""), [["torch", "c==1", "ringtile @ file:///a/b.whl"]]),
        (matrix.Row("3.11", "2.10", extra=None), [["torch==2.10.*"], ["--no-deps", "/a/b.whl"]]),
    ],
)
def test_what_a_row_installs(row, asked, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(matrix.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(
        matrix.subprocess, "run", lambda command, **_: commands.append(command) or _done(returncode=0, stderr="")
    )
    python = matrix.install(row, pathlib.Path("/a/b.whl"), tmp_path)
    make, *installs = commands
    assert make == ["uv", "venv", "--quiet", "--python", "/bin/python3.11", str(tmp_path)]
    assert [command[command.index(python) + 1 :] for command in installs] == asked


def _done(**fields):
    return type("Done", (), fields)


@pytest.mark.parametrize(
    ("found", "reason"), [(None, "no python3.11 on PATH"), ("/bin/python3.11", "no such version, anywhere")]
)
def test_a_row_that_cannot_be_installed_is_not_tried(found, reason, monkeypatch, tmp_path):
    monkeypatch.setattr(matrix, "ROWS", [matrix.Row("3.11", "2.13")])
    monkeypatch.setattr(matrix.shutil, "which", lambda name: found)
    failed = _done(returncode=1, stderr="no such version,\n  anywhere\n")
    monkeypatch.setattr(matrix.subprocess, "run", lambda command, **_: failed)
    matrix.try_row(0, pathlib.Path("/a/b.whl"), tmp_path)
    result = json.loads((tmp_path / "row-0.json").read_text())
    assert result["verdict"] == f"not tried: {reason}"
    assert result["versions"] == {"python": "3.11", "torch": "2.13"}


# ---- verdicts -----------------------------------------------------------------------------------

SUMMARY = "3 passed, 2 skipped, 115 deselected, 18 warnings in 101.23s (0:01:41)"
FAILURE = "==== 1 failed, 122 passed, 115 deselected in 9.10s ===="


@pytest.mark.parametrize(
    ("text", "status", "verdict"),
    [
        (f"...\n{SUMMARY}\n", 0, "3 passed, 2 skipped"),
        (f"9 passed in 0.1s\n...\n{SUMMARY}\nleaked objects\n", 0, "3 passed, 2 skipped"),  # the last summary counts
        (f"...\n{FAILURE}\n", 1, "FAILED: 1 failed, 122 passed, 115 deselected"),
        (f"...\n{SUMMARY}\n", -11, "FAILED: 3 passed, 2 skipped, 115 deselected, 18 warnings"),  # died at its end
        ("Killed\n", -9, "FAILED: see the log"),
        ("", 0, "FAILED: see the log"),
        ("1 error in 0.50s\n", 2, "FAILED: 1 error"),
    ],
)
def test_verdict_of_a_rows_tests(text, status, verdict, tmp_path):
    assert _verdict(matrix.Row("3.11", "2.13"), text, status, tmp_path) == verdict


@pytest.mark.parametrize(
    ("text", "status", "verdict"),
    [
        ("refused: torch 2.10 is too old\n", 0, "refused: torch 2.10 is too old"),
        ("", 0, "FAILED: see the log"),  # the ops loaded, or the error is another one
        ("refused: torch 2.10 is too old\n", 1, "FAILED: refused: torch 2.10 is too old"),
    ],
)
def test_verdict_of_a_refusal(text, status, verdict, tmp_path):
    assert _verdict(matrix.Row("3.11", "2.10", extra=None, tests=()), text, status, tmp_path) == verdict


def _verdict(row, text, status, folder):
    """As if the row's Python had printed `text` and ended with `status`."""
    (folder / "text").write_text(text)
    python = folder / "python"
    end = f"kill {status} $$" if status < 0 else f"exit {status}"
    python.write_text(f"#!/bin/sh\ncat {folder}/text\n{end}\n")
    python.chmod(0o755)
    log = folder / "row.log"
    verdict = matrix.verdict(row, str(python), log)
    assert log.read_text() == text
    return verdict


# ---- the table ----------------------------------------------------------------------------------

ROWS = [
    matrix.Row("3.10", "2.11", oldest=True),
    matrix.Row("3.11", "", ("axolotl==0.19.0", "pytest")),
    matrix.Row("3.12", "2.10"),
]
RESULT = {
    "versions": {"python": "3.10.13", "torch": "2.11.0", "trl": "1.14.0"},
    "verdict": "3 passed",
    "date": "2026-11-23",
}


def _lines(folder):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in matrix.table(folder).splitlines()]


def test_table_holds_results_and_says_what_was_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "ROWS", ROWS)
    (tmp_path / "row-0.json").write_text(json.dumps(RESULT))
    names, line, *rows = _lines(tmp_path)
    assert names[:2] == ["Python", "torch"]
    assert set(line) == {"---"}
    assert rows == [
        ["3.10.13", "2.11.0", "", "", "1.14.0", "", "", "oldest versions", "3 passed", "2026-11-23"],
        ["3.11", "", "", "", "", "", "", "axolotl==0.19.0", "not tried", ""],
        ["3.12", "2.10", "", "", "", "", "", "", "not tried", ""],
    ]


def test_main_writes_the_table_into_the_page_and_names_failures(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{matrix.BEGIN}an old table\n{matrix.END}after\n")
    monkeypatch.setattr(matrix, "PAGE", page)
    monkeypatch.setattr(matrix, "ROWS", ROWS)
    failed = {**RESULT, "verdict": "FAILED: a | b"}
    written = {0: RESULT, 2: failed}

    def try_row(number, wheel, folder):
        (folder / f"row-{number}.json").write_text(json.dumps(written[number]))

    monkeypatch.setattr(matrix, "try_row", try_row)
    matrix.main(pathlib.Path("a.whl"), tmp_path / "rows", [0])
    assert "not tried" in page.read_text()
    with pytest.raises(SystemExit, match="failed: row-2; logs in"):
        matrix.main(pathlib.Path("a.whl"), tmp_path / "rows", [2])
    text = page.read_text()  # with the result of row 0, which was kept
    assert "3 passed" in text
    assert "FAILED: a \\| b" in text
    assert "an old table" not in text
    assert (text.split("\n")[0], text.split("\n")[-2]) == ("before", "after")
