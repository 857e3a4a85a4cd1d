"""Trials that each run in a process forked after the imports, with limits of time and memory; how they are judged."""

from __future__ import annotations

import os
import pathlib
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from faults.counts import Counts

BEGAN = 77  # the status of a process that was right
WALL_SECONDS = 120  # of one trial
MAX_STDERR = 20_000  # bytes, with the warnings of other libraries
VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "no", "1e-3", " ", "\n", "a\nb", "x" * 10_000, "\u00e9\u4e16", "\x7f", "/dev/null/x"),
    *(0, 1, -1, 2, 3, 7, 0.5, -0.5, 2.0, 1e-320, 1e308, -1e308, 2**31, 2**32, 2**63, -(2**63), 10**26),
    *([], {}, [1, 2], ["x"], {"a": 1}, {"": None}, {1: 2}, [[[[]]]], [None], {"a": {"b": {"c": []}}}),
)


class Trial(NamedTuple):
    """A file, and whether it must be refused; label: for the notes."""

    label: str
    content: bytes
    must_refuse: bool = False


def trials_in_processes(left: list[Trial], run: Callable[[Trial, pathlib.Path], int], cpu_seconds: int) -> Counts:
    """Counts how trials end, each in a process, and as many at a time as there are CPUs.

    run: returns the exit status of a trial in an empty folder; BEGAN where it was right.
    """
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder:
        running: dict[int, tuple[Trial, pathlib.Path, float]] = {}
        for number, trial in enumerate(left):
            place = pathlib.Path(folder, str(number))
            place.mkdir()
            running[start(trial, place, run, cpu_seconds)] = (trial, place, time.monotonic() + WALL_SECONDS)
            while len(running) >= (os.cpu_count() or 1):
                reap(running, counts)
        while running:
            reap(running, counts)
    return counts


# ---- one trial ----------------------------------------------------------------------------------


def start(trial: Trial, place: pathlib.Path, run: Callable[[Trial, pathlib.Path], int], cpu_seconds: int) -> int:
    """The process of a trial, whose CPU time and memory are limited."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            limit(place, cpu_seconds)
            status = run(trial, place)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    return process


def limit(place: pathlib.Path, cpu_seconds: int) -> None:
    os.setsid()
    os.chdir(place)
    for stream in (1, 2):
        os.dup2(os.open(place / f"{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 5))
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, used + 2**32))


def reap(running: dict[int, tuple[Trial, pathlib.Path, float]], counts: Counts) -> None:
    """Waits until one process ends, or is too late, and counts it."""
    process, status = os.waitpid(-1, os.WNOHANG)
    if not process:
        late = [each for each, (_, _, deadline) in running.items() if time.monotonic() > deadline]
        for each in late:
            os.killpg(each, signal.SIGXCPU)
        time.sleep(0.01)
        return
    trial, place, _ = running.pop(process)
    error = (place / "2").read_bytes() if (place / "2").exists() else b""
    judge(trial, os.waitstatus_to_exitcode(status), error.decode(errors="replace"), counts)


def judge(trial: Trial, status: int, stderr: str, counts: Counts) -> None:
    said = [line for line in stderr.splitlines() if line.startswith("ringtile: error: ")]
    what = ""
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        counts.hangs += 1
        what = "hangs"
    elif status < 0:
        counts.crashes += 1
        what = f"signal {-status}"
    elif status == BEGAN and trial.must_refuse:
        counts.silent += 1
        what = "trains"
    elif status == BEGAN:
        counts.right += 1
    elif status == 2 and len(said) == 1 and "Traceback" not in stderr and len(stderr) < MAX_STDERR:
        counts.named += 1
    else:
        counts.unnamed += 1
        what = f"status {status}, {len(said)} lines, {len(stderr)} bytes: {stderr[-400:]}"
    if what:
        counts.notes.append(f"{trial.label}: {what}")


def paths(value: Any, before: tuple[Any, ...] = ()) -> list[list[Any]]:
    """The way to every value of mappings and lists, and to those themselves."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, each in pairs:
        found += [[*before, key], *paths(each, (*before, key))]
    return found


def put(config: Any, path: list[Any], value: Any, removed: bool = False) -> None:
    for key in path[:-1]:
        config = config[key]
    if removed and path[-1] in (config if isinstance(config, dict) else range(len(config))):
        del config[path[-1]]
    else:
        config[path[-1]] = value
