"""`make mutants`: drops each fence, wait, arrival and barrier of the CUDA kernels; the emulator must object.

A copy of the sources (build/cuda_barriers) is compiled once, with every such call behind a number; RINGTILE_DROPPED
names the one that a run leaves out. `python tests/campaigns/cuda_barriers.py WORD ...` runs those whose file and line
contain one of the words; `--list` prints all.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build" / "cuda_barriers"

CALL = re.compile(
    r"(?<![\w.])((?:walk\.)?(?:fence_\w+|mbarrier_(?:wait_parity|arrive|arrive_expect_tx)|arrive_as_warp|syncthreads"
    r"|syncwarp|named_barrier_(?:sync|arrive)|wait_for_other_group|release_other_group|wgmma_(?:fence|commit_group)"
    r"|wgmma_wait_group<\d>|cp_async_(?:bulk_)?commit_group|cp_async_(?:bulk_)?wait_group(?:_read)?<\d>|wait_eq"
    r"|st_release|wait_for_dq|release_dq|wait_for_keys|release_keys))\("
)
FORWARD, FORWARD_SM90 = "test_attn_fwd", "test_attn_fwd_sm90"
BACKWARD, BACKWARD_SM90 = "test_attn_bwd", "test_attn_bwd_sm90"
# The tests of a file, the one that fails soonest first.
TESTS = {
    "cuda/attn/bwd.cuh": [BACKWARD],
    "cuda/attn/bwd_parts.cuh": [BACKWARD_SM90, BACKWARD],
    "cuda/attn/bwd_sm90.cuh": [BACKWARD_SM90],
    "cuda/attn/fwd.cuh": [FORWARD],
    "cuda/attn/fwd_sm90.cuh": [FORWARD_SM90],
    "cuda/attn/key_walk.cuh": [FORWARD_SM90, FORWARD],
    "cuda/attn/plain.cuh": [FORWARD, BACKWARD],
    "cuda/attn/merge.cu": ["test_attn_merge"],
    "cuda/attn/query_walk.cuh": [BACKWARD_SM90, BACKWARD],
    "cuda/attn/softmax.cuh": [FORWARD, FORWARD_SM90],
    "cuda/attn/tile.cuh": [FORWARD, BACKWARD],
    "cuda/attn/tma_tile.cuh": [FORWARD_SM90, BACKWARD_SM90],
    "cuda/cross_entropy.cu": ["test_cross_entropy"],
}
# Sites that no test can miss, and why. The name is the file's, the line and, if several are alike, which of them.
EXEMPT = {
    "attn/bwd_sm90.cuh: syncwarp();": "keeps the copier's idle lanes beside lane 0, which alone touches memory",
    "attn/bwd_sm90.cuh: syncwarp(); #2": "keeps the adder's idle lanes beside lane 0; its arrival has a syncwarp",
    "attn/fwd_sm90.cuh: syncwarp();": "keeps the producer's idle lanes beside lane 0, which alone touches memory",
    "attn/fwd_sm90.cuh: syncthreads();": "the search for the first tile, which follows, has barriers of its own",
    "attn/softmax.cuh: syncwarp();": "lanes meet at the shuffles that follow, which on a GPU order no memory",
}


class Site(NamedTuple):
    number: int
    file: str
    name: str


def matching(text: str, opening: int) -> int:
    """The place of the parenthesis that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError("a parenthesis stays open")


def numbered(file: str, first: int) -> tuple[str, list[Site]]:
    """The source of a file with each call behind its number, and the sites."""
    text, parts, sites, done = (ROOT / file).read_text(), [], [], 0
    seen: dict[str, int] = {}
    for match in CALL.finditer(text):
        begin = text.rfind("\n", 0, match.start()) + 1
        line = text[begin : text.find("\n", begin)].split("//")[0].strip()
        is_definition = line.startswith("RT_DEVICE")
        if is_definition or "//" in text[begin : match.start()]:
            continue
        end = matching(text, match.end() - 1) + 1
        seen[line] = seen.get(line, 0) + 1
        name = f"{file.removeprefix('cuda/')}: {line}" + (f" #{seen[line]}" if seen[line] > 1 else "")
        sites.append(Site(first + len(sites), file, name))
        parts += [
            text[done : match.start()],
            f"(is_dropped({sites[-1].number}) ? void() : {text[match.start() : end]})",
        ]
        done = end
    return "".join([*parts, text[done:]]), sites


def prepare() -> list[Site]:
    """Writes and compiles the numbered copy; what has not changed keeps its object."""
    texts = {
        path.relative_to(ROOT): path.read_text()
        for folder in ("csrc", "cuda", "tests/c", "tests/emulator")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file()
    }
    sites: list[Site] = []
    for path in sorted((ROOT / "cuda").rglob("*.cu*")):
        file = str(path.relative_to(ROOT))
        if file.startswith("cuda/device/"):
            continue
        text, found = numbered(file, len(sites) + 1)
        if found and file not in TESTS:
            sys.exit(f"{file} has fences or barriers: name its tests in TESTS")
        texts[Path(file)] = text
        sites += found
    emulator = Path("tests/emulator/emulator.h")
    texts[emulator] = texts[emulator].replace(
        "namespace emulator {",
        "#include <cstdlib>\ninline bool is_dropped(int site) {\n"
        '    static const char *const dropped = getenv("RINGTILE_DROPPED");\n'
        "    return dropped != nullptr && atoi(dropped) == site;\n}\n\nnamespace emulator {",
        1,
    )
    for path, text in texts.items():  # each once: a file written twice would be compiled anew
        write(TREE / path, text)
    programs = sorted({f"{TREE}/build/emulator/{test}" for tests in TESTS.values() for test in tests})
    subprocess.run(["make", "-s", "-j2", "-C", str(TREE / "tests/emulator"), *programs], check=True)
    return sites


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def first_line(test: str, site: int) -> str:
    """Return what a test says first without a site: of a green one its count, else the first failure."""
    command = ["stdbuf", "-oL", f"{TREE}/build/emulator/{test}"]
    environment = {**os.environ, "RINGTILE_DROPPED": str(site)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        assert run.stdout is not None
        said = run.stdout.readline().strip()
        run.kill()
    return said or "it crashed"


def objection(site: Site) -> str:
    """Return what the site's tests say without it; empty if all stay green."""
    for test in TESTS[site.file]:
        said = first_line(test, site.number)
        if not re.fullmatch(r"\d+ passed, 0 failed", said):
            return said
    return ""


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--list"]
    if not (TREE / "csrc").exists():
        shutil.rmtree(TREE, ignore_errors=True)
    sites = prepare()
    chosen = [site for site in sites if not words or any(word in site.name for word in words)]
    if "--list" in sys.argv:
        print(*(f"{site.number:4}  {site.name}" for site in chosen), sep="\n")
        return 0
    for name in EXEMPT.keys() - {site.name for site in sites}:
        sys.exit(f"EXEMPT names what is not there: {name}")
    for test in sorted({test for site in chosen for test in TESTS[site.file]}):
        if not re.fullmatch(r"\d+ passed, 0 failed", said := first_line(test, 0)):
            sys.exit(f"{test} is red with all of them: {said}")
    num_bad = 0
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for site, said in zip(chosen, pool.map(objection, chosen), strict=True):
            reason = EXEMPT.get(site.name)
            bad = not said and not reason
            num_bad += bad
            print(
                f"{'red' if said else 'GREEN' if bad else 'exempt'}  {site.name}\n    {said or reason or ''}",
                flush=True,
            )
    print(f"{len(chosen) - num_bad} of {len(chosen)} red or exempt ({time.monotonic() - began:.0f} s)")
    return num_bad > 0


if __name__ == "__main__":
    sys.exit(main())
