"""The command line: `ringtile train`, `verify`, `plan`, `config`, `doctor`; or `python -m ringtile`.

A verb is a module with add_arguments(parser) and run(args) -> Outcome. Exit status: 0 done; 1 a check failed;
2 refused (bad usage, bad input, a lost peer: one line on stderr, no traceback).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from ringtile import __version__
from ringtile.cli import environment
from ringtile.cli.output import check_output, write_json
from ringtile.errors import EXTRAS, ConfigError, RingtileError

REFUSED = 2  # the exit status
MAX_LINE = 1000  # characters of an error

VERBS = {
    "train": "train a model from a YAML file; start it with torchrun for several ranks",
    "verify": "prove that n ranks compute the same as one, op by op and in training",
    "plan": "plan memory, traffic and time of a training, or of one layer, before it runs",
    "config": "list the keys of the YAML file with types, defaults and meanings",
    "doctor": "report versions, kernels and their self-test, devices, process groups",
}


SET: dict[str, Any] = {  # the option --set of verbs that read RUN.yaml
    "action": "append",
    "default": [],
    "metavar": "KEY=VALUE",
    "help": "a key of the file and its value in YAML, as training.max_steps=10 or tile_tokens=8192; may be repeated",
}


class Outcome(NamedTuple):
    """The result of a verb: the exit status, and the report that --json writes."""

    status: int
    report: dict[str, Any]


def command() -> NoReturn:
    """Run the program `ringtile`. A run that has refused, or lost a rank, ends at once: Python's own end waits for
    threads and destructors of torch, and those may wait for a rank that never answers."""
    status = main()
    if status == REFUSED:
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise ConfigError: one line, as every other error, instead of argparse's usage and exit."""
        if self.prog == "ringtile" and (found := re.search(r"invalid choice: '(.*?)' \(", message)):
            from ringtile.hf.config import nearest_key  # which needs yaml; the doctor does not

            raise ConfigError(f"unknown verb {found[1]}: {nearest_key(found[1], VERBS)}")
        raise ConfigError(f"{message}; expected what `{self.prog} -h` lists")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _Parser(prog="ringtile", description="Exact context-parallel training.")
    parser.add_argument("--version", action="version", version=f"ringtile {__version__}")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher adds what LOCAL_RANK says
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{" + ",".join(VERBS) + "}")
    try:
        for name, summary in VERBS.items():
            verb = verbs.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
            verb.add_argument(
                "--json", metavar="FILE", type=pathlib.Path, help="also write the result to FILE as JSON; -: to stdout"
            )
            if name in arguments:  # only this verb is imported: doctor must run where train's dependencies are missing
                verb_module(name).add_arguments(verb)
        args = parser.parse_args(arguments)
        if args.verb in ("train", "verify"):
            environment.check_world()
        to_stdout = str(args.json) == "-"
        if args.json and not to_stdout and environment.rank() == 0:
            check_output(args.json, "--json")
        with contextlib.redirect_stdout(sys.stderr) if to_stdout else contextlib.nullcontext():
            outcome: Outcome = verb_module(args.verb).run(args)
        if to_stdout and environment.rank() == 0:
            print(json.dumps(outcome.report, indent=1))
        elif args.json and environment.rank() == 0:
            write_json(args.json, outcome.report)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ringtile"):
            raise
        package = error.name.partition(".")[0]
        packages = EXTRAS["train"] if package in EXTRAS["train"] else package
        return refuse(f"{package} is not installed; install it: pip install {packages}")
    except RingtileError as error:
        return refuse(str(error))
    return outcome.status


def refuse(message: str) -> int:
    """Print why, on one line, with the rank if there are several, once for all workers; return the exit status."""
    if not environment.is_first_to_say(message):
        return REFUSED
    of_rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    line = one_line(f"ringtile: error: {of_rank}{message}")
    print(f"{line}\n", end="", file=sys.stderr, flush=True)  # in one write: torchrun's ranks do not buffer
    if (file := environment.error_file()) is not None:  # torchrun shows it at the end of its own summary
        said = {"message": line, "extraInfo": {"timestamp": str(int(time.time())), "py_callstack": line}}
        with contextlib.suppress(OSError):
            pathlib.Path(file).write_text(json.dumps({"message": said}))
    return REFUSED


def one_line(text: str) -> str:
    """Return a message of any origin as one line that a terminal can show, at most MAX_LINE characters."""
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(text.split()))
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 4]} ..."


def verb_module(name: str) -> Any:
    """Return the module of a verb."""
    return importlib.import_module(f"ringtile.cli.{name}")
