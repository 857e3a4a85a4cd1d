"""One line of the product, broken."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    name: str
    file: str
    line: str  # stands once in the file
    broken: str
    test: str  # a pytest selection, or "c PROGRAM", or "emulator PROGRAM"
