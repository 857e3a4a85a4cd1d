"""Run the campaigns and print one table: `python -m faults [--trials N] [--seed N] [MODULE ...]`, from tests/campaigns.

A campaign is a module of this folder with `campaign(trials: int | None, seed: int) -> Counts`; trials None: the number
that takes a minute or two. Exits with 1 if any trial was silent, unnamed, hung or crashed, or if there was none.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pkgutil
import subprocess
import sys
import time
from pathlib import Path

import faults
from faults.counts import Counts

NOT_CAMPAIGNS = {"__main__", "calls", "counts", "processes"}
CAMPAIGNS = Path(__file__).parents[1]
LOGS = CAMPAIGNS.parents[1] / "build/faults"  # what a campaign and its processes print, and its counts
LIMIT_SECONDS = 3 * 3600  # a campaign that takes longer hangs


def main() -> int:
    names = sorted({module.name for module in pkgutil.iter_modules(faults.__path__)} - NOT_CAMPAIGNS)
    parser = argparse.ArgumentParser(prog="python -m faults", description="Hostile trials, counted.")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"one of {', '.join(names)} (all)")
    parser.add_argument("--trials", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the counts of one MODULE to this file and print nothing")
    args = parser.parse_args()
    if args.json is not None:
        (name,) = args.modules
        module = importlib.import_module(f"faults.{name}")
        counts = module.campaign(args.trials, args.seed)
        args.json.write_text(json.dumps(dataclasses.asdict(counts)))
        return 0
    rows = {}
    for name in args.modules or names:
        start = time.monotonic()
        counts = in_a_process(name, args.trials, args.seed)
        rows[name] = {**counts.row(), "seconds": round(time.monotonic() - start)}
        print(f"{name}: {counts.trials} trials, {counts.bugs} bugs", flush=True)
        for note in counts.notes[:20]:
            print(f"  {note}", flush=True)
    print(table(rows))
    return 0 if all(passed(row) for row in rows.values()) else 1


def in_a_process(name: str, trials: int | None, seed: int) -> Counts:
    """A campaign's counts. Campaigns change their process, and may take it with them: that is one crash."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log, result = LOGS / f"{name}.log", LOGS / f"{name}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "faults", name, "--seed", str(seed), "--json", str(result)]
    command += [] if trials is None else ["--trials", str(trials)]
    with log.open("wb") as output:
        try:
            ended = subprocess.run(command, cwd=CAMPAIGNS, stdout=output, stderr=output, timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return Counts(hangs=1, notes=[f"the campaign did not end within {LIMIT_SECONDS} s"])
    if not result.exists():
        said = log.read_text(errors="replace")[-2000:]
        return Counts(crashes=1, notes=[f"the campaign ended with status {ended.returncode}: {said}"])
    return Counts(**json.loads(result.read_text()))


def passed(row: dict[str, int]) -> bool:
    return row["trials"] > 0 and not any(row[name] for name in Counts.BUGS)


def table(rows: dict[str, dict[str, int]]) -> str:
    """The counts by campaign, and their sums."""
    columns = list(next(iter(rows.values())))
    total = {column: sum(row[column] for row in rows.values()) for column in columns}
    lines = ["campaign".ljust(16) + "".join(column.rjust(10) for column in columns)]
    for name, row in [*rows.items(), ("all", total)]:
        cells = "".join(f"{row[column]:>10,}" for column in columns)
        lines.append(name.ljust(16) + cells + ("" if passed(row) else "  FAILED"))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
