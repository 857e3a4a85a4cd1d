"""`make mutants`: breaks the product code in one line at a time and shows that a test goes red.

Each mutant names the line, its broken form, and the test that must fail. The breaks are made in a git worktree of HEAD
(build/mutants), one after another; the checkout itself is never touched. `python tests/campaigns/mutants.py WORD ...`
runs the mutants whose names contain one of the words. They are chosen: of `sequence/mask.py` alone cosmic-ray makes
1,349, each a run of its tests.

What tests import takes longer than most of them. This process imports all of it but ringtile, and each run is a fork.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mutants_of_kernels
import mutants_of_peers
import mutants_of_training
from mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests")]
import parts  # noqa: E402
import pool  # noqa: E402

TREE = ROOT / "build" / "mutants"
IMPORTED = ("accelerate", "yaml", "pydantic", *pool.TRAINERS)

MUTANTS = [*mutants_of_kernels.MUTANTS, *mutants_of_training.MUTANTS, *mutants_of_peers.MUTANTS]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=TREE, text=True, capture_output=True)


def in_fork(function: Callable[[], object], *, keeps_bytecode: bool) -> tuple[bool, str]:
    """Whether a function of the worktree returns 0 in a fork of this process, and the end of what it printed."""
    with tempfile.TemporaryFile() as printed:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            try:
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
                os.chdir(TREE)
                sys.path[:] = [
                    str(TREE / "python"),
                    *(path for path in sys.path if not path.startswith(str(ROOT / "tests"))),
                ]
                os.environ["PYTHONPATH"] = str(TREE / "python")
                # A file's bytecode is known by its second and its size: two mutants of a line may share them.
                sys.dont_write_bytecode = not keeps_bytecode
                os.environ |= {} if keeps_bytecode else {"PYTHONDONTWRITEBYTECODE": "1"}
                code = function()
            except SystemExit as end:
                code = end.code
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0 if code in (0, None) else 1)
        ok = os.waitpid(child, 0)[1] == 0
        printed.seek(0)
        return ok, printed.read().decode(errors="replace")[-1000:]


def passes(test: str, *, is_broken: bool = True) -> tuple[bool, str]:
    """Return whether a test passes in the worktree, and the end of what it printed."""
    kind, _, program = test.partition(" ")
    if kind in ("c", "emulator"):
        out = TREE / "build" / {"c": "ctest/tests/c", "emulator": "emulator"}[kind] / program
        built = run("make", "-C", f"tests/{kind}", str(out))
        if built.returncode:
            return False, "DOES NOT COMPILE: " + built.stderr[-500:]
        done = run("make", "-C", "tests/c", f"{out}.run") if kind == "c" else run(out)  # on each instruction set
        return done.returncode == 0, (done.stdout + done.stderr)[-1000:]
    arguments = ["-x", "-q", "-p", "no:cacheprovider", *shlex.split(test)]
    return in_fork(lambda: parts.run(arguments), keeps_bytecode=not is_broken)


def verified(mutant: Mutant, *, is_broken: bool = True) -> tuple[bool, str]:
    """Whether the gauntlet finds nothing wrong with the mutant's case, and the end of what it printed."""
    backend, _, case = mutant.case.rpartition(": ")

    def verify() -> object:
        from tools.gauntlet.__main__ import main

        with parts.servers_forked():
            return main([backend or "ringtile", "--case", case])

    return in_fork(verify, keeps_bytecode=not is_broken)


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
    parts.import_all([name for name in IMPORTED if not name.startswith("ringtile")])
    prepare()
    for test in sorted({mutant.test for mutant in chosen}):  # a test that is red anyway shows nothing
        ok, said = passes(test, is_broken=False)
        if not ok:
            print(f"red without a mutant: {test}\n{said}")
            return 2
    for case, mutant in {mutant.case: mutant for mutant in chosen if mutant.case}.items():
        ok, said = verified(mutant, is_broken=False)
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
        color = "red" if red else "GREEN" if ok else "GREEN in verify" if not found else "BROKEN"
        print(f"{color}  {mutant.name}: {mutant.test} ({time.monotonic() - began:.0f} s)", flush=True)
        if not red:
            print(said)
    print(f"{num_red} of {len(chosen)} red")
    return 0 if num_red == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
