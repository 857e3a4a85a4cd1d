"""`ringtile doctor`: tells the truth about this process, also where the compiled ops do not load."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import ringtile
import torch
from pool import run_program
from ringtile import ops
from ringtile.cli import main

PACKAGE = pathlib.Path(ringtile.__file__).parent


def run_doctor(
    tmp_path: pathlib.Path, *statements: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    command = ["doctor", "--json", str(tmp_path / "doctor.json")]
    if "PYTHONPATH" in environment:  # another copy of the package
        program = [sys.executable, "-m", "ringtile", *command]
        done = subprocess.run(program, env=os.environ | environment, capture_output=True, text=True, cwd=tmp_path)
    else:
        program = ["import sys; from ringtile.cli import doctor, main", *statements, f"sys.exit(main({command}))"]
        done = run_program("\n".join(program), **environment)
    return done, json.loads((tmp_path / "doctor.json").read_text())


def test_doctor_reports_this_machine(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["versions"]["torch"] == torch.__version__
    assert report["kernels"]["isa"] == ops.cpu_isa()
    assert report["kernels"]["threads"] == torch.get_num_threads()
    assert report["process groups"]["gloo"] is True
    assert torch.__version__ in capsys.readouterr().out


@pytest.mark.long  # a process of its own; the tests below read the same report in this one
def test_doctor_names_the_forced_instruction_set(tmp_path: pathlib.Path) -> None:
    done, report = run_doctor(tmp_path, RINGTILE_CPU_ISA="generic")
    assert done.returncode == 0, done.stderr
    assert report["kernels"]["isa"] == "generic"
    assert report["kernels"]["best_isa"] in ops.ISA_NAMES
    assert report["environment"]["RINGTILE_CPU_ISA"] == "generic"


def test_doctor_names_an_unknown_instruction_set(tmp_path: pathlib.Path) -> None:
    done, report = run_doctor(tmp_path, "doctor.best_isa = lambda: None", RINGTILE_CPU_ISA="sse9")
    assert done.returncode == 1
    assert "RINGTILE_CPU_ISA" in report["kernels"]["error"]
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_doctor_works_without_the_compiled_ops(tmp_path: pathlib.Path) -> None:
    """A copy of the package without its binary, as after a failed build."""
    (tmp_path / "ringtile").mkdir()
    for part in PACKAGE.iterdir():
        if part.suffix != ".so":
            (tmp_path / "ringtile" / part.name).symlink_to(part)
    done, report = run_doctor(tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "pip install" in report["kernels"]["error"]
    assert report["versions"]["torch"] == torch.__version__
    assert "Traceback" not in done.stderr
