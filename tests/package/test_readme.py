"""README's first screen and the examples: what they tell to type exists, and installs what it runs."""

from __future__ import annotations

import ast
import re
import shlex
import sys

import pytest
from readme_commands import ROOT, blocks

EXAMPLES = [path.parent for path in sorted((ROOT / "examples").glob("*/train.py"))]
# What an import is called on the package index; torch comes first, and these with ringtile.
NAMES = {"PIL": "pillow"}
WITH_RINGTILE = {"ringtile", "torch", "yaml", "transformers", "tokenizers", "accelerate", "numpy"}


def imports_of(example: str, names: set[str]) -> set[str]:
    """Return the packages that an example's train.py, and the modules beside it that it imports, import."""
    packages: set[str] = set()
    for name in names:
        path = next((p for p in (ROOT / "examples").glob(f"{example}/{name}.py")), ROOT / "examples" / f"{name}.py")
        if not path.is_file():
            packages.add(name)
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        modules += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
        packages |= imports_of(example, {module.partition(".")[0] for module in modules} - sys.stdlib_module_names)
    return packages


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_example_installs_what_it_imports(folder) -> None:
    packages = sorted(NAMES.get(name, name) for name in imports_of(folder.name, {"train"}) - WITH_RINGTILE)
    lines = [
        '    pip install "torch>=2.11"',
        " ".join(['    pip install --no-build-isolation "../..[hf]"', *packages]),
    ]
    assert "\n".join(lines) + "\n" in (folder / "README.md").read_text()


def test_the_example_of_axolotl_installs_ringtile_without_an_extra() -> None:
    assert "    pip install --no-build-isolation ../..  " in (ROOT / "examples/axolotl/README.md").read_text()


def test_commands_of_readme_exist() -> None:
    first = blocks()[0]
    assert first[0].startswith("git clone ")
    assert first[1:] == ["make train", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for line in [line for block in blocks() for line in block]:
        words = shlex.split(line)
        assert words[0] in ("git", "make", "pip", "python", "torchrun"), line
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
        for word in words:
            assert not word.endswith(".py") or (ROOT / word).is_file(), line
            assert not (extra := re.fullmatch(r"\.\[(\w+)\]", word)) or extra[1] in extras, line


def test_example_of_readme_needs_nothing_but_its_install_line() -> None:
    (pip,) = [block for block in blocks() if block[0].startswith("pip install")]
    assert pip[-1].split()[-1] == "examples/trainer/train.py"
    assert imports_of("trainer", {"train"}) <= WITH_RINGTILE
