"""The multiply-add peak of a CPU, of float32 or of tiles: multiply_add.c, compiled for the kernels' instruction set."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from ringtile import ops
from ringtile.errors import MissingPackageError

from benchmarks import measure

SOURCE = Path(__file__).with_name("multiply_add.c")
# Bytes of a vector, vectors of a panel, as csrc/isa has them; bfloat16 adds no f32 instruction.
SIZES = {"generic": (16, 4 if platform.machine() in ("aarch64", "arm64") else 2), "avx2": (32, 2)}
WIDEST = (64, 4)


class Peak:
    """The peak of torch's threads, as a candidate that takes turns with the others.

    It uses the instruction set of the kernels, and runs long enough that waking the threads does not count.
    dtype: of what is multiplied.
    """

    def __init__(self, dtype: str = "float32") -> None:
        self.library = compiled(ops.cpu_isa(), on_tiles(dtype))
        self.iterations = 1 << 18  # a millisecond or more: a shorter run may be nothing but waiting for a core
        while min(self.run()["peak"] for _ in range(2)) < measure.SAMPLE_SECONDS:
            self.iterations *= 2

    def run(self) -> dict[str, float]:
        num_threads = torch.get_num_threads()
        with ThreadPoolExecutor(num_threads) as threads:
            began = time.perf_counter()
            list(threads.map(self.library.multiply_add, [self.iterations] * num_threads))
            seconds = time.perf_counter() - began
        self.flops = float(self.iterations * num_threads * self.library.flops_per_iteration())
        return {"peak": seconds}


def on_tiles(dtype: str) -> bool:
    """Return whether this CPU multiplies matrices of a dtype in tiles."""
    return dtype == "bfloat16" and ops.cpu_isa() == "amx_bf16" and torch.cpu._is_amx_tile_supported()


def compiled(isa: str, tiles: bool = False) -> ctypes.CDLL:
    """Return the loop for one of `ops.ISA_NAMES`, or for tiles. MissingPackageError: there is no C compiler."""
    return _compiled(*SIZES.get(isa, WIDEST), tiles)


@functools.cache
def _compiled(vector_bytes: int, panel_vecs: int, tiles: bool) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peak.so"
        command = [os.environ.get("CC", "cc"), "-std=gnu17", "-O3", "-march=native", "-shared", "-fPIC"]
        command += ["-DRT_TILES", "-mamx-tile", "-mamx-bf16"] if tiles else []
        command += [f"-DRT_VECTOR_BYTES={vector_bytes}", f"-DRT_PANEL_VECS={panel_vecs}", "-DRT_REAL_BITS=32"]
        command += ["-I", str(SOURCE.parents[1] / "csrc"), str(SOURCE), "-o", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise MissingPackageError(
                f"the benchmarks of a CPU need a C compiler; expected {' '.join(command)} to work, but "
                f"{getattr(error, 'stderr', None) or error}"
            ) from None
        library = ctypes.CDLL(str(path))
    library.multiply_add.argtypes, library.multiply_add.restype = [ctypes.c_int64], ctypes.c_double
    library.flops_per_iteration.restype = ctypes.c_int64
    return library
