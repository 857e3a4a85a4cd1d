"""Hostile calls of every function of the C API, under the sanitizers, for each instruction set of this CPU; then every
threaded kernel under the thread sanitizer. tests/c has the programs: fuzz_*.c and test_*.c."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

from .counts import Counts

ROOT = pathlib.Path(__file__).parents[3]
ISAS = ("generic", "avx2", "avx512", "avx512_bf16", "amx_bf16")
SECONDS = 900  # a program that takes longer hangs


def campaign(trials: int | None, seed: int) -> Counts:
    """trials: of the fuzz programs, shared evenly among them and the instruction sets."""
    counts = Counts()
    fuzz = build("fuzz_*.c", "ctest", "address,undefined")
    for program in fuzz:
        for isa in ISAS:
            run(counts, program, isa, (trials or 1_000_000) // (len(ISAS) * len(fuzz)), seed)
    for program in build("test_*.c", "tsan", "thread"):
        for isa in ISAS:
            run(counts, program, isa, 1, seed)
    return counts


def build(sources: str, folder: str, sanitizer: str) -> list[pathlib.Path]:
    """Builds the programs of tests/c under a sanitizer, and returns those with these sources."""
    subprocess.run(["make", "-s", "-j2", "-C", ROOT / "tests/c", "build", f"SANITIZER={sanitizer}"], check=True)
    paths = sorted((ROOT / "tests/c").glob(sources))
    return [ROOT / "build" / folder / "tests/c" / path.stem for path in paths]


def run(counts: Counts, program: pathlib.Path, isa: str, number: int, seed: int) -> None:
    """Runs one program, and counts its calls from its last line."""
    label = f"{program.name} {number} {seed}, RINGTILE_CPU_ISA={isa}"
    try:
        done = subprocess.run(
            [program, str(number), str(seed)],
            env={**os.environ, "RINGTILE_CPU_ISA": isa},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        counts.hangs += 1
        counts.notes.append(f"{label}: hangs")
        return
    if done.stdout.startswith("skipped"):  # this CPU lacks the instruction set
        return
    found = {
        what: int(count) for count, what in re.findall(r"(\d+) (right|refused|wrong|passed|failed)\b", done.stdout)
    }
    if done.returncode != 0 and not found.get("wrong") and not found.get("failed"):
        counts.crashes += 1
        counts.notes.append(f"{label}: {summary(done.stdout)}")
        return
    counts.right += found.get("right", 0) + found.get("passed", 0)
    counts.named += found.get("refused", 0)
    counts.silent += found.get("wrong", 0) + found.get("failed", 0)
    if done.returncode != 0:
        counts.notes.append(f"{label}: {done.stdout[:500]}")


def summary(output: str) -> str:
    """The sanitizer's finding, and the trial that made it."""
    lines = [line for line in output.splitlines() if re.search(r"ERROR:|WARNING:|runtime error|SUMMARY|^seed", line)]
    return "; ".join(lines[:4]) or output[-300:]
