"""The command line: `ringtile train`, `verify`, `plan`, `init`, `doctor`; or `python -m ringtile`.

A verb is a module with add_arguments(parser) and run(args) -> Outcome. Exit status: 0 done; 1 a check failed;
2 refused (bad usage, bad input, a lost peer: one line on stderr, no traceback).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from ringtile import __version__
from ringtile.cli import environment, world
from ringtile.cli.output import check_output, write_json
from ringtile.ending import end
from ringtile.errors import EXTRAS, ConfigError, PeerLostError, RingMismatchError, RingtileError

REFUSED = 2  # the exit status
MAX_LINE = 1000  # characters of an error

VERBS = {
    "train": "train a model from a YAML file; start it with torchrun for several ranks",
    "verify": "prove that n ranks compute the same as one, op by op and in training",
    "plan": "show which keys travel between the ranks of a ring, and what that costs",
    "init": "write a project that trains as it is: a script, its YAML, launch files",
    "doctor": "report versions, compiled kernels, devices, and what is patched",
}


class Outcome(NamedTuple):
    """The result of a verb: the exit status, and the report that --json writes."""

    status: int
    report: dict[str, Any]


def command() -> NoReturn:
    """The program `ringtile`. A run that has refused, or lost a rank, ends at once: nothing follows its reason, and
    torch waits for nobody."""
    status = main()
    if status == REFUSED:
        end(status)
    sys.exit(status)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as every other error, instead of argparse's usage and exit."""
        raise ConfigError(f"{message}; expected what `{self.prog} -h` lists")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _Parser(prog="ringtile", description="Exact context-parallel training.")
    parser.add_argument("--version", action="version", version=f"ringtile {__version__}")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher adds what LOCAL_RANK says
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{" + ",".join(VERBS) + "}")
    try:
        for name, summary in VERBS.items():
            verb = verbs.add_parser(name, help=summary, description=summary.capitalize() + ".")
            verb.add_argument("--json", metavar="FILE", type=pathlib.Path, help="also write the result to FILE as JSON")
            if name in arguments:  # only this verb is imported: doctor must run where train's dependencies are missing
                verb_module(name).add_arguments(verb)
        args = parser.parse_args(arguments)
        if args.json and environment.rank() == 0:
            check_output(args.json, "--json")
        outcome: Outcome = verb_module(args.verb).run(args)
        if args.json and environment.rank() == 0:
            write_json(args.json, outcome.report)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ringtile"):
            raise
        package = error.name.partition(".")[0]
        packages = EXTRAS["train"] if package in EXTRAS["train"] else package
        return refuse(f"{package} is not installed; install it: pip install {packages}")
    except PeerLostError as error:
        return refuse(f"rank {environment.rank()}: {error}", every_rank=True)
    except RingMismatchError as error:
        refuse(f"rank {environment.rank()}: {error}", every_rank=True)
        world.leave()
        return REFUSED
    except RingtileError as error:
        every_rank = not environment.is_sound()
        refuse(str(error) if every_rank else world.fail(error), every_rank)
        world.leave()
        return REFUSED
    except Exception as error:
        from ringtile.hf.peers import of_a_collective
        from ringtile.transport.transport import reason_of

        if not of_a_collective(error):
            world.fail(error)
            raise
        if reason := world.heard():
            return refuse(reason)
        lost = f"a rank was lost: {reason_of(error)}; see the other ranks' logs for the cause"
        return refuse(f"rank {environment.rank()}: {lost}", every_rank=True)
    return outcome.status


def refuse(message: str, every_rank: bool = False) -> int:
    """Prints why, on one line, and returns the exit status. Of ranks that refuse alike, one prints."""
    line = one_line(f"ringtile: error: {message}")
    if every_rank or world.first_to_say(line):
        print(line, file=sys.stderr, flush=True)
    if (file := environment.error_file()) is not None:  # torchrun shows it at the end of its own summary
        said = {"message": line, "extraInfo": {"timestamp": str(int(time.time())), "py_callstack": line}}
        with contextlib.suppress(OSError):
            pathlib.Path(file).write_text(json.dumps({"message": said}))
    return REFUSED


def one_line(text: str) -> str:
    """A message of any origin as one line that a terminal can show, at most MAX_LINE characters."""
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(text.split()))
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 4]} ..."


def verb_module(name: str) -> Any:
    """The module of a verb."""
    return importlib.import_module(f"ringtile.cli.{name}")
