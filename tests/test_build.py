"""What setup.py says when it cannot build: one clear line, before any compiler output."""

from __future__ import annotations

import os
import pathlib
import stat
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def run_setup(before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `setup.py build_ext`, after some Python that breaks its world."""
    program = f"""{before}
import runpy, sys
sys.argv = ["setup.py", "build_ext"]
runpy.run_path("setup.py", run_name="__main__")
"""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def assert_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode != 0
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("ringtile: cannot build: ")
    assert message in lines[0]


def test_missing_torch_is_one_line() -> None:
    assert_refused(run_setup("import sys; sys.modules['torch'] = None"), "torch is not installed")


def test_old_torch_is_one_line() -> None:
    assert_refused(run_setup("import torch; torch.__version__ = '2.9.1'"), "torch 2.9.1 is too old")


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_missing_compiler_is_one_line(variable: str) -> None:
    assert_refused(run_setup(**{variable: "no-such-compiler"}), "no-such-compiler is not on PATH")


def test_compiler_without_python_headers_is_one_line(tmp_path: pathlib.Path) -> None:
    """A C++ compiler that fails on any file that names Python.h, as on a machine without python3-dev."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ngrep -qs Python.h probe.cpp && { echo "no Python.h" >&2; exit 1; }\nexec c++ "$@"\n'
    )
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    assert_refused(run_setup(CXX=str(compiler)), "Python's headers")
