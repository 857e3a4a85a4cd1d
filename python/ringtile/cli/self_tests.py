"""Every kernel against its definition in float64, in child processes: one that hangs or crashes costs only its child.

A child runs the cases of a device from some number on, and prints a line for each that ends. It has LIMIT_SECONDS for
its start and for each case, then an alarm ends it: FA4 and Triton compile their kernels first. The next child goes on
behind the case that ended the last one.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from ringtile import ops, self_test
from ringtile.attn import self_test as attn_self_test
from ringtile.attn.backend import ATEN
from ringtile.attn.choose import RINGTILE
from ringtile.recurrent import choose, kernels

HEAD_DIMS = (64, 128)  # of the attention kernels that are checked
LIMIT_SECONDS = 180
PROGRAM = "import sys; sys.path[:] = sys.argv[3:]; from ringtile.cli.self_tests import main; main()"
_SAID = "ringtile: "  # begins a child's lines


class KernelCase(NamedTuple):
    kernel: str
    dtype: str  # without "torch."
    test: Callable[[], str]  # what is wrong; "" if nothing is


def cases(device: torch.device) -> list[KernelCase]:
    """Return what is to be tested on a device, the same list in every process."""
    is_cpu, has_kernels = device.type == "cpu", not ops.why_no_kernels(device)
    own, halves = ops.FLOAT_DTYPES if is_cpu else ops.FLOAT_DTYPES[1:], (torch.bfloat16, torch.float16)
    found: list[KernelCase] = []

    def add(kernel: str, dtype: torch.dtype, test: Callable[..., str], *given: object) -> None:
        found.append(KernelCase(kernel, str(dtype).removeprefix("torch."), functools.partial(test, *given)))

    for backend in (*[RINGTILE] * has_kernels, *ATEN[device.type]):
        for dim in HEAD_DIMS:
            for options in ((), (True, True)) if backend is RINGTILE else ((),):
                name = f"{backend.name}, head dim {dim}" + ", with dropout and trees" * bool(options)
                for dtype in own if is_cpu or backend is RINGTILE else halves:
                    case = attn_self_test.Case(str(dtype).removeprefix("torch."), dim, dim, True, *options)
                    add(name, dtype, attn_self_test.failure, backend, device, case)
    for name in ops.KERNELS if has_kernels else ():
        for dtype in ops.FLOAT_DTYPES:
            add(f"ringtile's {name}", dtype, ops.why_not_kernel, name, device, dtype)
    for name in kernels.KERNELS:
        for dtype in ops.FLOAT_DTYPES if is_cpu else (torch.bfloat16,):
            if is_cpu:
                add(f"ringtile's {kernels.KERNELS[name]}", dtype, kernels.why_not_kernel, name, dtype)
            else:
                add(f"{choose.LIBRARY}'s {kernels.KERNELS[name]}", dtype, choose.why_not_kind, name, device)
    return found


def in_children(device: torch.device, num_cases: int) -> list[str]:
    """Return what is wrong in each case."""
    reasons: list[str] = []
    while len(reasons) < num_cases:
        command = [sys.executable, "-c", PROGRAM, str(device), str(len(reasons)), *sys.path]
        environment = os.environ | {self_test.VARIABLE: "1"}
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        said = [line.removeprefix(_SAID) for line in done.stdout.splitlines() if line.startswith(_SAID)]
        reasons += said[1:]
        if len(reasons) < num_cases:
            last = "".join(done.stderr.strip().splitlines()[-1:])
            reason = _ENDINGS.get(-done.returncode) or f"ends its process with status {done.returncode}: {last}"
            reasons += [reason] if said else [f"cannot be tested, its process {reason}"] * (num_cases - len(reasons))
    return reasons


_ENDINGS = {int(each): f"crashes: signal {each} ({each.name})" for each in signal.Signals}
_ENDINGS[int(signal.SIGALRM)] = f"hangs: no answer within {LIMIT_SECONDS} s"


def main() -> None:
    """Run the cases of a device, sys.argv[1], from number sys.argv[2] on."""
    signal.alarm(LIMIT_SECONDS)  # which ends a process that is inside a kernel too
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    device = torch.device(sys.argv[1])
    torch.empty(1, device=device)  # starts it
    print(_SAID, flush=True)
    for case in cases(device)[int(sys.argv[2]) :]:
        signal.alarm(LIMIT_SECONDS)
        print(_SAID + " ".join(case.test().split()), flush=True)
    os._exit(0)
