"""tests/gpu/run_all, where there is no GPU: it says so; its steps name what exists."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

import pytest
from device import DEVICE

SCRIPT = pathlib.Path(__file__).parent / "run_all"


@pytest.fixture
def run_all() -> ModuleType:
    loader = SourceFileLoader("run_all", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("run_all", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_does_nothing(tmp_path: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: torch ")
    assert "sees no GPU; nothing was built, checked or measured" in done.stdout
    assert not (tmp_path / "out").exists()


def test_its_steps_name_what_exists(run_all: ModuleType, tmp_path: pathlib.Path) -> None:
    for seconds, command in run_all.steps(tmp_path).values():
        assert 0 < seconds < run_all.SECONDS
        assert all((run_all.ROOT / part).exists() for part in command if part.endswith(".py"))


def test_a_step_that_fails_or_hangs_is_reported(run_all: ModuleType, tmp_path: pathlib.Path) -> None:
    done = {code: run_all.run("step", 5, (sys.executable, "-c", code), tmp_path)["status"] for code in ("", "exit(3)")}
    assert done == {"": 0, "exit(3)": 3}
    hangs = (sys.executable, "-c", "import time; time.sleep(60)")
    assert run_all.run("step", 0.2, hangs, tmp_path)["status"] == "took longer than 0 s"
