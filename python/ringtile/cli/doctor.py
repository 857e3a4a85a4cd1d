"""`ringtile doctor`: reports versions, kernels and their checks, and devices. Never raises."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
from types import ModuleType
from typing import Any

import torch

import ringtile
from ringtile.cli import Outcome, environment
from ringtile.cli.output import table
from ringtile.errors import BuildError

PACKAGES = ("transformers", "accelerate", "datasets", "trl", "peft", "deepspeed")
WRONG = "not used"
BACKENDS = ("gloo", "nccl", "mpi", "xccl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(args: argparse.Namespace) -> Outcome:
    """Prints the report; status 1 when the compiled ops do not load, or some kernel of ringtile's is wrong."""
    report = examine()
    for title, rows in report.items():
        print(table(title, [(name, as_text(value)) for name, value in rows.items()]))
    wrong = any(WRONG in result for name, result in report["self-test"].items() if "ringtile's" in name)
    return Outcome(int(report["kernels"]["error"] is not None or wrong), report)


def as_text(value: Any) -> str:
    """Return a value of the report as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def versions() -> dict[str, str | None]:
    """Versions of ringtile and its dependencies; None: not installed."""
    return {
        "ringtile": ringtile.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: version(package) for package in PACKAGES},
    }


def version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine() -> dict[str, dict[str, Any]]:
    """Return the whole report, by section; every value is JSON."""
    return {
        "versions": versions(),
        "kernels": (found := kernels()),
        "self-test": self_tests() if found["error"] is None else {},
        "devices": devices(),
        "process groups": {name: is_backend_available(name) for name in BACKENDS},
        "environment": environment.reported(),
    }


def kernels() -> dict[str, Any]:
    """Return whether the compiled ops load, on which devices, and the instruction set: the one in use and this CPU's
    best."""
    found: dict[str, Any] = {"binary": None, "isa": None, "best_isa": None, "error": None, "cuda": None}
    try:
        from ringtile import ops

        found["binary"] = ops._C.__file__
        found["cuda"] = cuda(ops)
        found["isa"] = found["best_isa"] = ops.cpu_isa()
        if reason := ops.why_no_amx():
            found["amx"] = f"{reason}; attention_kernel auto takes aten's in bfloat16"
        elif reason := ops.why_amx_is_refused():
            found["amx"] = reason
    except BuildError as error:
        found["error"] = str(error)
    if environment.reported()["RINGTILE_CPU_ISA"] is not None:  # a process chooses once, so another process is asked
        found["best_isa"] = best_isa()
    found["threads"] = torch.get_num_threads()
    return found


def cuda(ops: ModuleType) -> str:
    """Return whether the CUDA kernels are in use, and on which devices they are not; or why on none."""
    reason: str = ops.why_no_cuda()
    if reason:
        return f"{reason}; torch operations run instead" if torch.cuda.is_available() else reason
    found = ["in use"]
    for i in range(torch.cuda.device_count()):
        if why := ops.why_not_on(i):
            found.append(f"torch operations on cuda:{i}, {why}")
        else:
            found.append(f"cuda:{i} has {cuda_kernels_of(torch.cuda.get_device_capability(i))}")
    return "; ".join(found)


def cuda_kernels_of(capability: tuple[int, int]) -> str:
    """Return which attention kernels a device of this compute capability runs (choose_isa in cuda/attn/dispatch.cu)."""
    if capability == (9, 0):
        return "kernels of sm_90a, and of sm_80 for what they leave"
    if capability[0] in (10, 11):
        return "kernels of sm_80, slow on its tensor cores: install flash-attn-4, whose kernels auto then takes"
    code = "" if capability[0] == 8 else f", compiled for sm_{capability[0]}0 or, by the driver, from PTX"
    return f"kernels of sm_80{code}"


def self_tests() -> dict[str, str]:
    """By device and kernel: the dtypes for which it computes what it should, and what is wrong with the others."""
    from ringtile import self_test
    from ringtile.cli.self_tests import cases, in_children

    if not self_test.is_on():
        return {"switched off": f"{self_test.VARIABLE}=0"}
    found: dict[str, str] = {}
    for device in (torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))):
        asked = cases(device)
        of_kernels: dict[str, dict[str, str]] = {}  # what is wrong, by kernel and dtype
        for case, reason in zip(asked, in_children(device, len(asked)), strict=True):
            of_kernels.setdefault(case.kernel, {})[case.dtype] = reason
        for kernel, reasons in of_kernels.items():
            right = ", ".join(dtype for dtype, reason in reasons.items() if not reason)
            wrong = [f"{WRONG} for {dtype}: it {reason}" for dtype, reason in reasons.items() if reason]
            found[f"{device}: {kernel}"] = "; ".join([f"right for {right}"] * bool(right) + wrong)
    return found


def best_isa() -> str | None:
    """Return the instruction set that the ops choose without RINGTILE_CPU_ISA; None where they do not load."""
    command = [sys.executable, "-c", "from ringtile import ops; print(ops.cpu_isa())"]
    done = subprocess.run(command, env=environment.without("RINGTILE_CPU_ISA"), capture_output=True, text=True)
    return done.stdout.strip() or None


def devices() -> dict[str, Any]:
    """Return the CPU, and every GPU that torch sees."""
    found: dict[str, Any] = {"cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"}
    for index in range(torch.cuda.device_count()):
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        found[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, compute capability {capability}"
    return found


def is_backend_available(name: str) -> bool:
    """Return whether this torch can make process groups with a backend."""
    return torch.distributed.is_available() and torch.distributed.is_backend_available(name)
