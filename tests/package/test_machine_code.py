"""The machine code of the CUDA kernels: what nvcc made of the source, where the kernels were built.

An instruction that the compiler moved, repeated or dropped is not seen by the emulator. So the products, waits, copies,
descriptors and registers of the sm_90a kernels are counted here and compared with what their source says.

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
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import ringtile

BINARY = pathlib.Path(ringtile.__file__).with_name("_cuda.abi3.so")
CACHE = pathlib.Path(__file__).parents[2] / "build" / "machine_code"  # disassembled cubins, by their hash
TOOLS = os.pathsep.join([f"{sysconfig.get_paths()['purelib']}/nvidia/cu13/bin", os.environ.get("PATH", "")])
KERNEL = re.compile(r"attn_(fwd|bwd)_sm90_kernelI(?:4bf16|3f16)Li(\d+)E(?:Li(\d+)E)?")
DIMS = {"fwd": {(64, 64), (128, 128), (192, 128), (256, 256)}, "bwd": {(64, 64), (128, 128)}}  # D, Dv
# 16 further numbers of a factor, in the descriptor's units of 16 bytes: along a row, and rows below
ALONG, BELOW = 2, 128
HIGH_WORD = 0x40000040  # swizzle of 128 bytes, 1024 bytes between swizzle atoms

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

    predicated: bool
    opcode: str
    operands: list[str]


def instructions(text: str) -> list[Instruction]:
    """Of a kernel that nvdisasm has disassembled."""
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(@!?\w+ )?([A-Z0-9_.x]+) ?(.*?) ?;", text, re.MULTILINE)
    return [Instruction(bool(guard), opcode, rest.split(", ")) for guard, opcode, rest in found]


@functools.cache
def machine_code(cubins: str = ".sm_90a", kernel: re.Pattern[str] = KERNEL) -> dict[str, list[Instruction]]:
    """Of the kernels whose names match, in the binary's cubins whose names contain a text."""
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


class Product(NamedTuple):
    """wgmma instructions between a wgmma_fence and a commit: 64 rows, `columns`, 16 to sum over in each.

    a and b are the factors' places of each instruction, after the first one's; a is None in registers. panel_bytes goes
    into the descriptor of a factor whose columns are contiguous.
    """

    columns: int
    flags: str
    a: list[int] | None
    b: list[int]
    panel_bytes: int = 0


def along_rows(dim: int, panel_rows: int) -> list[int]:
    return [i // 4 * panel_rows * 128 // 16 + i % 4 * ALONG for i in range(dim // 16)]


def below(rows: int) -> list[int]:
    return [i * BELOW for i in range(rows // 16)]


def forward(dim: int, v_dim: int) -> tuple[list[Product], Counter[int]]:
    """fwd_sm90.cuh: S = Q K^T before the loop and in it, O += P V in it and behind it."""
    keys = 128 if v_dim <= 128 else 64
    scores = Product(keys, "", along_rows(dim, 128), along_rows(dim, keys))
    values = Product(v_dim, ".tnspB", None, below(keys), keys * 128)
    return [scores, scores, values, values], Counter({0: 3, 1: 1})


def backward(dim: int, _: int) -> tuple[list[Product], Counter[int]]:
    """bwd_sm90.cuh: per part of a tile of queries S^T, dP^T, dv, dk; but dq of the whole tile before the last dk."""
    parts = 128 // dim
    tile = 64 * parts
    rows = Product(64, "", along_rows(dim, 128), along_rows(dim, tile))
    columns = Product(dim, ".tnspB", None, below(64), tile * 128)
    dq = Product(64, ".tnspA.tnspB", below(128), below(128))
    products = [rows, rows, columns, columns] * parts
    waits = Counter({1: 2 * parts + 1, 0: parts + 1})  # S, dP, dq while dk runs; with a softcap dP, and dk
    return [*products[:-1], dq, products[-1]], waits


def boxes(*dims: int) -> int:
    """Bulk copies of tiles: 64 columns each."""
    return sum(dims) // 64


# ---- what the machine code says ------------------------------------------------------------------


class Word(NamedTuple):
    """A uniform register: an address that the scan does not know, named by where it was written, plus a constant."""

    source: int
    offset: int


def descriptors(code: list[Instruction]) -> Iterator[tuple[int, tuple[Word, Word, Word, Word]]]:
    """For each HGMMA its index, and the words of its four descriptor registers.

    Follows the uniform registers from the first instruction to the last. The compiler writes a descriptor shortly
    before its product, in the same order, so branches need not be followed.
    """
    value: dict[str, Word] = {"URZ": Word(-1, 0)}

    def word(operand: str, index: int) -> Word:
        if operand.startswith("0x"):
            return Word(-1, int(operand, 16))
        return value.setdefault(operand, Word(index, 0))

    def after(register: str, count: int = 1) -> str:
        return f"UR{int(register.removeprefix('UR')) + count}"

    for i, (predicated, opcode, operands) in enumerate(code):
        to, sources = operands[0], operands[1:]
        if opcode.startswith("HGMMA"):
            first = next(operand for operand in sources if "gdesc" in operand)
            register = re.search(r"UR\d+", first)
            assert register
            words = [word(after(register[0], n), i) for n in range(4)]
            yield i, (words[0], words[1], words[2], words[3])
        if not re.fullmatch(r"UR\d+", to):
            continue
        known = not predicated
        if known and opcode == "UMOV":
            value[to] = word(sources[0], i)
        elif known and opcode == "UIADD3.64" and sources[1].startswith("0x") and sources[2] == "URZ":
            low, high = word(sources[0], i), word(after(sources[0]), i)
            value[to], value[after(to)] = low._replace(offset=low.offset + int(sources[1], 16)), high
        elif known and opcode == "ULOP3.LUT" and sources[1].startswith("0x") and sources[3] == "0xfc":
            low = word(sources[0], i)
            value[to] = low._replace(offset=low.offset | int(sources[1], 16))
        elif known and opcode == "ULOP3.LUT" and sources[1].startswith("0x") and sources[3] == "0xc0":
            low = word(sources[0], i)  # of the 14 bits of an address; what was added above them is gone
            value[to] = Word(i, 0) if low.source >= 0 else low._replace(offset=low.offset & int(sources[1], 16))
        else:
            for n in range(2 if ".64" in opcode or ".WIDE" in opcode else 1):
                value[after(to, n)] = Word(i, 0)


def products(code: list[Instruction]) -> list[Product]:
    """Of a kernel, in the order of the machine code; checks the high word of each descriptor."""
    found: list[Product] = []
    at: dict[int, tuple[Word, Word, Word, Word]] = dict(descriptors(code))
    group: list[tuple[int, str, bool, tuple[Word, Word, Word, Word]]] = []
    for i, (_, opcode, operands) in enumerate(code):
        if not opcode.startswith("HGMMA"):
            continue
        shape = re.fullmatch(r"HGMMA\.64x(\d+)x16\.F32(\.BF16)?", opcode)
        assert shape, opcode
        factor = next(operand for operand in operands if "gdesc" in operand)
        group.append((int(shape[1]), factor.split("]")[1], operands[1] == factor, at[i]))
        if operands[-1] != "gsb0":
            continue
        columns, flags, in_memory, _ = group[0]
        assert {entry[:3] for entry in group} == {(columns, flags, in_memory)}
        a, b = [entry[3][0] for entry in group], [entry[3][2] for entry in group]
        highs = {word for entry in group for word in (entry[3][1::2] if in_memory else entry[3][3:])}
        assert highs == {Word(-1, HIGH_WORD)}
        assert {word.source for word in b} == {b[0].source}
        assert not in_memory or {word.source for word in a} == {a[0].source}
        found.append(
            Product(
                columns,
                flags,
                [word.offset - a[0].offset for word in a] if in_memory else None,
                [word.offset - b[0].offset for word in b],
                (b[0].offset >> 16) * 16,
            )
        )
        assert not in_memory or a[0].offset >> 16 == 0
        group.clear()
    assert not group
    return found


def count(code: list[Instruction], opcode: str) -> int:
    return sum(instruction.opcode.startswith(opcode) for instruction in code)


def kernels(*passes: str) -> list[tuple[str, tuple[int, int], list[Instruction]]]:
    """Name, (D, Dv) and code of the kernels of the passes, in two dtypes each."""
    found = [(match, code) for name, code in machine_code().items() if (match := KERNEL.search(name))]
    for kind in passes:
        dims = Counter((int(match[2]), int(match[3] or match[2])) for match, _ in found if match[1] == kind)
        assert dims == dict.fromkeys(DIMS[kind], 2)
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
def test_products_and_waits_are_those_of_the_source(
    kind: str, source: Callable[[int, int], tuple[list[Product], Counter[int]]]
) -> None:
    """At D = 256 the descriptors do not fit the uniform registers, and the scan loses sight of some: only counts."""
    for name, dims, code in kernels(kind):
        expected, waits = source(*dims)
        if dims == (256, 256):
            shapes = Counter(match[1] for each in code if (match := re.match(r"HGMMA\.64x(\d+)x16", each.opcode)))
            assert shapes == {"64": 2 * 256 // 16, "256": 2 * 64 // 16}, name
        else:
            assert products(code) == expected, name
        assert count(code, "WARPGROUP.ARRIVE") == len(expected), name
        assert Counter(int(i.operands[1], 16) for i in code if i.opcode == "WARPGROUP.DEPBAR.LE") == waits, name


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
