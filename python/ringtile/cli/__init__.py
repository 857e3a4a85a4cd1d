"""The command line: `ringtile train`, `verify`, `plan`, `bench`, `doctor`; `python -m ringtile`, under torchrun too.

A verb is a module with add_arguments(parser) and run(args) -> Outcome. Exit status: 0 done; 1 a check failed;
2 refused (bad usage, bad input, a lost peer: one line on stderr, no traceback).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ringtile import __version__
from ringtile.errors import ConfigError, PeerLost, RingMismatch, RingtileError

VERBS = {
    "train": "train a model from a YAML file; torchrun it for several ranks",
    "verify": "prove that n ranks compute what one computes, op by op and in training",
    "plan": "which keys travel between the ranks of a ring, and what that costs",
    "bench": "how fast this machine runs it, and what else is installed, on the same work",
    "doctor": "what is installed, what was built, what is chosen, what is patched",
}


class Outcome(NamedTuple):
    """What a verb ends with: the exit status, and what --json writes."""

    status: int
    report: dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="ringtile", description="Exact context-parallel training.")
    parser.add_argument("--version", action="version", version=f"ringtile {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{" + ",".join(VERBS) + "}")
    try:
        for name, summary in VERBS.items():
            verb = verbs.add_parser(name, help=summary, description=summary.capitalize() + ".")
            verb.add_argument("--json", metavar="FILE", type=pathlib.Path, help="also write the result to FILE as JSON")
            if name in arguments:  # the others stay unloaded: doctor must run where what train needs does not
                verb_module(name).add_arguments(verb)
        args = parser.parse_args(arguments)
        if args.json and rank() == 0:
            make_writable(args.json, "--json")
        outcome: Outcome = verb_module(args.verb).run(args)
        if args.json and rank() == 0:
            write_json(args.json, outcome.report)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ringtile"):
            raise
        return refuse(f"{error.name} is not installed; expected it: pip install 'ringtile[train]'")
    except (PeerLost, RingMismatch) as error:
        return refuse(f"rank {rank()}: {error}", every_rank=True)
    except RingtileError as error:
        return refuse(str(error))
    return outcome.status


def refuse(message: str, every_rank: bool = False) -> int:
    """Says why, on one line, and gives the exit status. Bad input is the same on all ranks: one a machine says it."""
    if every_rank or int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"ringtile: error: {message}", file=sys.stderr)
    return 2


def verb_module(name: str) -> Any:
    """The module of a verb."""
    return importlib.import_module(f"ringtile.cli.{name}")


def rank() -> int:
    """This process's rank as torchrun gave it; 0 when it was started alone."""
    return int(os.environ.get("RANK", 0))


def make_writable(path: pathlib.Path, option: str) -> None:
    """Makes the folder of a result, before the work whose result it is. ConfigError when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path} ({error.strerror}); expected a path of a file") from error


def write_json(path: pathlib.Path, report: dict[str, Any]) -> None:
    """Writes a report."""
    path.write_text(json.dumps(report, indent=1) + "\n")
