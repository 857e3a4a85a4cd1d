"""tests/gpu/run_all: it reports a missing GPU; its steps name existing files, fail alone, and can be run again."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import adder
import pytest
import smoke
import torch
from device import DEVICE
from pool import run_program

from benchmarks import __main__ as bench

SCRIPT = pathlib.Path(__file__).parent / "run_all"


@pytest.fixture
def run_all(tmp_path: pathlib.Path) -> ModuleType:
    loader = SourceFileLoader("run_all", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("run_all", loader))  # type: ignore[arg-type]
    sys.modules["run_all"] = module
    loader.exec_module(module)
    module.PARTS = tmp_path / "build"
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
    for rehearse in (False, True):
        plan = run_all.steps(tmp_path, rehearse)
        for step in plan.values():
            assert 0 < step.seconds < run_all.SECONDS < 600
            assert all((run_all.ROOT / part).exists() for part in step.command if part.endswith(".py"))
            assert not step.beside or step.beside in plan
        assert {*run_all.SECOND, *run_all.ASKED} < set(plan)


def test_the_sanitizer_looks_at_every_kernel(run_all: ModuleType) -> None:
    """Each kernel has one of the names in its own, and each name is in that of a kernel."""
    kernels: set[str] = set()
    for file in sorted([*(run_all.ROOT / "cuda").rglob("*.cu"), *(run_all.ROOT / "cuda").rglob("*.cuh")]):
        for found in re.finditer(r"^(?:template.*)?RT_KERNEL\(.*\)\s*(\w+)\(RT_PARAMS", file.read_text(), re.MULTILINE):
            kernels.add(found[1])
    assert {"move_rows", "glu", "attn_bwd_sm90_kernel", "attn_fwd_sm90_kernel"} < kernels
    for kernel in kernels:
        assert any(name in kernel for name in run_all.OUR_KERNELS), kernel
    for name in (*run_all.OUR_KERNELS, "attn_fwd_sm90", "attn_bwd_sm90"):
        assert any(name in kernel for kernel in kernels), name


def test_measurements_are_of_the_quick_bench(
    run_all: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU; a rehearsal has a tiny workload of each subject."""

    def chosen(options: tuple[str, ...]) -> set[object]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--json")
        bench.add_arguments(parser)
        subject = importlib.import_module(f"benchmarks.{options[0]}")
        comparisons = bench.chosen(parser.parse_args(options), subject)
        for comparison in comparisons if "cuda" not in options else ():
            subject.check(comparison.workload)
        return {comparison.workload for comparison in comparisons}

    monkeypatch.setattr(run_all, "num_gpus", lambda: 2)
    subjects = set()
    for rehearse in (True, False):
        steps = run_all.steps(tmp_path, rehearse)
        benches = {name: step.command[3:] for name, step in steps.items() if "benchmarks" in step.command}
        points = {name: chosen(options) for name, options in benches.items() if options[0] in bench.SUBJECTS}
        subjects = {options[0] for options in benches.values()}
        assert all(len(workloads) == 1 for workloads in points.values() if rehearse)
        assert subjects >= set(bench.SUBJECTS)
    assert points["bench"] | points["bench_masks"] == chosen(("attention", "--quick", "--device", "cuda"))
    assert points["bench_sm80"] == points["bench"]


def test_what_needs_several_gpus_comes_first_where_there_are(
    run_all: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {}
    for count in (0, 1, 2):
        monkeypatch.setattr(run_all, "num_gpus", lambda count=count: count)
        names[count] = list(run_all.steps(tmp_path))
    assert names[2][:4] == ["smoke", "nccl", "trainer", "bench_ring"]
    assert names[1][0] == "smoke"
    assert names[1].index("kernels") < names[1].index("again") < names[1].index("train_32k")
    assert set(names[0]) == set(names[2]) == {*names[1], *run_all.OF_SEVERAL}


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
        step = run_all.Step(seconds, (sys.executable, "-c", program))
        return run_all.run({"step": step}, folder, parts)["step"]["status"]

    assert (status(""), status("exit(3)")) == (0, 3)
    assert status("import os; os.kill(os.getpid(), 11)") == "lost its process, signal 11"
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

    def steps(parts: pathlib.Path, **options: bool) -> dict[str, object]:
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
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        return {name: found["status"] for name, found in summary.items()}

    assert run_all.main([str(folder), *programs]) == 1
    assert statuses() == {"kernels": 1, "kernels_sm80": 0}
    assert archived(folder)["kernels_sm80.log"] == b"sm_80\n"
    assert sorted(path.name for path in folder.iterdir()) == ["results.tar.gz", "summary.json", "table.txt"]
    assert "again: python tests/gpu/run_all FOLDER --seconds 540 kernels\n" in capfd.readouterr().out
    fixed.touch()
    assert run_all.main([str(folder), "kernels"]) == 0
    assert statuses() == {"kernels": 0, "kernels_sm80": 0}
    assert run_all.main([str(folder), "--seconds", "0", "kernels_sm80"]) == 1
    assert statuses() == {"kernels": 0, "kernels_sm80": "no time was left"}
    assert run_all.main([str(folder), "kernel"]) == 2
    expected = "there is no step kernel here; expected second, or some of kernels, kernels_sm80"
    assert expected in capfd.readouterr().out


def test_a_step_runs_beside_another_and_one_whose_program_is_not_here_says_so(
    run_all: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of two steps waits until the other has begun."""
    meet = (
        "import os, sys, time\nopen({mine!r}, 'w').close()\n"
        "while not os.path.exists({other!r}): time.sleep(0.01)\nprint('met')"
    )
    here, there = (str(tmp_path / name) for name in ("here", "there"))
    programs = {
        "kernels": meet.format(mine=here, other=there),
        "bench_cpu": meet.format(mine=there, other=here),
        "memcheck": "exit(1)",
    }
    fake_steps(run_all, monkeypatch, programs)
    plan = run_all.steps(tmp_path)
    plan["kernels"] = plan["kernels"]._replace(beside="bench_cpu")
    plan["memcheck"] = plan["memcheck"]._replace(why_not="compute-sanitizer is not installed")
    monkeypatch.setattr(run_all, "steps", lambda parts, **options: plan)
    assert run_all.main([str(tmp_path / "out")]) == 0
    *_, first, second, third = capfd.readouterr().out.splitlines()
    for name, line in (("kernels", first), ("bench_cpu", second)):
        assert re.fullmatch(rf"{name} +\d+\.\d s  ok: met", line), line
    assert third.endswith("ok: skipped, compute-sanitizer is not installed")


def test_at_most_eight_files_come_back(run_all: ModuleType, tmp_path: pathlib.Path) -> None:
    """Logs are cut; the smallest of the large files lie beside the archive, which has the small ones."""
    folder, parts = tmp_path / "out", tmp_path / "parts"
    folder.mkdir()
    parts.mkdir()
    run_all.LARGE_BYTES, run_all.MAX_LOG_BYTES = 100, 10
    for i in range(9):
        (parts / f"trace_{i}.json.gz").write_bytes(bytes(101 + i))
    (parts / "trainer.json").write_text("{}")
    (parts / "kernels.log").write_text("x" * 1000 + "0123456789")
    run_all.archive(folder, parts)
    names = ["results.tar.gz", *(f"trace_{i}.json.gz" for i in range(5))]  # and summary.json, table.txt
    assert sorted(path.name for path in folder.iterdir()) == names
    assert archived(folder) == {"kernels.log": b"0123456789", "trainer.json": b"{}"}


@pytest.mark.parametrize("variant", adder.VARIANTS)
def test_variants_of_the_backward_can_be_made(variant: str) -> None:
    """Each line that one replaces is there once; only "here" is the kernel itself."""
    assert (adder.source_of(variant) == adder.SOURCE.read_text()) == (variant == "here")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_is_planted_is_named_at_the_end(
    run_all: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A test that fails, one that hangs, one that takes its process along and one without memory, beside one that
    passes; each again, alone; and the step behind them."""
    pytest.importorskip("xdist")
    monkeypatch.setattr(run_all, "why_not", lambda: "no GPU")
    monkeypatch.setattr(run_all, "binaries", lambda: ("", None))
    monkeypatch.setattr(run_all, "SLOWER", 20)
    monkeypatch.setattr(run_all, "TEST_SECONDS", 20)
    of_all = run_all.steps

    def steps(parts: pathlib.Path, **options: bool) -> dict[str, Any]:
        plan = of_all(parts, **options)
        command = tuple(part for part in plan["kernels"].command if "test_gpu" not in part)
        kernels = plan["kernels"]._replace(command=command, beside="")
        last = run_all.Step(60, (sys.executable, "-c", "print('still here')"))
        return {"kernels": kernels, "again": plan["again"], "last": last}

    monkeypatch.setattr(run_all, "steps", steps)
    folder = tmp_path / "out"
    assert run_all.main([str(folder), "--rehearse", "--planted"]) == 1
    kernels, again, last = (folder / "table.txt").read_text().splitlines()
    for line in (kernels, again):
        for name, how in {
            "failure": "failed",
            "hang": "hung",
            "lost_process": "lost its process",
            "out_of_memory": "out of memory",
        }.items():
            assert f"planted.py::test_planted_{name}: {how}" in line
        assert "nothing_is_planted" not in line
    assert last.endswith("ok: still here")
    assert "FOLDER --seconds 540 kernels again\n" in capfd.readouterr().out


@pytest.mark.parametrize("sm_90a", ["ok", "started the forward, and did not end"])
def test_kernels_that_fail_the_smoke_step_are_not_used_by_the_others(
    run_all: ModuleType,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    sm_90a: str,
) -> None:
    """The smoke step runs first, whichever steps are wanted."""
    folder, parts = tmp_path / "out", run_all.PARTS / "out"
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
