"""tests/gpu/run_all: it reports a missing GPU; its steps name existing files, fail alone, and can be run again."""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import subprocess
import sys
import time
from importlib.machinery import SourceFileLoader
from types import ModuleType

import pytest
from device import DEVICE
from ringtile.bench import attention
from ringtile.cli import bench

SCRIPT = pathlib.Path(__file__).parent / "run_all"


@pytest.fixture
def run_all() -> ModuleType:
    loader = SourceFileLoader("run_all", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("run_all", loader))  # type: ignore[arg-type]
    sys.modules["run_all"] = module
    loader.exec_module(module)
    return module


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_does_nothing(tmp_path: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: torch ")
    assert "sees no GPU; nothing was built, checked or measured" in done.stdout
    assert not (tmp_path / "out").exists()


def test_steps_name_existing_files(run_all: ModuleType, tmp_path: pathlib.Path) -> None:
    for step in run_all.steps(tmp_path).values():
        assert 0 < step.seconds < run_all.SECONDS
        assert all((run_all.ROOT / part).exists() for part in step.command if part.endswith(".py"))


def test_measurements_cover_the_quick_bench(run_all: ModuleType, tmp_path: pathlib.Path) -> None:
    def chosen(options: tuple[str, ...]) -> set[object]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--json")
        bench.add_arguments(parser)
        return {comparison.workload for comparison in bench.chosen(parser.parse_args(options), attention)}

    steps = run_all.steps(tmp_path)
    points = {name: chosen(steps[name].command[4:]) for name in ("bench", "bench_masks", "bench_sm80")}
    assert points["bench"] | points["bench_masks"] == chosen(("attention", "--quick", "--device", "cuda"))
    assert points["bench_sm80"] == points["bench"]


def test_a_step_that_fails_or_hangs_is_reported(run_all: ModuleType, tmp_path: pathlib.Path) -> None:
    """A step that hangs is killed with its children."""

    def status(program: str, seconds: float = 60) -> object:
        return run_all.run("step", run_all.Step(seconds, (sys.executable, "-c", program)), tmp_path)["status"]

    assert (status(""), status("exit(3)")) == (0, 3)
    pid = tmp_path / "pid"
    sleep = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    hangs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}])"
    assert status(hangs, 3) == "took longer than 3 s"
    if pid.exists():  # else the step was killed before its child started
        while is_running(int(pid.read_text())):  # a child that survives fails the test by its timeout
            time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_step_that_fails_does_not_stop_the_others_and_can_be_run_again(
    run_all: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fixed = tmp_path / "fixed"
    programs = {
        "build": f"import os; exit(not os.path.exists({str(fixed)!r}))",
        "kernels": "import os; print(os.environ['RINGTILE_CUDA_ISA'])",
    }
    plan = {name: run_all.Step(60, (sys.executable, "-c", text), run_all.SM_80) for name, text in programs.items()}
    monkeypatch.setattr(run_all, "steps", lambda folder: plan)
    monkeypatch.setattr(run_all, "why_not", lambda: "")
    folder = tmp_path / "out"

    def statuses() -> dict[str, object]:
        return {name: found["status"] for name, found in json.loads((folder / "summary.json").read_text()).items()}

    assert run_all.main([str(folder)]) == 1
    assert statuses() == {"build": 1, "kernels": 0}
    assert (folder / "kernels.log").read_text() == "sm_80\n"
    fixed.touch()
    assert run_all.main([str(folder), "build"]) == 0
    assert statuses() == {"build": 0, "kernels": 0}
    monkeypatch.setattr(run_all, "SECONDS", 0)
    assert run_all.main([str(folder), "kernels"]) == 1
    assert statuses() == {"build": 0, "kernels": "no time was left"}
    assert run_all.main([str(folder), "kernel"]) == 2
    assert "there is no step kernel here; expected some of build, kernels" in capfd.readouterr().out
