"""The command line: `ringtile train`, `verify`, `plan`, `bench`, `doctor`; `python -m ringtile`, under torchrun too.

A verb is a module with add_arguments(parser) and run(args) -> Outcome. Exit status: 0 done; 1 a check failed;
2 refused (bad usage, bad input, a lost peer: one line on stderr, no traceback).
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from ringtile import __version__
from ringtile.cli.environment import local_rank, rank
from ringtile.errors import ConfigError, PeerLost, RingMismatch, RingtileError

VERBS = {
    "train": "train a model from a YAML file; start it with torchrun for several ranks",
    "verify": "prove that n ranks compute the same as one, op by op and in training",
    "plan": "show which keys travel between the ranks of a ring, and what that costs",
    "bench": "measure the kernels on this machine against other installed libraries",
    "doctor": "report versions, compiled kernels, devices, and what is patched",
}


class Outcome(NamedTuple):
    """The result of a verb: the exit status, and the report that --json writes."""

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
            if name in arguments:  # only this verb is imported: doctor must run where train's dependencies are missing
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
        return refuse(f"{error.name} is not installed; install it: pip install 'ringtile[train]'")
    except (PeerLost, RingMismatch) as error:
        return refuse(f"rank {rank()}: {error}", every_rank=True)
    except RingtileError as error:
        return refuse(str(error))
    return outcome.status


def refuse(message: str, every_rank: bool = False) -> int:
    """Prints why, on one line, and returns the exit status. All ranks refuse bad input alike: one a machine prints."""
    if every_rank or local_rank() == 0:
        print(f"ringtile: error: {message}", file=sys.stderr)
    return 2


def verb_module(name: str) -> Any:
    """The module of a verb."""
    return importlib.import_module(f"ringtile.cli.{name}")


def make_writable(path: pathlib.Path, option: str) -> None:
    """Makes the folder of a result, before the work begins. ConfigError when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option}: cannot write {path} ({error.strerror}); expected a path of a writable file"
        ) from error


def write_json(path: pathlib.Path, report: dict[str, Any]) -> None:
    """Writes a report as indented JSON."""
    path.write_text(json.dumps(report, indent=1) + "\n")
