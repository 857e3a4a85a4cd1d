"""`python -m tools.models [NAME ...]`: which types of models of transformers train exactly on two ranks.

Each type is built tiny from its default configuration, with every kind of layer that it has, and trained on text, or
with images or sound, for two steps, on two gloo ranks and in one process. Dropout and noise are set to 0, and a
mixture's balancing loss is on.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ringtile.cli import Outcome
from ringtile.cli.output import write_output
from ringtile.errors import ConfigError

from tools import command

if TYPE_CHECKING:
    import torch

SECONDS = 120.0  # of one training, after which its ranks are taken to hang
CONFIG = {"context_parallel_size": 2}
# By what stands behind the colon of a type.
_KINDS = {
    "": "of language models, on text",
    "images": "of images and text, with images",
    "sound": "of sound and text, with sound",
    "masked-lm": "of masked words",
    "token-classification": "of classes of tokens",
    "sequence-classification": "of classes of rows",
}
BEGIN, END = "<!-- begin: python -m tools.models --markdown -->\n", "<!-- end -->\n"


class Processes(Protocol):
    """Processes that run one function each, see `Workers`."""

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> list[Any]: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line per type. Status 1: one trains to other numbers, or fails without a refusal."""
    return command.main("tools.models", __doc__, add_arguments, run, arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="model types, or folders with a config.json; all types"
    )
    parser.add_argument("--stream", action="store_true", help="the ranks stream layers, 8 tokens at a time")
    parser.add_argument("--markdown", metavar="FILE", type=pathlib.Path, help="replace the table in this page")


def run(args: argparse.Namespace) -> Outcome:
    from tools.models.tiny_training import all_types
    from tools.models.workers import Workers

    if args.markdown is not None:
        split_page(args.markdown)
    known = all_types()
    for name in args.names:
        if name not in known and not pathlib.Path(name).is_dir():
            raise ConfigError(f"NAME is {name}; expected a folder with a config.json, or one of {', '.join(known)}")
    config = CONFIG | ({"stream": True, "tile_tokens": 8} if args.stream else {})
    ranks, alone = Workers(2), Workers(1)
    began, rows = time.monotonic(), []
    try:
        for name in args.names or known:
            row = decide(name, ranks, alone, config)
            rows.append(row)
            print(f"{name:28} {row['verdict']:9} {' '.join(row.get('reason', '').split())}", flush=True)
    finally:
        ranks.close()
        alone.close()
    if args.markdown is not None:
        replace_table(args.markdown, markdown(rows))
    failed = any(row["verdict"] in ("wrong", "failed") for row in rows)
    return Outcome(int(failed), {"types": rows, "seconds": time.monotonic() - began})


def decide(name: str, ranks: Processes, alone: Processes, config: dict[str, Any] = CONFIG) -> dict[str, Any]:
    """The verdict on one type: exact, refused, wrong, failed, or untried: one process cannot train it either.

    Where float32 differs, float64 decides: some types are so steep at random weights that two steps multiply rounding
    by a thousand. The first batch was proved in float32 then. In float64 it cannot be: many models round to float32
    inside, which the last place of a float64 does not show.
    """
    import torch

    row = _decide(name, ranks, alone, torch.float32, config)
    if row["verdict"] != "wrong":
        return row
    of_float64 = _decide(name, ranks, alone, torch.float64, config | {"first_batch_check": False})
    return of_float64 | {"first_batch": row["first_batch"]}


def _decide(
    name: str, ranks: Processes, alone: Processes, dtype: torch.dtype, config: dict[str, Any]
) -> dict[str, Any]:
    from ringtile.cli.model_config import read_config

    from tools.models.tiny_training import differences, equal, train

    source = read_config(name) if pathlib.Path(name).is_dir() else name
    row: dict[str, Any] = {"type": name, "dtype": str(dtype)}
    results = ranks.call(train, source, config, dtype, seconds=SECONDS)
    errors = [str(result) for result in results if isinstance(result, BaseException)]
    refusals = [result for result in results if isinstance(result, dict) and "refused" in result]
    if refusals and not errors:
        row |= {"verdict": "refused", "class": refusals[0]["class"], "reason": refusals[0]["refused"]}
        if "fails in one process" not in row["reason"]:
            return row
    (expected,) = alone.call(train, source, None, dtype, seconds=SECONDS)
    if isinstance(expected, BaseException):
        return {"type": name, "dtype": str(dtype), "verdict": "untried", "reason": str(expected)}
    if "verdict" in row:
        return row
    if errors:
        return row | {"verdict": "failed", "class": expected["class"], "reason": " | ".join(errors)}
    difference = max((differences(result, expected) for result in results), key=lambda each: max(each.values()))
    row |= {"class": expected["class"], "differences": difference, "first_batch": results[0].get("first_batch")}
    if equal(difference):
        return row | {"verdict": "exact"}
    return row | {"verdict": "wrong", "reason": ", ".join(f"{key} {value:.1e}" for key, value in difference.items())}


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/guide/models_table.md: exact types by kind in boxes that open, others by reason."""
    import transformers

    of: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        of.setdefault(row["verdict"], []).append(row)
    counts = ", ".join(f"{len(of[verdict])} {verdict}" for verdict in sorted(of))
    lines = [f"{len(rows)} pairs of type and task, of transformers {transformers.__version__}: {counts}.", ""]
    exact = of.pop("exact", [])
    for kind, words in _KINDS.items():
        if types := [row for row in exact if row["type"].partition(":")[2] == kind]:
            summary = f"Exact: {len(types)} types {words}"
            lines += [f'<details markdown="1"><summary>{summary}</summary>', "", _names(types), "", "</details>", ""]
    for verdict in sorted(of):
        reasons: dict[str, list[dict[str, Any]]] = {}
        for row in of[verdict]:
            reasons.setdefault(reason_of(row), []).append(row)
        lines += [f"| {verdict} | reason |", "| --- | --- |"]
        most_first = sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
        lines += [f"| {_names(types)} | {reason} |" for reason, types in most_first]
        lines.append("")
    return "\n".join(lines)


def reason_of(row: dict[str, Any]) -> str:
    """The reason of a refusal or an error without what differs from model to model: class names and paths."""
    reason = " ".join(row["reason"].split()).split(";")[0]
    reason = re.sub(
        r"^\w+(For\w+|LMHeadModel|LMHead|Model|Decoder|Attention)\b",
        "it",
        reason,
    )
    reason = re.sub(r"\b(it is bidirectional) .*", r"\1", reason)
    reason = re.sub(
        r".* on a cut of the first batch: the loss is .*", "its loss on shards is not that of one process", reason
    )
    return re.sub(r"[|<>]", " ", reason)[: 200 if row["verdict"] == "refused" else 80].strip()


def split_page(path: pathlib.Path, begin: str = BEGIN) -> tuple[str, str]:
    """What stands before and after the table of a page. Raises ConfigError for a page without its marks."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--markdown: cannot read {path} ({error}); expected a page with a table to replace"
        ) from None
    before, found, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ConfigError(f"--markdown: {path} has no table; expected the lines {begin.strip()} and {END.strip()}")
    return before, after


def replace_table(path: pathlib.Path, table: str, begin: str = BEGIN) -> None:
    """Puts a table between the marks of a page."""
    before, after = split_page(path, begin)
    page = before + begin + table + END + after
    write_output(path, lambda temporary: _write(temporary, page))


def _names(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"`{row['type']}`" for row in rows)


def _write(path: pathlib.Path, text: str) -> None:
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
