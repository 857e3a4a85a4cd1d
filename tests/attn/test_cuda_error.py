"""A kernel that cannot start leaves a text that says what was started where, and why it failed."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]

PACK_FLOATS = """
#include <stdio.h>
#include <string.h>
#include "cuda/ringtile_cuda.h"
int main(void) {
    const int64_t size = 5000, stride = 1;
    const rt_run run = {0, 1, 0, 5000};
    _Alignas(16) static float from[5000], to[5000];
    const rt_rows_tensor x = {1, 0, 4, &size, 5000, &stride, &stride, from, to};
    const rt_rows_params p = {.num_tensors = 1, .tensors = &x, .num_runs = 1, .runs = &run};
    const char *before = rt_cuda_last_error();
    if (before == NULL || strlen(before) > 0) return 2;
    if (rt_cuda_rows_pack(&p, NULL, NULL) != RT_CUDA) return 3;
    puts(rt_cuda_last_error());
    return 0;
}
"""


def objects(*sources: str) -> list[pathlib.Path]:
    """What the last build made of files of cuda/; empty without one of them."""
    found = [sorted((ROOT / "build" / "cuda").glob(f"{source}.*o"), key=os.path.getmtime) for source in sources]
    return [made[-1] for made in found] if all(found) else []


OBJECTS = objects("rows", "device/last_error")


@pytest.mark.nvcc
@pytest.mark.skipif(not (OBJECTS and shutil.which("nvcc")), reason="the CUDA kernels are not built")
def test_a_kernel_that_cannot_start_is_named_with_the_reason(tmp_path: pathlib.Path) -> None:
    """In a process that sees no GPU; the library needs none to be linked."""
    (tmp_path / "main.c").write_text(PACK_FLOATS)
    core = [ROOT / "csrc" / name for name in ("seq/rows.c", "seq/runs.c", "status.c")]
    toolkit = subprocess.run(["nvcc", "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    folders = re.findall(r'"(-L[^"]+)"', toolkit)
    libraries = [*folders, "-lcudart_static", "-ldl", "-lrt", "-lpthread", "-lstdc++"]
    compiler = ["cc", "-std=c17", f"-I{ROOT}", "-o", str(tmp_path / "main"), str(tmp_path / "main.c")]
    subprocess.run([*compiler, *map(str, [*core, *OBJECTS]), *libraries], check=True)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([tmp_path / "main"], env=environment, capture_output=True, text=True, check=True)
    reason = r"(CUDA driver version is insufficient.* \(cudaErrorInsufficientDriver\)|.* \(cudaErrorNoDevice\))"
    launched = r"; kernel (\S+ )?at rows\.cu:\d+, grid \(20, 1, 1\), 256 threads, 0 bytes of shared memory, no device"
    assert re.fullmatch(rf"{reason}{launched}, driver for CUDA \d+\.\d+, runtime \d+\.\d+\n", done.stdout), done.stdout
