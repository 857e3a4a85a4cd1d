"""README's commands. `python tests/package/readme_commands.py` runs those of its pip block, as if pasted line by line.

It needs nothing but Python: CI runs it in a bare virtual environment.
"""

from __future__ import annotations

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]


def blocks() -> list[list[str]]:
    """Return the lines of each shell block of README, without their comments."""
    text = (ROOT / "README.md").read_text()
    found = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [[line.partition("  #")[0].strip() for line in block.splitlines()] for block in found]


def main() -> None:
    (pip,) = [block for block in blocks() if block[0].startswith("pip install")]
    for line in pip:
        print(f"$ {line}", flush=True)
        subprocess.run(line, shell=True, check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
