"""Golden file of trainings: what each row of the tables of tests/hf trains, bit for bit, before a change and after it.

python tests/hf/golden_trainings.py record FILE [--long] [--only WORDS] [--part I/N]
python tests/hf/golden_trainings.py check FILE    after each step: 1 if anything differs

FILE has a line of JSON for each row: its table and name, and what each rank got: digests of losses, norms, weights and
all else that `hf_training.Run` holds, or the kind of the error. A row that the tables no longer hold is listed too.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parents[1]
sys.path[1:1] = [str(path) for path in (TESTS.parent, TESTS, *sorted(TESTS.iterdir())) if path.is_dir()]

from cells import Cell, Refusal, fail, train_cell  # noqa: E402
from golden import header  # noqa: E402
from hf_training import Run  # noqa: E402
from pool import Pool, start_server  # noqa: E402

Row = tuple[str, str, str]  # the module, its table, the row


def tables(words: str) -> dict[Row, Any]:
    """All rows, in the order of the files, whose packages are installed and whose names hold the words."""
    found = {}
    for path in sorted(path for path in TESTS.glob("hf/test_*.py") if " = table(" in path.read_text()):
        for name, rows in list(vars(importlib.import_module(path.stem)).items()):
            for what, row in rows.items() if name.isupper() and isinstance(rows, dict) else ():
                if isinstance(row, Cell | Refusal) and words in f"{path.stem} {name} {what}":
                    packages = row.packages() if isinstance(row, Cell) else row.needs
                    if all(importlib.util.find_spec(package) for package in packages):
                        found[path.stem, name, what] = row
    return found


def results(at: Row, row: Any) -> list[dict[str, str]]:
    """What each rank gets."""
    size, call = (row.world, (train_cell, at[0], at[2], False)) if isinstance(row, Cell) else (2, (fail, *at))
    pool = Pool(
        1 if at[1] == "ENABLE" else size
    )  # of its own: bits may depend on where tensors lie, on what ran before
    try:
        return pool.run(_found, *call, timeout=200.0)
    except Exception as error:  # a rank has died, or does not answer
        return [{"error": type(error).__name__}]
    finally:
        pool.close()


def _found(function: Any, *args: Any) -> dict[str, str]:
    torch.set_num_threads(1)
    try:
        found = function(*args)
    except BaseException as error:  # also what pytest raises where nothing was refused
        return {"error": type(error).__name__}
    if not isinstance(found, Run):  # "RefusedError: why"
        return {"error": str(found).partition(":")[0]}
    return {field.name: _digest(getattr(found, field.name)) for field in dataclasses.fields(found)}


def _digest(value: Any) -> str:
    """Numbers as they are; tensors, and whatever is long, by a hash of their bits."""
    if isinstance(value, torch.Tensor):
        bits = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode() + bits).hexdigest()[:16]
    if isinstance(value, dict):
        value = {name: _digest(each) for name, each in sorted(value.items())}
    text = repr(value)
    return text if len(text) < 100 else hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(path: Path, words: str) -> Iterator[str]:
    rows = tables(words)
    with path.open() as file:
        made = json.loads(next(file))
        if made != header():
            raise SystemExit(f"{path} was made with {made}; here is {header()}")
        for at, ranks in ((tuple(each["row"]), each["ranks"]) for each in map(json.loads, file)):
            if at not in rows and words in " ".join(at):
                yield f"{' '.join(at)}: is no longer there"
            for rank, (old, new) in enumerate(zip(ranks, results(at, rows[at]) if at in rows else (), strict=False)):
                names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
                if names:
                    changed = "; ".join(f"{name} {old.get(name)} -> {new.get(name)}" for name in names)
                    yield f"{' '.join(at)}, rank {rank}: {changed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--long", action="store_true", help="the long rows too")
    parser.add_argument("--only", default="", metavar="WORDS", help="rows whose table or name holds them")
    parser.add_argument("--part", default="0/1", metavar="I/N", help="each N-th row, from the I-th on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start_server()
    found = 0
    if args.what == "record":
        index, of = map(int, args.part.split("/"))
        rows = [each for each in tables(args.only).items() if args.long or not each[1].long][index::of]
        with args.file.open("w") as file:
            print(json.dumps(header()), file=file)
            for at, row in rows:
                print(json.dumps({"row": at, "ranks": results(at, row)}), file=file, flush=True)
    else:
        for text in differences(args.file, args.only):
            print(text[:600], flush=True)
            found += 1
        print(f"{found} differences")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
