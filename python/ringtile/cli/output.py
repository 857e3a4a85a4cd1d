"""What the command line prints and writes: tables; files, whole or not at all, and where the user said."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ringtile.errors import ConfigError


def table(title: str, rows: Sequence[Sequence[str]], header: Sequence[str] = (), *, right: bool = False) -> str:
    """Return the title, and the rows in columns. right: all but the first column are aligned at their right end."""
    every = [header, *rows] if header else rows
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.rjust(n) if right and i else cell.ljust(n) for i, (cell, n) in enumerate(cells)).rstrip()

    return "\n".join([title, *map(line, every), ""])


def progress(text: str) -> None:
    """Say on stderr what is being done, if a person looks at it."""
    if sys.stderr.isatty():
        print(f"ringtile: {text} ...", file=sys.stderr, flush=True)


def check_output(path: pathlib.Path, option: str) -> None:
    """Makes the folder of a result before the work begins. ConfigError: the file could not be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve()):
            raise ConfigError(
                f"{option}: {path} is a link to {path.resolve()}, outside {path.parent}; expected a file of its own: "
                f"remove the link, or name its target"
            )
        if path.is_dir():
            raise ConfigError(f"{option}: {path} is a folder; expected a path of a writable file")
        if _is_replaced(path):
            with _beside(path).open("xb"):
                pass
            _beside(path).unlink()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", error)
        raise ConfigError(f"{option}: cannot write {path} ({reason}); expected a path of a writable file") from error


def write_output(path: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Lets `write` fill a file beside `path`, then gives it that name: readers see the old file or the new one."""
    if not _is_replaced(path):
        write(path)
        return
    beside = _beside(path)
    try:
        with beside.open("xb"):  # a new file, no link that someone put there
            pass
        write(beside)
        os.replace(beside, path.resolve())
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_json(path: pathlib.Path, report: dict[str, Any]) -> None:
    """Writes a report as indented JSON."""
    text = json.dumps(report, indent=1) + "\n"
    write_output(path, lambda file: _write_text(file, text))


def _write_text(path: pathlib.Path, text: str) -> None:
    path.write_text(text)


def _beside(path: pathlib.Path) -> pathlib.Path:
    """Return a name in the folder of the real file, with its suffix, which says the format of a picture."""
    return path.parent / f".{path.stem[:100]}.{os.getpid()}{path.suffix}"


def _is_replaced(path: pathlib.Path) -> bool:
    """Return whether writing makes a new file; a device or pipe, as /dev/null, is written to."""
    return path.is_file() or not path.exists()
