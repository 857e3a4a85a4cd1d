"""Each instruction that only sm_90a has, alone: run these first, because their failures explain those of attention."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import pytest
import torch
from device import ON_GPU

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = [ROOT / "tests" / "emulator" / "test_primitives.cu", ROOT / "cuda" / "device" / "last_error.cu"]
PROGRAM = ROOT / "build" / "primitives"
NVCC = shutil.which(
    "nvcc", path=os.pathsep.join([os.environ.get("CUDA_HOME", "") + "/bin", os.environ.get("PATH", "")])
)


def program() -> pathlib.Path:
    """The tiny kernels, compiled if they are older than what they are made of."""
    headers = (ROOT / "cuda" / "device").glob("*.cuh")
    newest = max(file.stat().st_mtime for file in (*SOURCES, *headers))
    if not PROGRAM.exists() or PROGRAM.stat().st_mtime < newest:
        assert NVCC, "tests/emulator/test_primitives.cu is not compiled, and there is no nvcc"
        PROGRAM.parent.mkdir(exist_ok=True)
        flags = ["-std=c++17", "-O3", "-Werror=all-warnings", "-gencode=arch=compute_90a,code=sm_90a"]
        subprocess.run([NVCC, *flags, *map(str, SOURCES), "-o", str(PROGRAM)], check=True)
    return PROGRAM


@pytest.mark.long
@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
def test_the_tiny_kernels_compile() -> None:
    assert os.access(program(), os.X_OK)


@ON_GPU
def test_small_every_instruction_of_sm_90a_works_alone() -> None:
    """The emulator runs the same source (make emulator). A program that hangs has named the instruction before."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the GPU is not of compute capability 9.0")
    try:
        done = subprocess.run([str(program())], capture_output=True, text=True, timeout=30)
        printed, failed = done.stdout, done.returncode != 0
    except subprocess.TimeoutExpired as hung:
        printed, failed = f"{hung.stdout!r} does not end", True
    assert not failed, printed
