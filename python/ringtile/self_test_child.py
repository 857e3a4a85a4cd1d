"""The program of the child process that tests kernels; self_test/child_process.py starts it, with what it should test.

It writes lines to the descriptor that it was given: "ready", and then for each kernel which one it begins, and what is
wrong with it. After the kernels that it was asked about come those that a training is likely to ask for next.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys

import torch

from ringtile import ops, self_test
from ringtile.attn import self_test as attn_self_test
from ringtile.attn.aten import ATEN
from ringtile.attn.choose import RINGTILE
from ringtile.self_test.child_process import LIMIT_SECONDS, Question, environment

_DTYPES = ("bfloat16", "float16", "float32")
_HEAD_DIMS = ((64, 64), (128, 128))


def main() -> None:
    descriptor, request = int(sys.argv[1]), json.loads(sys.argv[2])
    os.environ[self_test.VARIABLE] = "0"  # here a kernel is used untested
    os.set_inheritable(descriptor, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    device = torch.device(request["device"])
    questions = [Question(*json.loads(text)) for text in request["questions"]]
    missing = ops.why_no_kernels(device)
    if missing and any(question.kernel in (RINGTILE.name, *ops.KERNELS) for question in questions):
        sys.exit(missing)
    torch.empty(1, device=device)  # starts the device
    if (here := environment(device)) != request["environment"]:
        sys.exit(f"it is in {here}, and was started in {request['environment']}")

    def say(line: str) -> None:
        os.write(descriptor, " ".join(line.split()).encode() + b"\n")
        signal.alarm(int(2 * LIMIT_SECONDS))  # it ends also where nobody is left to kill it

    say("ready")
    for question in questions + likely_after(questions[0]) * (request["likely"] and not missing):
        say(json.dumps(question))
        reason = why_wrong(device, question)
        say(reason)
        # It may have taken the device along; but nothing has run where a library is missing.
        if reason.startswith("raises") and "NotImplementedError" not in reason:
            break
    os._exit(0)


def likely_after(question: Question) -> list[Question]:
    """What one training asks for: every kernel in the usual dtypes, and attention with the usual head dims or these."""
    dims = {*_HEAD_DIMS} | ({(question.head_dim, question.v_head_dim)} if question.head_dim else set())
    found = [Question("rows", "int64"), *(Question(name, dtype) for name in ops.KERNELS for dtype in _DTYPES)]
    for d, dtype, grouped in itertools.product(dims, _DTYPES, (False, True)):
        found.append(Question(RINGTILE.name, dtype, *d, grouped))
    return [each for each in found if each != question]


def why_wrong(device: torch.device, question: Question) -> str:
    """What is wrong with a kernel; "" if nothing is."""
    kernel, dtype = question.kernel, getattr(torch, question.dtype)
    if kernel in ops.KERNELS:
        return self_test.run(lambda: ops.KERNELS[kernel](torch.ops.ringtile, device, dtype))
    backends = {each.name: each for each in (RINGTILE, *ATEN[device.type])}
    return self_test.run(lambda: attn_self_test.run_cases(backends[kernel], device, question))
