"""`make mutants`: breaks the product code in one line at a time and shows that a test goes red.

Each mutant names the line, its broken form, and the test that must fail. The breaks are made in a git worktree of HEAD
(build/mutants), one after another; the checkout itself is never touched. `python tests/campaigns/mutants.py WORD ...`
runs the mutants whose names contain one of the words.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import mutants_of_kernels
import mutants_of_peers
import mutants_of_training
from mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "mutants"
PYTHON = ROOT / ".venv" / "bin" / "python"

MUTANTS = [*mutants_of_kernels.MUTANTS, *mutants_of_training.MUTANTS, *mutants_of_peers.MUTANTS]


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=TREE, text=True, capture_output=True, env={**os.environ, **environment}
    )


def passes(test: str) -> tuple[bool, str]:
    """Return whether a test passes in the worktree, and the end of what it printed."""
    kind, _, program = test.partition(" ")
    if kind in ("c", "emulator"):
        out = TREE / "build" / {"c": "ctest/tests/c", "emulator": "emulator"}[kind] / program
        built = run("make", "-C", f"tests/{kind}", str(out))
        if built.returncode:
            return False, "DOES NOT COMPILE: " + built.stderr[-500:]
        done = run(out)
    else:
        done = run(PYTHON, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *test.split(), PYTHONPATH="python")
    return done.returncode == 0, (done.stdout + done.stderr)[-1000:]


def verified(mutant: Mutant) -> tuple[bool, str]:
    """Whether `ringtile verify` finds nothing wrong with the mutant's case, and the end of what it printed."""
    backend, _, case = mutant.case.rpartition(": ")
    command = (PYTHON, "-m", "ringtile", "verify", "--backend", backend or "ringtile", "--case", case)
    done = run(*command, PYTHONPATH="python")
    return done.returncode == 0, (done.stdout + done.stderr)[-1000:]


def prepare() -> None:
    """A clean worktree of HEAD with this checkout's compiled ops."""
    if not TREE.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(TREE)], cwd=ROOT, check=True, capture_output=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, text=True, capture_output=True).stdout
    for command in (
        ["git", "checkout", "--force", "--detach", head.strip()],
        ["git", "clean", "-fdq", "python", "tests"],
    ):
        subprocess.run(command, cwd=TREE, check=True, capture_output=True)
    for binary in (ROOT / "python" / "ringtile").glob("*.so"):
        (TREE / "python" / "ringtile" / binary.name).write_bytes(binary.read_bytes())


def main() -> int:
    words = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    prepare()
    for test in sorted({mutant.test for mutant in chosen}):  # a test that is red anyway shows nothing
        ok, said = passes(test)
        if not ok:
            print(f"red without a mutant: {test}\n{said}")
            return 2
    for case, mutant in {mutant.case: mutant for mutant in chosen if mutant.case}.items():
        ok, said = verified(mutant)
        if not ok:
            print(f"verify finds {case} wrong without a mutant\n{said}")
            return 2
    num_red = 0
    for mutant in chosen:
        path = TREE / mutant.file
        text = path.read_text()
        if text.count(mutant.line) != 1:
            print(f"STALE  {mutant.name}: {mutant.file} has {text.count(mutant.line)} times {mutant.line!r}")
            continue
        began = time.monotonic()
        path.write_text(text.replace(mutant.line, mutant.broken))
        try:
            ok, said = passes(mutant.test)
            found = not mutant.case or not verified(mutant)[0]
        finally:
            path.write_text(text)
        red = not ok and found and "DOES NOT COMPILE" not in said
        num_red += red
        colour = "red" if red else "GREEN" if ok else "GREEN in verify" if not found else "BROKEN"
        print(f"{colour}  {mutant.name}: {mutant.test} ({time.monotonic() - began:.0f} s)", flush=True)
        if not red:
            print(said)
    print(f"{num_red} of {len(chosen)} red")
    return 0 if num_red == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
