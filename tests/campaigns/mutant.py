"""One line of the product, broken."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    line: str  # stands once in the file
    broken: str
    test: str  # a pytest selection, or "c PROGRAM", or "emulator PROGRAM"
    source: str = ""  # where others had it: an issue or a pull request of GitHub, OWNER/NAME#NUMBER
    case: str = ""  # of `python -m tools.gauntlet ringtile`, or of BACKEND: CASE, which must find it too
