"""The machine code of the CUDA kernels: what nvcc made of the source, where the kernels were built.

An instruction that the compiler moved, repeated or dropped is not seen by the emulator. So the products, waits, copies
and registers of the sm_90a kernels are counted here and compared with what their source says.

Shape letters: D head dim, Dv value head dim.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import ringtile

BINARY = pathlib.Path(ringtile.__file__).with_name("_cuda.abi3.so")
CACHE = pathlib.Path(__file__).parents[2] / "build" / "machine_code"  # disassembled cubins, by their hash
TOOLS = os.pathsep.join([f"{sysconfig.get_paths()['purelib']}/nvidia/cu13/bin", os.environ.get("PATH", "")])
KERNEL = re.compile(r"attn_(fwd|bwd)_sm90_kernelI(?:4bf16|3f16)Li(\d+)E(?:Li(\d+)E)?Li([12])EE")  # sides of the mask
DIMS = {"fwd": {(64, 64), (128, 128), (192, 128), (256, 256)}, "bwd": {(64, 64), (128, 128)}}  # D, Dv

pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(
        not all(shutil.which(tool, path=TOOLS) for tool in ("cuobjdump", "nvdisasm")),
        reason="nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm are not installed; make setup installs them",
    ),
]


def run_tool(*command: object, folder: pathlib.Path | None = None) -> str:
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, "PATH": TOOLS},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


class Instruction(NamedTuple):
    """`@P0 UIADD3.64 UR4, UR6, 0x2, URZ`: opcode UIADD3.64, the rest operands."""

    opcode: str
    operands: list[str]


def instructions(text: str) -> list[Instruction]:
    """Read those of a kernel that nvdisasm has disassembled."""
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z0-9_.x]+) ?(.*?) ?;", text, re.MULTILINE)
    return [Instruction(opcode, rest.split(", ")) for opcode, rest in found]


@functools.cache
def machine_code(cubins: str = ".sm_90a", kernel: re.Pattern[str] = KERNEL) -> dict[str, list[Instruction]]:
    """Read the code of the kernels whose names match, in the binary's cubins whose names contain a text."""
    CACHE.mkdir(parents=True, exist_ok=True)
    kernels = {}
    folder = CACHE / f"cubins.{os.getpid()}"
    folder.mkdir()
    try:
        run_tool("cuobjdump", "-xelf", cubins, BINARY, folder=folder)
        for cubin in sorted(folder.glob("*.cubin")):
            cached = CACHE / f"{hashlib.sha256(cubin.read_bytes()).hexdigest()}.sass"
            if not cached.exists():
                done = cached.with_suffix(f".{os.getpid()}")
                done.write_text(run_tool("nvdisasm", "-c", cubin))
                done.rename(cached)
            for text in re.split(r"(?=^\.text\.)", cached.read_text(), flags=re.MULTILINE)[1:]:
                name = text[: text.index(":")]
                if kernel.search(name):
                    kernels[name] = instructions(text)
    finally:
        shutil.rmtree(folder)
    return kernels


# ---- what the source says ------------------------------------------------------------------------


class Passes(NamedTuple):
    """What a pass of attention multiplies, of 64 rows each: HGMMA instructions by their columns, each a sum of 16; the
    fences before them, and the waits behind, by the number of products that may still run."""

    columns: Counter[int]
    fences: int
    waits: Counter[int]


def forward(dim: int, v_dim: int) -> Passes:
    """fwd_sm90.cuh: S = Q K^T before the loop and in it, O += P V in it and behind it."""
    keys = 128 if v_dim <= 128 else 64
    columns = Counter({keys: 2 * dim // 16}) + Counter({v_dim: 2 * keys // 16})
    return Passes(columns, 4, Counter({0: 3, 1: 1}))


def backward(dim: int, _: int) -> Passes:
    """bwd_sm90.cuh: per part of a tile of queries S^T, dP^T, dv, dk; but dq of the whole tile before the last dk."""
    parts = 128 // dim
    columns = Counter({64: parts * 2 * dim // 16}) + Counter({dim: parts * 2 * 64 // 16}) + Counter({64: 128 // 16})
    # S, dP, dq while dk runs; with a softcap dP, and dk
    return Passes(columns, 4 * parts + 1, Counter({1: 2 * parts + 1, 0: parts + 1}))


def boxes(*dims: int) -> int:
    """Bulk copies of tiles: 64 columns each."""
    return sum(dims) // 64


# ---- what the machine code says ------------------------------------------------------------------


def count(code: list[Instruction], opcode: str) -> int:
    return sum(instruction.opcode.startswith(opcode) for instruction in code)


def kernels(*passes: str) -> list[tuple[str, tuple[int, int], list[Instruction]]]:
    """Name, (D, Dv) and code of the kernels of the passes: two dtypes each, for masks with one side and with two."""
    found = [(match, code) for name, code in machine_code().items() if (match := KERNEL.search(name))]
    for kind in passes:
        dims = Counter((int(match[2]), int(match[3] or match[2])) for match, _ in found if match[1] == kind)
        assert dims == dict.fromkeys(DIMS[kind], 4)
    wanted = [(match, code) for match, code in found if match[1] in passes]
    return [(match.string, (int(match[2]), int(match[3] or match[2])), code) for match, code in wanted]


# ---- tests ---------------------------------------------------------------------------------------


def test_no_kernel_uses_local_memory() -> None:
    """On any architecture of the binary: registers that did not fit, and arrays indexed at run time, would be there."""
    printed = run_tool("cuobjdump", "-res-usage", BINARY)
    usage = re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+) .*?LOCAL:(\d+)", printed)
    assert len(usage) > 50
    assert [name for name, stack, local in usage if (stack, local) != ("0", "0")] == []
    for name, _, code in kernels("fwd", "bwd"):
        assert count(code, "LDL") + count(code, "STL") == 0, name


@pytest.mark.parametrize(("kind", "source"), [("fwd", forward), ("bwd", backward)], ids=["fwd", "bwd"])
def test_products_and_waits_are_those_of_the_source(kind: str, source: Callable[[int, int], Passes]) -> None:
    for name, dims, code in kernels(kind):
        columns, fences, waits = source(*dims)
        found = (re.fullmatch(r"HGMMA\.64x(\d+)x16\.F32(\.BF16)?", each.opcode) for each in code)
        assert Counter(int(match[1]) for match in found if match) == columns, name
        assert sum(each.operands[-1] == "gsb0" for each in code if each.opcode.startswith("HGMMA")) == fences, name
        assert count(code, "WARPGROUP.ARRIVE") == fences, name
        assert Counter(int(i.operands[1], 16) for i in code if i.opcode == "WARPGROUP.DEPBAR.LE") == waits, name


def test_a_mask_with_one_side_does_not_pay_for_the_second() -> None:
    """Its kernels have nothing that reads it: fewer loads from memory, and fewer instructions."""
    sizes: dict[str, dict[str, tuple[int, int]]] = {}
    for name, _, code in kernels("fwd", "bwd"):
        match = KERNEL.search(name)
        assert match
        kernel = match[0].removesuffix(f"Li{match[4]}EE")
        sizes.setdefault(kernel, {})[match[4]] = count(code, "LDG"), len(code)
    for kernel, by_sides in sizes.items():
        assert by_sides["1"][0] < by_sides["2"][0], kernel
        assert by_sides["1"][1] < by_sides["2"][1], kernel


def test_copies_and_additions_are_those_of_the_source() -> None:
    for name, (dim, v_dim), code in kernels("fwd", "bwd"):
        backward = "bwd" in name
        copied = (dim, dim, v_dim, v_dim) if backward else (dim, dim, v_dim)  # q, k, v, dout
        assert count(code, "UTMALDG.4D") == boxes(*copied), name
        assert count(code, "UTMACCTL.PF") == (5 if backward else 4), name  # their maps, and that of dq or rounded out
        assert count(code, "UTMAREDG.4D.ADD") == backward, name  # in a loop
        assert count(code, "UTMASTG.4D") == (0 if backward else boxes(v_dim)), name  # a warp's rows of rounded out
        assert count(code, "UTMACMDFLUSH") == 1, name
        waits = 2 if backward else 1
        assert sum(i.opcode == "DEPBAR.LE" and i.operands == ["SB0", "0x0"] for i in code) == waits, name


def test_warp_groups_share_the_registers() -> None:
    for name, _, code in kernels("fwd", "bwd"):
        limits = {i.opcode.split(".")[1]: i.operands[-1] for i in code if i.opcode.startswith("USETMAXREG")}
        assert limits == {"DEALLOC": hex(24), "TRY_ALLOC": hex(240)}, name


def test_every_architecture_has_each_kernel_once() -> None:
    """Each file for the architectures of the build, those of sm_90a for it alone; and PTX for GPUs beyond them."""
    cubins = re.findall(r"(\w+)\.sm_(\w+)\.cubin", run_tool("cuobjdump", "-lelf", BINARY))
    archs = {arch for name, arch in cubins if "_sm90" not in name}
    assert "80" in archs
    assert archs <= {"80", "86", "89", "90a", "100", "120"}
    for name in {name for name, _ in cubins}:
        assert sorted(arch for other, arch in cubins if other == name) == sorted({"90a"} if "_sm90" in name else archs)
    ptx = re.findall(r"(\w+)\.sm_80\.ptx", run_tool("cuobjdump", "-lptx", BINARY))
    assert set(ptx) == {name for name, _ in cubins if "_sm90" not in name}


def test_glu_divides_no_index() -> None:
    """A division of 64-bit integers would convert them (I2F); 14 kernels: four dtypes, f64 in packs of one alone."""
    glu = machine_code("glu.sm_80", re.compile(r"3gluI"))
    assert len(glu) == 14
    assert [name for name, code in glu.items() if any(each.opcode.startswith("I2F") for each in code)] == []


def test_cross_entropy_loads_four_packs_before_it_uses_one() -> None:
    packed = machine_code("cross_entropy.sm_80", re.compile(r"13cross_entropyI(4bf16|3f16|f)Li[48]E"))
    assert len(packed) == 3
    for name, code in packed.items():
        reads = "".join(
            "L" if i.opcode == "LDG.E.128" else "x" if i.opcode.startswith(("MUFU", "STG")) else "" for i in code
        )
        assert re.findall("L+", reads) == ["LLLL", "LLLL"], name  # pass 1, pass 2


def test_rounded_out_is_staged_in_pairs() -> None:
    """Each lane stores its part of two rows, two numbers at a time, before the fence and the bulk copies."""
    for name, (_, v_dim), code in kernels("fwd"):
        staged = [i for i, instruction in enumerate(code) if instruction.opcode == "STS"]
        assert len(staged) == 2 * v_dim // 8, name
        stores = [i for i, instruction in enumerate(code) if instruction.opcode.startswith("UTMASTG")]
        fences = [i for i, instruction in enumerate(code) if instruction.opcode == "FENCE.VIEW.ASYNC.S"]
        assert any(staged[-1] < fence < stores[0] for fence in fences), name


def test_dq_is_stored_while_dk_is_multiplied() -> None:
    """The last product of a tile is dk: after it a wait for dq, its 64 x 64 numbers in pairs, and the wait for dk."""
    for name, _, code in kernels("bwd"):
        last = max(i for i, instruction in enumerate(code) if instruction.opcode.startswith("HGMMA"))
        waits = [i for i in range(last, len(code)) if code[i].opcode == "WARPGROUP.DEPBAR.LE"]
        assert [code[i].operands[1] for i in waits] == ["0x1", "0x0"], name
        assert count(code[waits[0] : waits[1]], "STS.64") == 64 * 64 // 128 // 2, name
