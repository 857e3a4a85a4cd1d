"""Run every case through each backend asked for: a line for each, and the page docs/guide/gauntlet_table.md."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import sys
from collections.abc import Sequence
from typing import Any

from ringtile.cli import Outcome
from ringtile.errors import ConfigError

from tools import command
from tools.gauntlet import attention_cases, judge, training_cases
from tools.gauntlet.attention_cases import AttentionCase
from tools.gauntlet.backends import Backend, backend, backends
from tools.gauntlet.training_cases import TrainingCase
from tools.models.__main__ import replace_table, split_page

BEGIN = "<!-- begin: python -m tools.gauntlet all --markdown -->\n"
FAILED = ("wrong", "hangs", "crashed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line per cell. Status 1: a cell is wrong, hangs or crashes."""
    return command.main("tools.gauntlet", __doc__, add_arguments, run, arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backend", metavar="BACKEND", nargs="+", help="the implementation to judge; or all")
    parser.add_argument("--case", metavar="NAME", action="append", default=[], help="this case only")
    parser.add_argument("--markdown", metavar="FILE", type=pathlib.Path, help="replace the table in this page")


def run(args: argparse.Namespace) -> Outcome:
    names, cases, markdown = args.backend, args.case, args.markdown
    if markdown is not None:
        split_page(markdown, BEGIN)
    known = [case.name for case in attention_cases.CASES] + [case.name for case in training_cases.CASES]
    if unknown := [name for name in cases if name not in known]:
        raise ConfigError(f"--case is {unknown[0]}; expected one of {', '.join(known)}")
    rows = []
    for one in backends().values() if "all" in names else [backend(name) for name in names]:
        print(f"{one.name}: {one.package} {one.version() or 'is not installed: ' + one.install}", flush=True)
        if one.version() is not None:
            rows += _of(one, cases)
    if markdown is not None:
        replace_table(markdown, page(rows), BEGIN)
    return Outcome(int(any(row["verdict"] in FAILED for row in rows)), {"rows": rows})


def _of(one: Backend, cases: list[str]) -> list[dict[str, Any]]:
    rows = []
    judges: list[tuple[Any, Sequence[AttentionCase | TrainingCase]]] = [(judge.Judge(one), attention_cases.CASES)]
    if one.trainer is not None:
        judges.append((judge.TrainingJudge(one), training_cases.CASES))
    for ranks, its_cases in judges:
        try:
            for case in its_cases:
                if not cases or case.name in cases:
                    row = {"backend": one.name, **ranks.judge(case)}
                    rows.append(row)
                    documented = f" ({row['documented']})" if row["documented"] and row["verdict"] in FAILED else ""
                    print(f"  {case.name:26} {row['verdict']:11} {row['words'][:200]}{documented}", flush=True)
        finally:
            ranks.close()
    return rows


# ---- the page -----------------------------------------------------------------------------------


WORDS = 80  # characters of a message that a cell quotes


def page(rows: list[dict[str, Any]]) -> str:
    """The tables of attention and of training, and what was said where a cell is not exact."""
    names = [name for name in backends() if any(row["backend"] == name for row in rows)]
    cells = {(row["backend"], row["case"], row["trains"]): row for row in rows}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, gloo, {judge.RANKS} ranks, no GPU"
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "trl"))
    lines = [f"{today}, {machine}, Python {platform.python_version()}, {packages}.", ""]
    lines += ["| backend | package | what is called |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {backend(name).package} {backend(name).version()} | {backend(name).setup} |" for name in names
    ]
    lines += ["", "| case | " + " | ".join(f"`{name}`" for name in names) + " |", "| --- |" + " --- |" * len(names)]
    for case in attention_cases.CASES:
        lines.append(
            f"| {case.name} | " + " | ".join(_cell(cells.get((name, case.name, False))) for name in names) + " |"
        )
    lines += ["", "| case | what it is | stands for |", "| --- | --- | --- |"]
    lines += [f"| {case.name} | {case.what} | {_link(case.bug, case.source)} |" for case in attention_cases.CASES]
    lines += ["", f"Training, through transformers' Trainer on {training_cases.RANKS} ranks:", ""]
    trainers = [name for name in names if backend(name).trainer is not None]
    lines += ["| case | " + " | ".join(f"`{name}`" for name in trainers) + " | what it is | stands for |"]
    lines += ["| --- |" + " --- |" * len(trainers) + " --- | --- |"]
    for trained in training_cases.CASES:
        its = " | ".join(_cell(cells.get((name, trained.name, True))) for name in trainers)
        lines.append(f"| {trained.name} | {its} | {trained.what} | {_link(trained.bug, trained.source)} |")
    lines += [
        "",
        "Where a cell is neither exact nor `-`:",
        "",
        "| backend | cases | said, or found |",
        "| --- | --- | --- |",
    ]
    said: dict[tuple[str, str, str], list[str]] = {}  # what several backends say alike is one row
    for name in names:
        of: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            if row["backend"] == name and row["verdict"] not in ("exact", "not offered"):
                if row["verdict"] == "wrong" and not (row["trains"] or row["documented"]):
                    continue  # how far it is off is in the table above
                quoted = "" if row["trains"] else row["documented"]  # whole: a quotation
                where = f"{row['case']} (training)" if row["trains"] else row["case"]
                of.setdefault((row["verdict"], quoted or _plain(row["words"])), []).append(where)
        for (kind, words), where_said in of.items():
            said.setdefault((", ".join(where_said), kind, words), []).append(f"`{name}`")
    lines += [f"| {', '.join(by)} | {its_cases} | {kind}: {words} |" for (its_cases, kind, words), by in said.items()]
    return "\n".join([*lines, ""])


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["verdict"] == "not offered":
        return "-"
    if row["verdict"] not in FAILED:
        return str(row["verdict"])
    size = f" {row['difference']:.0e}" if row["verdict"] == "wrong" and "difference" in row else ""
    return f"**{row['verdict']}**" + ("\\*" if row["documented"] else "") + size


def _link(bug: str, source: str) -> str:
    if not source:
        return bug
    owner_and_name, _, number = source.replace("/issues/", "#").replace("/pull/", "#").rpartition("#")
    return f"{bug} ([{owner_and_name.rpartition('/')[2]}#{number}]({attention_cases.ISSUES}{source}))"


def _plain(words: str) -> str:
    """For a cell of a table."""
    words = re.sub(r"(\[127\.0\.0\.1\]):\d+", r"\1", words)  # another port each time
    words = re.sub(r" \(model \w+\)", "", words)
    words = " ".join(words.replace("|", " ").replace("<", " ").replace(">", " ").split())
    return words if len(words) <= WORDS else words[:WORDS].rpartition(" ")[0] + " ..."


if __name__ == "__main__":
    sys.exit(main())
