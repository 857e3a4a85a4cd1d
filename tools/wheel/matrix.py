"""Tries a wheel with the versions that it supports, and writes the table of docs/guide/versions.md.

    python matrix.py WHEEL FOLDER        every row, then the table
    python matrix.py WHEEL FOLDER 0 2    these rows, then the table of all results in FOLDER
    python matrix.py WHEEL FOLDER 2 transformers==5.25.0    this row with a new release, which the extra dev does not
                                                            allow yet: what to run before its bound is raised

A row is a fresh venv, made by uv, with the wheel and the packages that the row names, in which tests of this checkout
run against the installed wheel: kernels, the ring of processes, and trainings under every engine. A row whose Python is
not on PATH, or whose packages cannot be installed, is "not tried", with the reason. FOLDER keeps a result and a log of
each row, and no venv.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "versions.md"
BEGIN, END = "<!-- the table of make matrix -->\n", "<!-- end of the table -->\n"
PACKAGES = ("torch", "transformers", "accelerate", "trl", "peft", "deepspeed")
SUITE = ("tests/attn/test_ops.py", "tests/attn/test_attention_table.py", "tests/hf/test_hf_matrix.py")
RUNNER = ("pytest", "pytest-timeout")
AXOLOTL = ("tests/hf/test_hf_axolotl.py", "tests/hf/test_axolotl_train.py")
# Where the compiled ops do not load, an error names what was found and what is expected.
REFUSED = """
import ringtile
try:
    ringtile.attention
except ringtile.BuildError as error:
    print("refused:", error)
"""


class Row(NamedTuple):
    python: str
    torch: str  # a minor version; empty: the newest
    others: tuple[str, ...] = ()  # what is installed beside the wheel and its extra
    extra: str | None = "[dev]"  # of the wheel; empty: none; None: nor the packages it needs, which pip would not allow
    oldest: bool = False  # the lowest versions that pyproject.toml allows, instead of the newest
    tests: tuple[str, ...] = SUITE  # none: `import ringtile` must name the reason for its refusal


ROWS = [
    *(
        Row(python, torch, (f"transformers=={transformers}.*",))
        for python, transformers in (("3.11", "5.24"), ("3.12", "5.23"), ("3.13", "5.17"))
        for torch in ("2.11", "2.12", "2.13", "2.14")
    ),
    Row("3.13", ""),
    Row("3.14", ""),
    Row("3.11", "2.11", oldest=True),
    Row("3.11", "2.13", ("axolotl-ringmaster",), tests=("tests/bench/test_bench.py", *SUITE)),
    Row("3.11", "2.13", ("liger-kernel==0.8.5",), tests=("tests/hf/test_liger.py", *SUITE)),
    # axolotl pins its packages, some below the versions of [hf].
    *(
        Row("3.12", "2.13", (f"axolotl=={axolotl}", "deepspeed<0.20", *RUNNER), "", tests=AXOLOTL)
        for axolotl in ("0.19.0", "0.20.0", "0.21.0")
    ),
    Row("3.11", "2.10", extra=None, tests=()),
]


class NotTriedError(Exception):
    """The row's venv cannot be made here."""


def lowest() -> list[str]:
    """`name==version` for the lower bounds of pyproject.toml, except torch's, which the row names."""
    bounds: dict[str, str] = {}
    project = (ROOT / "pyproject.toml").read_text().split("[project]")[1]
    for name, version in re.findall(r'"([\w-]+)>=([\d.]+)', project):
        bounds[name] = min(version, bounds.get(name, version), key=lambda text: [int(part) for part in text.split(".")])
    kept = (*PACKAGES[1:], "PyYAML")
    return [f"{name}=={version}" for name, version in bounds.items() if name in kept]


def install(row: Row, wheel: pathlib.Path, venv: pathlib.Path, releases: Sequence[str] = ()) -> str:
    """Makes the row's venv and returns its Python. releases: `name==version`, whatever bounds say."""
    interpreter = shutil.which(f"python{row.python}")
    if interpreter is None:
        raise NotTriedError(f"no python{row.python} on PATH")
    python = str(venv / "bin" / "python")
    pip = ["uv", "pip", "install", "--quiet", "--python", python]
    if releases:
        venv.parent.joinpath("releases.txt").write_text("\n".join(releases))
        pip += ["--overrides", str(venv.parent / "releases.txt")]
    packages = [
        f"torch=={row.torch}.*" if row.torch else "torch",
        *row.others,
        *(lowest() if row.oldest else []),
        *releases,
    ]
    commands = [["uv", "venv", "--quiet", "--python", interpreter, str(venv)]]
    if row.extra is None:
        commands += [[*pip, *packages], [*pip, "--no-deps", str(wheel)]]
    else:
        commands.append([*pip, *packages, f"ringtile{row.extra} @ {wheel.as_uri()}"])
    for command in commands:
        done = subprocess.run(
            command, env={**os.environ, "UV_PYTHON_DOWNLOADS": "never"}, stderr=subprocess.PIPE, text=True
        )
        if done.returncode != 0:
            raise NotTriedError(" ".join(done.stderr.split())[:300])
    return python


def installed(python: str) -> dict[str, str]:
    """The versions of Python and of PACKAGES in a venv."""
    listed = subprocess.run(
        ["uv", "pip", "list", "--format", "json", "--python", python], capture_output=True, check=True
    )
    versions = {package["name"]: package["version"] for package in json.loads(listed.stdout)}
    exact = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    return {"python": exact, **{name: versions[name] for name in PACKAGES if name in versions}}


def verdict(row: Row, python: str, log: pathlib.Path) -> str:
    """Runs the row's tests, or looks at its refusal; the output stays in `log`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    arguments = ["-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *row.tests] if row.tests else ["-c", REFUSED]
    with log.open("w") as file:
        done = subprocess.run([python, *arguments], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
    text = log.read_text()
    # Libraries may print after pytest's last line. Output of the tests may hold other summaries, before it.
    summaries = re.findall(r"^(?:=* )?(\d+ (?:passed|failed|skipped|errors?).*) in [\d.]+s", text, re.M)
    found = re.findall(r"^refused: .*", text, re.M) if not row.tests else summaries
    if done.returncode != 0 or not found:
        return f"FAILED: {found[-1] if found else 'see the log'}"
    return ", ".join(re.findall(r"refused: .*|\d+ (?:passed|skipped)", found[-1]))


def try_row(number: int, wheel: pathlib.Path, folder: pathlib.Path, releases: Sequence[str]) -> None:
    row, start = ROWS[number], time.monotonic()
    venv = folder / f"venv-{number}"
    shutil.rmtree(venv, ignore_errors=True)
    result = {"date": datetime.date.today().isoformat(), "versions": {"python": row.python, "torch": row.torch}}
    try:
        python = install(row, wheel, venv, releases)
        result["versions"] = installed(python)
        result["verdict"] = verdict(row, python, folder / f"row-{number}.log")
    except NotTriedError as reason:
        result["verdict"] = f"not tried: {reason}"
    finally:
        shutil.rmtree(venv, ignore_errors=True)
    (folder / f"row-{number}.json").write_text(json.dumps(result))
    print(f"row {number}: {result['versions']} {result['verdict']} ({time.monotonic() - start:.0f} s)", flush=True)


def table(folder: pathlib.Path) -> str:
    """All rows, as Markdown; those without a result in `folder` are "not tried". Rows that differ in torch are one."""
    names = {"trl": "TRL", "peft": "PEFT", "deepspeed": "DeepSpeed", "python": "Python"}
    columns = ("python", *PACKAGES)
    lines = [f"| {' | '.join(names.get(name, name) for name in columns)} | beside it | result | date |"]
    lines.append(f"|{' --- |' * (len(columns) + 3)}")
    torches: dict[tuple[str, ...], list[str]] = {}  # by all other cells
    for number, row in enumerate(ROWS):
        file = folder / f"row-{number}.json"
        untried = {"versions": {"python": row.python, "torch": row.torch}, "verdict": "not tried", "date": ""}
        result = json.loads(file.read_text()) if file.exists() else untried
        beside = [other for other in row.others if re.split("[<=]", other)[0] not in (*PACKAGES, *RUNNER)]
        beside += ["oldest versions"] * row.oldest
        python, torch, *cells = [result["versions"].get(name, "") for name in columns]
        cells += [", ".join(beside), result["verdict"].replace("|", "\\|"), result["date"]]
        torches.setdefault((python, *cells), []).append(torch)
    lines += [f"| {' | '.join([cells[0], ', '.join(torch), *cells[1:]])} |" for cells, torch in torches.items()]
    return "\n".join(lines) + "\n"


def main(wheel: pathlib.Path, folder: pathlib.Path, words: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    releases = [word for word in words if "==" in word]
    for number in [int(word) for word in words if word not in releases] or range(len(ROWS)):
        try_row(number, wheel, folder, releases)
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table(folder) + "\n" + END + rest.split(END)[1])
    failed = [file.stem for file in folder.glob("row-*.json") if "FAILED" in file.read_text()]
    if failed:
        sys.exit(f"matrix: failed: {', '.join(sorted(failed))}; logs in {folder}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]).absolute(), pathlib.Path(sys.argv[2]).absolute(), sys.argv[3:])
