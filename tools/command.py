"""The command line that the tools share: a report as JSON if asked for, and one line where nothing can be done."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence

from ringtile.cli import Outcome
from ringtile.cli.output import check_output, write_json
from ringtile.errors import RingtileError


def main(
    program: str,
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], Outcome],
    arguments: Sequence[str] | None,
) -> int:
    """Returns the exit status of `python -m PROGRAM`: that of its outcome, or 2 if it refuses."""
    parser = argparse.ArgumentParser(f"python -m {program}", description=description)
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, help="also write the result to FILE as JSON")
    add_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        if args.json:
            check_output(args.json, "--json")
        outcome = run(args)
        if args.json:
            write_json(args.json, outcome.report)
    except RingtileError as error:
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return outcome.status
