"""Installs a wheel where there is no compiler, and runs the command line, an attention call and README's training.

    python try_wheel.py WHEEL FOLDER    FOLDER becomes a fresh venv, with everything else from the package index

Prints the seconds and megabytes of each step; fails with the first step that fails.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILERS = ("cc", "gcc", "clang", "c++", "g++", "nvcc")
CALL = """
import ringtile, torch
seq = ringtile.ShardedSequence(ringtile.IntervalMask.documents([40, 24]), ringtile.Layout.zigzag(64, 1), None)
q, k, v = (torch.randn(1, 64, 2, 16) for _ in "qkv")
assert ringtile.ring_attention(q, k, v, seq).shape == q.shape
"""


def megabytes(folder: pathlib.Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def main(wheel: pathlib.Path, folder: pathlib.Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    # Nothing but the venv is on PATH, and no folder of the checkout is where Python looks.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "CXX")}
    environment |= {"PATH": str(folder / "bin"), "OMP_NUM_THREADS": "1"}
    found = [compiler for compiler in COMPILERS if shutil.which(compiler, path=environment["PATH"])]
    assert not found, f"the venv holds compilers: {found}"
    python = str(folder / "bin" / "python")
    demonstration = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ringtile", "train"]
    steps = {
        "install torch": ["-m", "pip", "--quiet", "install", "torch>=2.11"],
        "install the wheel": ["-m", "pip", "--quiet", "install", "--only-binary", ":all:", f"{wheel}[train]"],
        "ringtile doctor": ["-m", "ringtile", "doctor"],
        "ring_attention": ["-c", CALL],
        "README's demonstration": ["-m", *demonstration, str(ROOT / "configs" / "tiny_cpu.yaml"), "--compare"],
    }
    with tempfile.TemporaryDirectory() as elsewhere:
        for name, arguments in steps.items():
            start, size = time.monotonic(), megabytes(folder)
            done = subprocess.run([python, *arguments], cwd=elsewhere, env=environment)
            seconds, grown = time.monotonic() - start, megabytes(folder) - size
            print(f"{name}: {seconds:.0f} s, {grown:.0f} MB, exit status {done.returncode}", flush=True)
            if done.returncode != 0:
                sys.exit(f"try_wheel: {name} failed")
    print(f"ringtile's own files: {megabytes(next(folder.glob('lib/python*/site-packages/ringtile'))):.1f} MB")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).absolute(), pathlib.Path(sys.argv[2]).absolute())
