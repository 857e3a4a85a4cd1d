"""Runs the campaigns: `python -m faults [--trials N] [--seed N] [MODULE ...]`, from tests/.

A campaign is a module of this folder with `campaign(trials: int | None, seed: int) -> Counts`; trials None: the number
that takes a minute or two. Exits with 1 if any trial was silent, unnamed, hung or crashed.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time

import faults

NOT_CAMPAIGNS = {"__main__", "counts"}


def main() -> int:
    names = sorted({module.name for module in pkgutil.iter_modules(faults.__path__)} - NOT_CAMPAIGNS)
    parser = argparse.ArgumentParser(prog="python -m faults", description="Hostile trials, counted.")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"one of {', '.join(names)} (all)")
    parser.add_argument("--trials", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bugs = 0
    for name in args.modules or names:
        start = time.monotonic()
        counts = importlib.import_module(f"faults.{name}").campaign(args.trials, args.seed)
        row = "  ".join(f"{key} {value}" for key, value in counts.row().items())
        print(f"{name}: {row}  ({time.monotonic() - start:.0f} s)", flush=True)
        for note in counts.notes[:20]:
            print(f"  {note}", flush=True)
        bugs += counts.bugs
    return 1 if bugs else 0


if __name__ == "__main__":
    sys.exit(main())
