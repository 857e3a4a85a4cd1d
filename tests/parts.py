"""Runs all tests, three parts at a time, and names the slowest: `python tests/parts.py [options of pytest]`.

What a part and the server of its ranks import takes as long as a hundred tests. One process imports it; each of them is
a fork of that process. Workers of pytest-xdist import it each: 77 s of CPU before the first test in place of 34 s.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from unittest import mock

import pytest

TESTS = Path(__file__).parent
sys.path.append(str(TESTS.parent))  # of tools, which the pool of ranks is in

from pool import TRAINERS, start_server  # noqa: E402


def parts() -> list[list[str]]:
    """What pytest is given for each part: equally long, and more than two cores, since ranks often wait."""
    trainings = sorted(TESTS.glob("hf/test_*.py"))
    middle = len(trainings) // 2
    hf = [*trainings[:middle], TESTS / "torch_cp"]
    of_layers = ("cli", "sequence", "transport")
    layers = [*trainings[middle:], *(TESTS / name for name in of_layers)]
    others = {path.parent for path in TESTS.rglob("test_*.py")} - {TESTS / "hf", *hf, *layers}
    return [[str(path) for path in part] for part in (hf, layers, sorted(others))]


def main() -> int:
    import_all(TRAINERS)
    children = []
    for part in parts():
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            os._exit(run(["--durations=20", *sys.argv[1:], *part]))
        children.append(child)
    return max([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children])


def import_all(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # what is not installed is skipped by the tests of it
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        from transformers import conversion_mapping

        # It compiles patterns for the weights of every model, which takes each process that saves or loads one 0.3 s.
        conversion_mapping.get_checkpoint_conversion_mapping("llama")


def run(arguments: Sequence[str]) -> int:
    """Runs pytest in a process that has imported what its ranks need: their server is a fork of it."""
    with servers_forked():
        start_server()
    code = int(pytest.main(list(arguments)))
    sys.stdout.flush()
    return code


@contextlib.contextmanager
def servers_forked() -> Iterator[None]:
    """The server of ranks that multiprocessing starts inside is a fork of this process."""
    resource_tracker.ensure_running()
    with mock.patch("multiprocessing.util.spawnv_passfds", _fork):
        yield


def _fork(executable: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """A fork where multiprocessing would start a new Python: it runs the program of `-c` with these descriptors."""
    if child := os.fork():
        return child
    try:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in descriptors:
                with contextlib.suppress(OSError):  # that of listdir
                    os.close(descriptor)
        exec(arguments[-1], {})
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
