"""tests/gpu/run_all: it reports a missing GPU; its steps name existing files, fail alone, and can be run again."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import pathlib
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import pytest
import smoke
import torch
from device import DEVICE
from pool import run_program

from benchmarks import __main__ as bench

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
    arguments = f"import sys; sys.argv[1:] = [{str(tmp_path / 'out')!r}]\n"
    done = run_program(f"{arguments}import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')")
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: torch ")
    assert "sees no GPU; nothing was built, checked or measured" in done.stdout
    assert not (tmp_path / "out").exists()


def test_steps_name_existing_files(run_all: ModuleType, tmp_path: pathlib.Path) -> None:
    for step in run_all.steps(tmp_path).values():
        assert 0 < step.seconds < run_all.SECONDS < 600
        assert all((run_all.ROOT / part).exists() for part in step.command if part.endswith(".py"))


def test_measurements_cover_the_quick_bench(
    run_all: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(options: tuple[str, ...]) -> set[object]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--json")
        bench.add_arguments(parser)
        subject = importlib.import_module(f"benchmarks.{options[0]}")
        return {comparison.workload for comparison in bench.chosen(parser.parse_args(options), subject)}

    monkeypatch.setattr(run_all, "num_gpus", lambda: 2)
    steps = run_all.steps(tmp_path)
    points = {name: chosen(step.command[3:]) for name, step in steps.items() if name.startswith("bench")}
    assert points["bench"] | points["bench_masks"] == chosen(("attention", "--quick", "--device", "cuda"))
    assert points["bench_sm80"] == points["bench"]
    for subject in bench.SUBJECTS:
        assert any(step.command[3] == subject for step in steps.values() if "benchmarks" in step.command), subject


def test_what_needs_several_gpus_comes_first_where_there_are(
    run_all: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {}
    for count in (0, 1, 2):
        monkeypatch.setattr(run_all, "num_gpus", lambda count=count: count)
        names[count] = list(run_all.steps(tmp_path))
    assert names[2][:4] == ["smoke", "nccl", "trainer", "bench_ring"]
    assert names[1][0] == "smoke"
    assert names[1].index("kernels") < names[1].index("trainer") < names[1].index("nccl")
    assert set(names[0]) == set(names[2]) == {*names[1], "bench_ring"}


def archived(folder: pathlib.Path) -> dict[str, bytes]:
    """What the one file that comes back holds."""
    with tarfile.open(folder / "results.tar.gz") as file:
        return {name.removeprefix("results/"): file.extractfile(name).read() for name in file.getnames()}  # type: ignore[union-attr]


def test_a_step_that_fails_or_hangs_is_reported(run_all: ModuleType, tmp_path: pathlib.Path) -> None:
    """A step that hangs is killed with its children; what it had said is archived before and after."""
    folder, parts = tmp_path / "out", tmp_path / "parts"
    folder.mkdir()
    parts.mkdir()
    run_all.ARCHIVE_SECONDS = 0.2

    def status(program: str, seconds: float = 60) -> object:
        return run_all.run("step", run_all.Step(seconds, (sys.executable, "-c", program)), folder, parts)["status"]

    assert (status(""), status("exit(3)")) == (0, 3)
    pid = tmp_path / "pid"
    sleep = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    hangs = f"import subprocess, sys; print('said', flush=True); subprocess.run([sys.executable, '-c', {sleep!r}])"
    assert status(hangs, 2) == "took longer than 2 s"
    assert archived(folder) == {"step.log": b"said\n"}
    if pid.exists():  # else the step was killed before its child started
        while is_running(int(pid.read_text())):  # a child that survives fails the test by its timeout
            time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def fake_steps(run_all: ModuleType, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str]) -> None:
    """Steps that are Python programs, on a machine with a GPU."""

    def steps(parts: pathlib.Path) -> dict[str, object]:
        return {
            name: run_all.Step(60, (sys.executable, "-c", text), run_all.SM_80 if "sm80" in name else {})
            for name, text in programs.items()
        }

    monkeypatch.setattr(run_all, "steps", steps)
    monkeypatch.setattr(run_all, "why_not", lambda: "")
    monkeypatch.setattr(run_all, "binaries", lambda: ("binaries: carried", None))


def test_a_step_that_fails_does_not_stop_the_others_and_can_be_run_again(
    run_all: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fixed, folder = tmp_path / "fixed", tmp_path / "out"
    programs = {
        "kernels": f"import os; exit(not os.path.exists({str(fixed)!r}))",
        "kernels_sm80": "import os; print(os.environ['RINGTILE_CUDA_ISA'])",
    }
    fake_steps(run_all, monkeypatch, programs)

    def statuses() -> dict[str, object]:
        return {name: found["status"] for name, found in json.loads((folder / "summary.json").read_text()).items()}

    assert run_all.main([str(folder)]) == 1
    assert statuses() == {"kernels": 1, "kernels_sm80": 0}
    assert archived(folder)["kernels_sm80.log"] == b"sm_80\n"
    assert sorted(path.name for path in folder.iterdir()) == ["results.tar.gz", "summary.json"]
    assert "again: python tests/gpu/run_all FOLDER --seconds 540 kernels\n" in capfd.readouterr().out
    fixed.touch()
    assert run_all.main([str(folder), "kernels"]) == 0
    assert statuses() == {"kernels": 0, "kernels_sm80": 0}
    assert run_all.main([str(folder), "--seconds", "0", "kernels_sm80"]) == 1
    assert statuses() == {"kernels": 0, "kernels_sm80": "no time was left"}
    assert run_all.main([str(folder), "kernel"]) == 2
    assert "there is no step kernel here; expected some of kernels, kernels_sm80" in capfd.readouterr().out


def test_a_step_that_needs_a_gpu_is_rehearsed_up_to_its_refusal(
    run_all: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only in a rehearsal: on a machine with a GPU the same words are a failure. Other errors always are."""
    refusal = f"print({run_all.NO_GPU!r}); exit(2)"
    fake_steps(run_all, monkeypatch, {"bench": refusal, "bench_masks": "exit(2)", "ring": refusal})
    plan = run_all.steps(tmp_path)
    plan |= {name: step._replace(needs_gpu=name != "ring") for name, step in plan.items()}
    monkeypatch.setattr(run_all, "steps", lambda parts: plan)
    assert run_all.main([str(tmp_path / "there"), "bench"]) == 1
    monkeypatch.setattr(run_all, "why_not", lambda: "torch sees no GPU")
    assert run_all.main([str(tmp_path / "here"), "--rehearse"]) == 1
    printed = capfd.readouterr().out
    assert "rehearsal: torch sees no GPU\nbinaries: carried\n" in printed
    assert "bench: fine, there is no more to rehearse without a GPU" in printed
    assert printed.endswith("FOLDER --seconds 540 bench_masks ring\n")


@pytest.mark.parametrize("sm_90a", ["ok", "started the forward, and did not end"])
def test_kernels_that_fail_the_smoke_step_are_not_used_by_the_others(
    run_all: ModuleType,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    sm_90a: str,
) -> None:
    """The smoke step runs first, whichever steps are wanted."""
    folder, parts = tmp_path / "out", tmp_path / "out.parts"
    found = {"sm_80": "ok", "sm_90a": sm_90a}
    smoke = f"open({str(parts / 'smoke.json')!r}, 'w').write({json.dumps(found)!r}); exit({sm_90a != 'ok'})"
    isa = "import os; print(os.environ.get('RINGTILE_CUDA_ISA'))"
    fake_steps(run_all, monkeypatch, {"smoke": smoke, "kernels": isa, "kernels_sm80": isa})
    assert run_all.main([str(folder), "kernels", "kernels_sm80"]) == int(sm_90a != "ok")
    files, printed = archived(folder), capfd.readouterr().out
    if sm_90a == "ok":
        assert (files["kernels.log"], files["kernels_sm80.log"]) == (b"None\n", b"sm_80\n")
    else:
        assert files["kernels.log"] == b"sm_80\n"
        assert "kernels_sm80.log" not in files
        assert (
            "sm_90a failed (sm_90a: started the forward, and did not end); ALL OTHER STEPS RUN WITH RINGTILE_CUDA_ISA"
            in printed
        )


def test_carried_binaries_are_used_if_they_are_of_these_sources(
    run_all: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried, package = tmp_path / "carried", tmp_path / "package"
    monkeypatch.setattr(run_all, "CARRIED", carried)
    monkeypatch.setattr(run_all, "PACKAGE", package)
    monkeypatch.setattr(run_all.subprocess, "run", lambda *args, **options: subprocess.CompletedProcess(args, 0))
    package.mkdir()
    assert "no binaries in" in run_all.binaries()[0]
    carried.mkdir()
    (tmp_path / "_cuda.abi3.so").write_bytes(b"new")
    with tarfile.open(carried / run_all.ARCHIVE, "w:gz") as file:
        file.add(tmp_path / "_cuda.abi3.so", "_cuda.abi3.so")
    (carried / "sources.sha256").write_text("of another day")
    said, build = run_all.binaries()
    assert "were made of other sources, so they are built here" in said
    assert build.command == run_all.BUILD
    assert not list(package.iterdir())
    (carried / "sources.sha256").write_text(run_all.digest_of_sources())
    assert run_all.binaries() == ("binaries: carried", None)
    assert {path.name: path.read_bytes() for path in package.iterdir()} == {"_cuda.abi3.so": b"new"}


def test_smoke_names_what_is_wrong(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On this machine it passes; a kernel that is wrong in one tile, one that raises and one that never ends do not."""
    file, isa = tmp_path / "smoke.json", smoke.isas()[-1]

    def said() -> str:
        found: dict[str, str] = json.loads(file.read_text())
        return found[isa]

    assert smoke.main(file) == 0
    assert said() == "ok"
    forward = smoke.ops.attn_fwd_

    def wrong(*arguments: Any, **rounded: Any) -> None:
        forward(*arguments, **rounded)
        for rounded_out in rounded.values():
            rounded_out[:, 32:48, 0, 16:32] = torch.nan

    monkeypatch.setattr(smoke.ops, "attn_fwd_", wrong)
    assert smoke.main(file) == 1
    assert said() == "head dim 64: rounded out is off by nan of its norm, expected at most 2.0e-02"
    assert "rounded out, columns in groups of 16:\nrows   0..: ....\nrows  16..: ....\nrows  32..: .N..\n" in (
        capsys.readouterr().out
    )
    (saved,) = tmp_path.glob("smoke_*_64_rounded_out.pt")
    assert bool(torch.load(saved)[:, 32:48, 0, 16:32].isnan().all())
    monkeypatch.setattr(smoke.ops, "attn_fwd_", raises(RuntimeError("no kernel\n image")))
    assert smoke.main(file) == 1
    assert said() == "head dim 64: no kernel image"
    monkeypatch.setattr(smoke.ops, "attn_fwd_", forward)
    monkeypatch.setattr(smoke.ops, "attn_bwd_", raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        smoke.main(file)
    assert said() == "started the backward, head dim 64, and did not end"


def raises(error: BaseException) -> Callable[..., None]:
    def raising(*arguments: object) -> None:
        raise error

    return raising
