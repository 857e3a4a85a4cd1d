"""`ringtile doctor`: reports versions, compiled kernels, devices, and what is patched. Never raises."""

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
from rich.console import Console
from rich.table import Table

import ringtile
from ringtile.cli import Outcome, environment
from ringtile.errors import BuildError

PACKAGES = ("transformers", "accelerate", "datasets", "trl", "peft", "deepspeed")
BACKENDS = ("gloo", "nccl", "mpi", "xccl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> Outcome:
    """Prints the report; status 1 when the compiled ops do not load."""
    report = examine()
    console = Console()
    for title, rows in report.items():
        table = Table("", "", title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for name, value in rows.items():
            table.add_row(name, as_text(value))
        console.print(table)
    return Outcome(int(report["kernels"]["error"] is not None), report)


def as_text(value: Any) -> str:
    """A value of the report as text."""
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
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine() -> dict[str, dict[str, Any]]:
    """The whole report, by section; every value is JSON."""
    return {
        "versions": versions(),
        "kernels": kernels(),
        "devices": devices(),
        "process groups": {name: is_backend_available(name) for name in BACKENDS},
        "patched": patched(),
        "environment": environment.reported(),
    }


def kernels() -> dict[str, Any]:
    """Whether the compiled ops load, on which devices, and the instruction set: the one in use and this CPU's best."""
    found: dict[str, Any] = {"binary": None, "isa": None, "best_isa": None, "error": None, "cuda": None}
    try:
        from ringtile import ops

        found["binary"] = ops._C.__file__
        found["cuda"] = cuda(ops)
        found["isa"] = found["best_isa"] = ops.cpu_isa()
    except BuildError as error:
        found["error"] = str(error)
    if environment.reported()["RINGTILE_CPU_ISA"] is not None:  # a process chooses once, so another process is asked
        found["best_isa"] = best_isa()
    found["threads"] = torch.get_num_threads()
    return found


def cuda(ops: ModuleType) -> str:
    """Whether the CUDA kernels are in use, and which devices they refuse; or why they are not in use."""
    reason: str = ops.why_no_cuda()
    if reason:
        return reason
    refused = [f"not on cuda:{i}, {why}" for i in range(torch.cuda.device_count()) if (why := ops.why_not_on(i))]
    return "; ".join(["in use", *refused])


def best_isa() -> str | None:
    """The instruction set that the ops choose without RINGTILE_CPU_ISA; None where they do not load."""
    command = [sys.executable, "-c", "from ringtile import ops; print(ops.cpu_isa())"]
    done = subprocess.run(command, env=environment.without("RINGTILE_CPU_ISA"), capture_output=True, text=True)
    return done.stdout.strip() or None


def devices() -> dict[str, Any]:
    """The CPU, and every GPU that torch sees."""
    found: dict[str, Any] = {"cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"}
    for index in range(torch.cuda.device_count()):
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        found[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, compute capability {capability}"
    return found


def is_backend_available(name: str) -> bool:
    """Whether this torch can make process groups with a backend."""
    return torch.distributed.is_available() and torch.distributed.is_backend_available(name)


def patched() -> dict[str, Any]:
    """The attributes of other libraries' objects that ringtile has replaced in this process."""
    ledgers = sys.modules.get("ringtile.hf.ledger")  # not imported: nothing replaced
    entries = (
        [] if ledgers is None else [f"{owner_name(owner)}.{name}" for owner, name in ledgers.replaced_in_process()]
    )
    replaced = ", ".join(entries) or "nothing (import patches nothing, ringtile.enable patches one Trainer)"
    registered = False
    if "ringtile.hf.attention" in sys.modules:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        registered = "ringtile" in ALL_ATTENTION_FUNCTIONS
    return {"replaced here": replaced, 'attention "ringtile" registered': registered}


def owner_name(owner: object) -> str:
    """The name of a replaced attribute's owner in reports."""
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__
