"""Kernels that could take the process along are tested in a child process; what it finds is kept in a file.

A kernel that hangs, or touches memory that is not its own, leaves a process without its GPU. So a child is asked, which
says what it begins and what it found, line by line on a pipe of its own: if it dies or is silent for too long, that is
the kernel that it had begun. Its program is self_test_child.py.

The file holds the verdicts of one binary on one kind of device, and only those: what a file of another kind or a broken
one says is not believed, and a folder that cannot be written means testing again in every process. While a process
tests, others of the machine that need the file wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import torch

START_SECONDS = (
    180.0  # for a child to import torch, from a file system that all hosts of a job read, and start its device
)
LIMIT_SECONDS = 180.0  # for each answer: FA4 compiles its kernels first
GRACE_SECONDS = 5.0  # for a child that was killed to be gone: it may be inside the driver
WAIT_SECONDS = START_SECONDS + 2 * LIMIT_SECONDS  # for another process that tests
_LIBRARIES = (
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
_MAX_BYTES = 1 << 20  # of a file of verdicts, which has some hundred bytes for each kernel
# Imports as this process does: not what lies in the folder that it was started in.
PROGRAM = "import sys; sys.path[:] = sys.argv[3:]; from ringtile.self_test_child import main; main()"

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
_NO_CHILD = "no child"  # in place of a question: why none can be asked
_known: dict[pathlib.Path, dict[str, str]] = {}  # verdicts by file and question; those too that are not in the file


class Question(NamedTuple):
    """A kernel: one of ops.KERNELS, or a backend of attention with its head dims."""

    kernel: str  # or the backend's name
    dtype: str  # without "torch."
    head_dim: int = 0
    v_head_dim: int = 0
    grouped: bool = False  # several query heads share a kv head
    drops: bool = False
    two_sides: bool = False  # of the mask

    @classmethod
    def of(cls, kernel: str, dtype: torch.dtype, *others: Any) -> Question:
        return cls(kernel, str(dtype).removeprefix("torch."), *others)


def why_not(device: torch.device, *questions: Question) -> str:
    """Test the given kernels, then those that a training run usually needs next; return the failure of the first.

    A kernel that cannot be tested is not used, and is tested again by the next process.
    """
    at = environment(device)
    path = _path(at)
    known = _known.setdefault(path, {})
    asked = [json.dumps(question) for question in questions]

    def missing() -> list[str]:
        return [] if _NO_CHILD in known else [question for question in asked if question not in known]

    if missing():
        known.update(_read(path, at))
    while missing():
        with _locked(path):
            known.update(_read(path, at))
            if left := missing():
                found, untested = _ask(device, at, left, likely=len(asked) == 1)
                _keep(path, at, found)
                known.update(found | untested)
    return known[asked[0]] if asked[0] in known else known[_NO_CHILD]


def forget() -> None:
    """Forget every verdict, as in a new process."""
    _known.clear()
    environment.cache_clear()


# ---- the file -----------------------------------------------------------------------------------


@functools.cache
def environment(device: torch.device) -> dict[str, str]:
    """What verdicts depend on: the binary and the test cases, the kind of device, its driver, torch."""
    binary = importlib.util.find_spec("ringtile._C" if device.type == "cpu" else "ringtile._cuda")
    package, digest = pathlib.Path(__file__).parents[1], hashlib.sha256()
    cases = [package / name for name in ("attn/self_test.py", "attn/aten.py", "self_test/kernels.py", "torch_ops.py")]
    if binary is not None and binary.origin is not None:  # else others' kernels alone are tested
        cases.append(pathlib.Path(binary.origin))
    for path in cases:
        digest.update(path.read_bytes())
    return {
        "digest": digest.hexdigest(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "driver": _driver(),
        "torch": str(torch.__version__),
        "libraries": " ".join(f"{name}-{version}" for name in _LIBRARIES if (version := _version_of(name))),
        "isa": os.environ.get("RINGTILE_CUDA_ISA", ""),
    }


def _version_of(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def _driver() -> str:
    for path in ("/sys/module/nvidia/version", "/proc/driver/nvidia/version"):
        with contextlib.suppress(OSError):
            return pathlib.Path(path).read_text()
    return ""


def _path(at: dict[str, str]) -> pathlib.Path:
    folders = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")
    folder = next(filter(os.path.isabs, folders), os.devnull)  # under which nothing can be written
    name = hashlib.sha256(json.dumps(at).encode()).hexdigest()[:16]
    return pathlib.Path(folder, "ringtile", f"self_test_{name}.json")


def _open_own(path: pathlib.Path, flags: int) -> int:
    """Open a file that only this user can have written. OSError: it is a link, a FIFO, or others may write to it."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o022:
        return descriptor
    os.close(descriptor)
    raise PermissionError(f"{path} is no regular file of this user's alone")


def _read(path: pathlib.Path, at: dict[str, str]) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        with open(_open_own(path, os.O_RDONLY), "rb") as file:
            text = file.read(_MAX_BYTES + 1)
        kept = json.loads(text) if len(text) <= _MAX_BYTES else {}
        if kept["environment"] == at and all(isinstance(reason, str) for reason in kept["found"].values()):
            return dict(kept["found"])
    return {}


def _keep(path: pathlib.Path, at: dict[str, str], found: dict[str, str]) -> None:
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with open(descriptor, "w") as file:
                json.dump({"environment": at, "found": _read(path, at) | found}, file, indent=1)
            os.replace(name, path)
        except OSError:
            os.unlink(name)


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """One process at a time, unless there can be no lock, or another one has it for longer than a test takes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open_own(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not _try_lock(descriptor) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also where a fork has a copy of the descriptor
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


# ---- the child ----------------------------------------------------------------------------------


def _ask(
    device: torch.device, at: dict[str, str], questions: list[str], likely: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """What a child found, by question, to be kept; and what it could not find out. At least about the first one."""
    request = json.dumps({"device": str(device), "environment": at, "questions": questions, "likely": likely})
    try:
        with tempfile.TemporaryFile() as errors, _child(request, errors) as (process, answers):
            said = list(_lines(process, answers))
            late = said[-1:] == [None]
            lines = [line for line in said if line is not None]
            reason, is_kernels = _silence(bool(lines)) if late else _ending(process, errors)
    except OSError as error:
        return {}, {_NO_CHILD: f"cannot be tested: {error}"}
    if not lines:
        return {}, {_NO_CHILD: reason if not is_kernels else f"cannot be tested: its child process {reason}"}
    found = dict(zip(lines[1::2], lines[2::2], strict=False))
    if len(lines) % 2 == 0 and is_kernels:
        found[lines[-1]] = reason
    begun = lines[-1] if len(lines) % 2 == 0 and lines[-1] in questions else questions[0]
    return found, {} if begun in found else {begun: reason}


@contextlib.contextmanager
def _child(request: str, errors: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A child and what it writes; it has nothing else of this process's, and is gone at the end."""
    answers, write_end = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                [sys.executable or "python3", "-c", PROGRAM, str(write_end), request, *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[write_end],
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        try:
            yield process, answers
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
    finally:
        os.close(answers)


def _lines(process: subprocess.Popen[bytes], answers: int) -> Iterator[str | None]:
    """What a child says until it ends; None where it is silent for too long."""
    poll, rest, deadline = select.poll(), b"", time.monotonic() + START_SECONDS
    poll.register(answers, select.POLLIN)
    while time.monotonic() < deadline:
        has_ended = process.poll() is not None  # the pipe may stay open: a fork of this process has a copy
        if poll.poll(0 if has_ended else 200):
            if not (chunk := os.read(answers, 1 << 16)):
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
                deadline = time.monotonic() + LIMIT_SECONDS
        elif has_ended:
            return
    yield None


def _silence(has_started: bool) -> tuple[str, bool]:
    if has_started:
        return f"hangs: no answer within {LIMIT_SECONDS:.0f} s", True
    return f"cannot be tested: its child process does not start within {START_SECONDS:.0f} s", False


def _ending(process: subprocess.Popen[bytes], errors: IO[bytes]) -> tuple[str, bool]:
    """Why a child has ended, and whether a kernel did it: out of memory, or killed by somebody, says nothing of one."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    status = process.returncode
    if status is not None and -status in _CRASHES:
        return f"crashes: signal {-status} ({signal.Signals(-status).name})", True
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
    last = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()][-1:]
    return f"cannot be tested: its child process ended with status {status}: {''.join(last) or 'no message'}", False
