"""What bounds the backward on sm_90a: its adder of dq in variants, timed in turns, with their bits compared.

python tests/gpu/adder.py build FOLDER, with nvcc, and later, on a GPU of compute capability 9.0,
python tests/gpu/adder.py run FOLDER FILE.json. Each variant is the kernel with lines of cuda/attn/bwd_sm90.cuh
replaced. "here" is what the package has. "before" and "late" give the same bits. The others give a wrong dq and say
what a part costs: if no_dq is as slow as here, the products bound the kernel; if no_wait is faster, the order of
additions; if no_release is faster still, waiting until they are written; then the additions themselves.
"""

from __future__ import annotations

import ctypes
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from ringtile import ops
from torch import Tensor

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = ROOT / "cuda" / "attn" / "bwd_sm90.cuh"
PROGRAM = ROOT / "tests" / "gpu" / "adder_variant.cu"
FLAGS = ("-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler=-fPIC")

FOUND = "const int previous = ld_shared(RT_SHARED(RT_SHARED(smem, stages)[n % 2], previous));\n"
SEARCH = "const int previous = walk.ended(at) ? -1 : walk.previous_to_add(at);\n"
WAITS = "walk.wait_for_dq(at, previous); // mostly over before dq is there\n"
RELEASE = """            cp_async_bulk_wait_group<0>();
            fence_proxy_async_global();
            walk.release_dq(at);
"""
ADDS = "for (int i = 0; i < shape::BOXES; i++) // two from each group"
BREAK = "        if (walk.ended(at)) break;\n        if (lane_index() == 0) {\n            " + WAITS
LATE = """        if (lane_index() == 0 && n > 0) {
            cp_async_bulk_wait_group<0>();
            fence_proxy_async_global();
            walk.release_dq(added);
        }
        added = at;
"""
LOOP = "    using shape = backward_sm90_shape<D, SIDES>;\n    for (int n = 0;; n++) {\n        mbarrier_wait_parity("

Replacement = tuple[str, str]
NO_WAIT: tuple[Replacement, ...] = ((WAITS, "\n"),)
NO_RELEASE: tuple[Replacement, ...] = (*NO_WAIT, (RELEASE, ""))
VARIANTS: dict[str, tuple[Replacement, ...]] = {
    "here": (),
    # The adder itself finds the tile that adds before.
    "before": ((SEARCH, "const int previous = -1;\n"), (FOUND, SEARCH)),
    # A tile's release waits for the place of the next one.
    "late": (
        (RELEASE, ""),
        (LOOP, LOOP.replace("    for", "    auto added = walk.first();\n    for")),
        (BREAK, LATE + BREAK),
    ),
    "no_wait": NO_WAIT,
    "no_release": NO_RELEASE,
    "no_dq": (*NO_RELEASE, (ADDS, ADDS.replace("shape::BOXES", "0"))),
}
SAME_BITS = ("before", "late")


def source_of(variant: str) -> str:
    """Return the text of the kernel's file. ValueError: a line to be replaced is not there once."""
    text = SOURCE.read_text()
    for old, new in VARIANTS[variant]:
        if text.count(old) != 1:
            raise ValueError(f"{variant}: {old!r} is {text.count(old)} times in {SOURCE.name}; expected once")
        text = text.replace(old, new)
    return text


def build(folder: pathlib.Path) -> int:
    """Compile each variant to FOLDER/NAME.so."""
    folder.mkdir(parents=True, exist_ok=True)
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as tree:
            shutil.copytree(ROOT / "cuda", pathlib.Path(tree) / "cuda")
            shutil.copytree(ROOT / "csrc", pathlib.Path(tree) / "csrc")
            (pathlib.Path(tree) / "cuda/attn/bwd_sm90.cuh").write_text(source_of(variant))
            files = (str(PROGRAM), f"{tree}/cuda/device/last_error.cu", "-o", str(folder / f"{variant}.so"))
            subprocess.run(("nvcc", *FLAGS, "-I", f"{tree}/cuda", *files), check=True)
        print(f"{variant}: {(folder / f'{variant}.so').stat().st_size / 2**20:.1f} MiB", flush=True)
    return 0


# ---- on the GPU ---------------------------------------------------------------------------------


class Call(ctypes.Structure):
    """As in adder_variant.cu."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("seq_len", "num_heads", "num_kv_heads", "head_dim")),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "dout", "lse", "delta", "begin", "end")),
        *((name, ctypes.c_void_p) for name in ("dq", "dk", "dv", "workspace")),
        ("workspace_bytes", ctypes.c_int64),
    ]


def problem(seq_len: int, head_dim: int, causal: bool, heads: int, kv_heads: int) -> dict[str, Tensor]:
    """Return what a backward reads and writes, after a forward by ringtile."""
    make = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, seq_len, num, head_dim, generator=make, device="cuda", dtype=torch.bfloat16)
        for num in (heads, kv_heads, kv_heads, heads)
    )
    end = torch.arange(1, seq_len + 1, dtype=torch.int32, device="cuda")[None]
    end = end if causal else torch.full_like(end, seq_len)
    begin = torch.zeros_like(end)
    out = torch.empty_like(q, dtype=torch.float32)
    lse = torch.empty(1, heads, seq_len, dtype=torch.float64, device="cuda")
    runs = ops.runs_tensor([(0, 1, 0, seq_len)])
    ops.attn_fwd_(q, k, v, begin, end, runs, out, lse, head_dim**-0.5, 0.0, True)
    delta = ops.attn_delta(dout, out.to(q.dtype))
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    workspace = torch.empty(seq_len * heads + 2**20, dtype=torch.uint8, device="cuda")
    names = ["q", "k", "v", "dout", "lse", "delta", "begin", "end", "dq", "dk", "dv", "workspace"]
    tensors = (q, k, v, dout, lse, delta, begin, end, dq, dk, dv, workspace)
    return dict(zip(names, tensors, strict=True))


def backward_of(library: Any, p: dict[str, Tensor]) -> Callable[[], float]:
    """Return a function that runs the backward once and returns its milliseconds."""
    _, seq_len, heads, head_dim = p["q"].shape
    call = Call(seq_len, heads, p["k"].size(2), head_dim, head_dim**-0.5)
    for name, tensor in p.items():
        setattr(call, name, tensor.data_ptr())
    call.workspace_bytes = p["workspace"].numel()

    def run() -> float:
        p["dq"].zero_()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        status = library.backward(ctypes.byref(call), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        ended.record()
        ended.synchronize()
        assert status == 0, f"status {status}"
        return float(began.elapsed_time(ended))

    return run


def run(folder: pathlib.Path, file: pathlib.Path, seq_len: int = 16384, repeats: int = 20) -> int:
    """Time the variants in turns. Return 1 if one that gives the same bits does not."""
    if torch.cuda.get_device_capability() != (9, 0):
        print(f"the variants are of sm_90a; this is {torch.cuda.get_device_name()}: nothing to do")
        return 0
    libraries = {name: ctypes.CDLL(str(folder / f"{name}.so")) for name in VARIANTS}
    rows, wrong = [], 0
    for head_dim in (128, 64):
        for causal in (True, False):
            p = problem(seq_len, head_dim, causal, 32, 8)
            runs = {name: backward_of(library, p) for name, library in libraries.items()}
            bits: dict[str, list[Tensor]] = {}
            for name, once in runs.items():
                once()
                bits[name] = [p[result].clone() for result in ("dq", "dk", "dv")]
            for name in SAME_BITS:
                if not all(torch.equal(x, y) for x, y in zip(bits[name], bits["here"], strict=True)):
                    wrong += 1
                    print(f"FAILED adder {name}, head dim {head_dim}, causal {causal} (failed): other bits than here")
            del bits
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(repeats):
                for name, once in runs.items():
                    times[name].append(once())
            medians = {name: statistics.median(taken) for name, taken in times.items()}
            rows.append({"head_dim": head_dim, "causal": causal, "seq_len": seq_len, "ms": medians})
            said = ", ".join(f"{name} {ms:.2f} ms ({ms / medians['here']:.3f})" for name, ms in medians.items())
            print(f"head dim {head_dim}, {'causal' if causal else 'full'}: {said}", flush=True)
            file.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    return int(wrong > 0)


def main(arguments: list[str]) -> int:
    what, folder = arguments[0], pathlib.Path(arguments[1])
    if what == "build":
        return build(folder)
    if not torch.cuda.is_available():  # a rehearsal: each variant's text can be made
        print(f"no GPU; {sum(len(source_of(variant)) > 0 for variant in VARIANTS)} variants could be built")
        return 0
    return run(folder, pathlib.Path(arguments[2]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
