"""`ringtile doctor`: what is installed, what was built, what is chosen, what is patched. Never raises."""

from __future__ import annotations

import argparse
import gc
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
from ringtile.cli import Outcome
from ringtile.errors import BuildError

PACKAGES = ("transformers", "accelerate", "datasets", "trl", "peft", "deepspeed")
BACKENDS = ("gloo", "nccl", "mpi", "xccl")
ENVIRONMENT = ("RINGTILE_CPU_ISA", "RINGTILE_CUDA_ISA", "RINGTILE_CONFIG", "OMP_NUM_THREADS")


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
    """A value of the report for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def versions() -> dict[str, str | None]:
    """Versions of what ringtile stands on; None: not installed."""
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
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
    }


def kernels() -> dict[str, Any]:
    """Whether the compiled ops load, on which devices, and the instruction set: the chosen one, and this CPU's best."""
    found: dict[str, Any] = {"binary": None, "isa": None, "best_isa": None, "error": None, "cuda": None}
    try:
        from ringtile import ops

        found["binary"] = ops._C.__file__
        found["cuda"] = cuda(ops)
        found["isa"] = found["best_isa"] = ops.cpu_isa()
    except BuildError as error:
        found["error"] = str(error)
    if "RINGTILE_CPU_ISA" in os.environ:  # the choice is made once a process, so another one is asked
        found["best_isa"] = best_isa()
    found["threads"] = torch.get_num_threads()
    return found


def cuda(ops: ModuleType) -> str:
    """Whether the CUDA kernels are in use, and on which devices not; or why they are not."""
    reason: str = ops.why_no_cuda()
    if reason:
        return reason
    refused = [f"not on cuda:{i}, {why}" for i in range(torch.cuda.device_count()) if (why := ops.why_not_on(i))]
    return "; ".join(["in use", *refused])


def best_isa() -> str | None:
    """What the ops choose when RINGTILE_CPU_ISA is not set; None where they do not load."""
    environment = {name: value for name, value in os.environ.items() if name != "RINGTILE_CPU_ISA"}
    asked = [sys.executable, "-c", "from ringtile import ops; print(ops.cpu_isa())"]
    answer = subprocess.run(asked, env=environment, capture_output=True, text=True)
    return answer.stdout.strip() or None


def devices() -> dict[str, Any]:
    """The CPU, and every GPU that torch sees."""
    found: dict[str, Any] = {"cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"}
    for index in range(torch.cuda.device_count()):
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        found[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, compute capability {capability}"
    return found


def is_backend_available(name: str) -> bool:
    """Whether this torch can make process groups of a backend."""
    return torch.distributed.is_available() and torch.distributed.is_backend_available(name)


def patched() -> dict[str, Any]:
    """What ringtile replaced on other libraries' objects in this process: the entries of every ledger in force.

    Ledgers belong to the Trainers they patched and nothing lists them, so they are looked for among all objects.
    """
    patches = sys.modules.get("ringtile.hf.patches")
    ledgers = [] if patches is None else [found for found in gc.get_objects() if type(found) is patches.Ledger]
    entries = [f"{owner_name(owner)}.{name}" for ledger in ledgers for owner, name in ledger.entries]
    replaced = ", ".join(entries) or "nothing (import patches nothing, ringtile.enable patches one Trainer)"
    registered = False
    if "ringtile.hf.attention" in sys.modules:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        registered = "ringtile" in ALL_ATTENTION_FUNCTIONS
    return {"replaced here": replaced, 'attention "ringtile" registered': registered}


def owner_name(owner: object) -> str:
    """How the owner of a replaced attribute is called in reports."""
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__
