"""Names what failed in a log, and how; as a program, runs each failed test again, alone.

python tests/gpu/failures.py FOLDER: of the tests that FOLDER/kernels*.log name, the first 8, those first that took
their process along. Prints for each how it ends alone, and its last lines. Exits with 1 if one fails again.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOW = ("failed", "out of memory", "lost its process", "lost the device", "hung")  # the later, the more it says
LINE = re.compile(rf"^FAILED (.+) \(({'|'.join(HOW)})\)", re.MULTILINE)
MOST, SECONDS, LINES = 8, 25, 15


def line(name: str, how: str, reason: str = "") -> str:
    """Return what a log says of a test or of a part of a program that has failed."""
    return f"FAILED {name} ({how})" + (f": {' '.join(reason.split())}" if reason else "")


def how_of(error: BaseException) -> str:
    return HOW["OutOfMemoryError" in type(error).__name__]


def failures(log: str) -> dict[str, str]:
    """Return how each name failed that a log has, one of HOW."""
    found: dict[str, str] = {}
    for name, how in LINE.findall(log):
        found[name] = max(how, found.get(name, how), key=HOW.index)
    return found


def alone(name: str) -> tuple[str, str]:
    """Run a test in a process of its own, alone. Return "fine" or one of HOW, and what it printed."""
    command = (sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "", name)
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"RINGTILE_TEST_SECONDS": str(SECONDS), "CUDA_LAUNCH_BLOCKING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode == 0:
        return "fine", done.stdout
    return failures(done.stdout).get(name, "lost its process"), done.stdout


def main(folder: pathlib.Path) -> int:
    found: dict[str, str] = {}
    for log in sorted(folder.glob("kernels*.log")):
        found |= failures(log.read_text(errors="replace"))
    failed_again = 0
    for name in sorted(found, key=lambda name: -HOW.index(found[name]))[:MOST]:
        how, said = alone(name)
        failed_again += how != "fine"
        print(line(name, how) if how in HOW else f"fine alone: {name}")
        print(*(f"    {text}" for text in said.splitlines()[-LINES:] if how in HOW), sep="\n", flush=True)
    print(f"{len(found)} tests failed, {min(MOST, len(found))} of them ran again, {failed_again} failed again")
    return int(failed_again > 0)


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1])))
