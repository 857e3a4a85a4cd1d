"""`python -m benchmarks`: how fast this machine runs ringtile, and what else is installed, on the same work."""

from __future__ import annotations

import argparse
import importlib
import itertools
import logging
import os
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from ringtile.cli import Outcome
from ringtile.cli.output import check_output, table, write_output
from ringtile.errors import ConfigError
from ringtile.planner.sizes import parse_tokens

from benchmarks.measure import MAX_WAITED, PASSES, copy_bytes_per_s, machine
from benchmarks.peak import on_tiles
from benchmarks.rows import DTYPES, Comparison, Measured, Row
from tools import command

SUBJECTS = {
    "attention": "the kernels, in one process",
    "ring": "the ring, over processes of this machine",
    "mlp": "a gated MLP, in one process",
    "loss": "output projection and cross entropy, in one process",
    "scan": "recurrences (gated delta rule, KDA, SSD, selective scan) and their convolution, in one process",
    "tree": "a prompt, half of the tokens, and its completions, as a tree and as rows, in one process",
}
CHOICES: dict[str, tuple[type, str]] = {
    "case": (
        str,
        "attention, ring: full, causal, padding, window-TOKENS, documents-COUNT; mlp: mlp, checkpointed; "
        "loss: full, half-ignored; scan, tree: delta, kda, ssd, selective, convolution; tree: attention",
    ),
    "dtype": (str, "of tensors and weights"),
    "seq_len": (str, "tokens: 4096, 32K or 1M (binary: 1K is 1024)"),
    "head_dim": (int, "attention, ring, scan: size of a head"),
    "num_heads": (int, "attention, ring: query heads; scan: heads"),
    "num_kv_heads": (int, "attention, ring: key and value heads; scan: those of q and k"),
    "world_size": (int, "ring: ranks"),
    "scheme": (str, "ring: ring, all_gather, ulysses, usp:M, of the backend ringtile"),
    "device": (str, "cpu, cuda"),
    "hidden_size": (int, "mlp, loss: width of a token"),
    "intermediate_size": (int, "mlp: width inside"),
    "vocab_size": (int, "loss: classes"),
    "num_tiles": (int, "mlp, loss: tiles of tokens"),
    "num_completions": (int, "tree: completions that share the prompt"),
}
LETTERS = {
    "seq_len": "S",
    "num_heads": "H",
    "num_kv_heads": "G",
    "head_dim": "D",
    "hidden_size": "E",
    "intermediate_size": "F",
    "vocab_size": "V",
    "num_tiles": "tiles",
    "num_completions": "n",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table for each workload once it is measured. Status 1 if a ring moved other bytes than planned, 2 if
    nothing could be measured as asked, with one line that says why."""
    return command.main("benchmarks", __doc__, add_arguments, measure, arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    summary = "; ".join(f"{name}: {text}" for name, text in SUBJECTS.items())
    parser.add_argument("subject", choices=SUBJECTS, help=summary)
    parser.add_argument("--quick", action="store_true", help="what docs/guide/performance.md quotes, in a few minutes")
    parser.add_argument("--repeats", type=int, default=7, metavar="COUNT", help="samples of each, taken in turn (7)")
    parser.add_argument("--threads", type=int, metavar="COUNT", help="of a process (all cores; in a ring its share)")
    parser.add_argument("--memory", action="store_true", help="attention: measure memory too (mlp and loss always do)")
    parser.add_argument("--plot", metavar="FILE", type=pathlib.Path, help="write a roofline picture to FILE")
    parser.add_argument("--backend", action="append", metavar="NAME", help="who computes (all); may be given again")
    choices = parser.add_argument_group(
        "what to measure; each may be given again; with --quick, which of its workloads"
    )
    for name, (kind, text) in CHOICES.items():
        choices.add_argument(f"--{name.replace('_', '-')}", action="append", type=kind, metavar="VALUE", help=text)


def measure(args: argparse.Namespace) -> Outcome:
    if args.repeats < 1 or (args.threads is not None and args.threads < 1):
        raise ConfigError(f"--repeats is {args.repeats}, --threads {args.threads}; expected at least 1")
    subject = importlib.import_module(f"benchmarks.{args.subject}")
    if args.plot:
        plot_roofline = importlib.import_module("benchmarks.roofline").plot_roofline
        check_output(args.plot, "--plot")
    comparisons = chosen(args, subject)
    for comparison in comparisons:
        subject.check(comparison.workload)
    torch.set_num_threads(
        args.threads or max(1, (os.cpu_count() or 1) // max(c.workload.world_size for c in comparisons))
    )

    device = "cuda" if any(getattr(c.workload, "device", "") == "cuda" for c in comparisons) else "cpu"
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ringtile").setLevel(logging.INFO)  # whom "auto" has chosen
    copied = copy_bytes_per_s(args.repeats, device)
    report: dict[str, Any] = {"machine": machine(device) | {"copy_bytes_per_s": copied}, "rows": []}
    skipped: list[str] = []
    for measured in subject.measure(comparisons, args.repeats):
        report["rows"] += measured.rows
        workload = " ".join(str(value) for value in vars(measured.workload).values())
        skipped += [f"{name}, {workload}: {reason}" for name, reason in measured.skipped.items()]
        if measured.rows:
            print_table(measured)
    if not report["rows"]:
        reasons = "; ".join(skipped) or "no backend that was asked for has these cases"
        raise ConfigError(f"nothing was measured: {reasons}; expected a case that a --backend can compute")
    of_tiles = [row for row in report["rows"] if device == "cpu" and on_tiles(row.get("dtype", ""))]
    peak = peak_of([row for row in report["rows"] if row not in of_tiles] or of_tiles)
    report["machine"] |= {"peak_flops_per_s": peak, "skipped": skipped}
    if of_tiles:
        report["machine"]["tile_flops_per_s"] = peak_of(of_tiles)
    for name, value in report["machine"].items():
        print(f"{name}: {value}")
    if args.plot:
        write_output(
            args.plot, lambda file: plot_roofline(file, report["rows"], peak, report["machine"]["copy_bytes_per_s"])
        )
    wrong = [row for row in report["rows"] if row.get("bytes_moved") != row.get("plan_bytes")]
    for row in wrong:
        print(f"{row['case']}: {row['bytes_moved']} bytes moved, expected {row['plan_bytes']} as planned")
    return Outcome(int(bool(wrong)), report)


def peak_of(rows: list[Row]) -> float:
    """The peak that the rows are fractions of, in flops per second."""
    return float(statistics.median(row["flops"] / row["median_s"] / row["fraction_of_peak"] for row in rows))


def chosen(args: argparse.Namespace, subject: Any) -> list[Comparison]:
    """The comparisons that the options select. ConfigError: there is none, or a backend is unknown."""
    backends = tuple(args.backend or subject.BACKENDS)
    for name in backends:
        if name not in subject.BACKENDS:
            raise ConfigError(f"--backend is {name!r}; expected one of {', '.join(subject.BACKENDS)}")
    given = {name: getattr(args, name) for name in CHOICES if getattr(args, name)}
    if "seq_len" in given:
        given["seq_len"] = [parse_tokens(text) for text in given["seq_len"]]
    for name in given.get("dtype", []):
        if name not in DTYPES:
            raise ConfigError(f"--dtype is {name!r}; expected one of {', '.join(DTYPES)}")
    for name in given:
        if name not in subject.GRID:
            raise ConfigError(
                f"--{name.replace('_', '-')} means nothing for {args.subject}; expected some of "
                f"{', '.join('--' + known.replace('_', '-') for known in subject.GRID)}"
            )
    if args.quick:
        given.setdefault("device", ["cpu"])
        comparisons = [
            Comparison(quick.workload, tuple(name for name in quick.backends if name in backends), quick.memory)
            for quick in subject.quick_comparisons()
            if all(getattr(quick.workload, name, "cpu") in values for name, values in given.items())
        ]
        if not comparisons:
            raise ConfigError(
                f"--quick measures nothing with {given}; expected a choice among its workloads, or no --quick"
            )
        return comparisons
    grid = subject.GRID | given
    workloads = (
        subject.Workload(**dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())
    )
    return [Comparison(workload, backends, args.memory or subject.MEMORY) for workload in workloads]


def print_table(measured: Measured) -> None:
    """One workload, one line per backend. Times with their spread, the fraction of the peak, time over ours."""
    rows = measured.rows
    first = rows[0]
    sizes = " ".join(f"{letter} {first[name]}" for name, letter in LETTERS.items() if name in first)
    where = "GPU" if first.get("device") == "cuda" else f"{first['threads']} threads"
    title = f"{first['case']} {first['dtype']} {sizes}, {where}"
    if first["world_size"] > 1:
        title += f" x {first['world_size']} ranks, {first['scheme']}"
    header = [column for name in PASSES for column in (f"{name}: ms", "of peak", "/ ours")]
    lines = []
    for backend in dict.fromkeys(row["backend"] for row in rows):
        by_pass = {row["pass"]: row for row in rows if row["backend"] == backend}
        last = list(by_pass.values())[-1]
        error = "" if last["max_error"] is None else f"{last['max_error']:.1e}"
        memory = "" if last["peak_bytes"] is None else f"{last['peak_bytes'] / 2**20:.0f}"
        cells = [cell for name in PASSES for cell in pass_cells(by_pass.get(name))]
        lines.append((backend, *cells, error, memory))
    print(table(title, lines, ("backend", *header, "error", "MiB"), right=True).rstrip())
    for backend, reason in measured.skipped.items():
        print(f" {backend}: {reason}")
    waited = max(row["waited"] for row in rows)
    if waited > MAX_WAITED:
        print(f" disturbed: threads waited for a core for {waited:.0%} of a sample; close what else runs")
    for row in rows:
        if "bytes_moved" in row:
            shares = (f"{name} {row[f'{name}_share']:.1%}" for name in ("compute", "wait", "overhead"))
            parts = ", ".join(shares) + "; " if "wait_share" in row else ""
            print(f" {row['scheme']}: {parts}{row['bytes_moved']} bytes moved, {row['plan_bytes']} planned")
    print()


def pass_cells(row: Row | None) -> tuple[str, str, str]:
    """Time and spread, fraction of the peak, and how many times ringtile's time it is."""
    if row is None:
        return "", "", ""
    ratio = row["ratio_to"].get("ringtile")
    time = f"{row['median_s'] * 1e3:.2f} +-{row['spread']:.0%}"
    return time, f"{row['fraction_of_peak']:.3f}", "" if ratio is None else f"{1 / ratio:.2f}"


if __name__ == "__main__":
    sys.exit(main())
