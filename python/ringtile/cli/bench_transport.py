"""`ringtile bench transport`: measures links and kernels, and keeps the rates for the scheme `auto`."""

from __future__ import annotations

import argparse
import os

import torch
from rich.console import Console
from rich.table import Table

from ringtile.bench.measure import machine
from ringtile.bench.transport import Report, measure
from ringtile.cli import Outcome
from ringtile.cli.output import check_output, write_json
from ringtile.errors import ConfigError
from ringtile.transport.rates import cache_path, rates_json

_OPTIONS = ("world_size", "device")  # of those that name what to measure


def run(args: argparse.Namespace) -> Outcome:
    """Prints a table of messages and the rates that follow, and writes these into the user's cache folder."""
    world_size, device = (
        (getattr(args, name) or [default]) for name, default in zip(_OPTIONS, (2, "cpu"), strict=True)
    )
    if len(world_size) > 1 or len(device) > 1 or world_size[0] < 2 or device[0] not in ("cpu", "cuda"):
        raise ConfigError(
            f"--world-size is {world_size}, --device {device}; expected one number, at least 2, and cpu or cuda"
        )
    if device[0] == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no GPU; expected cpu, or a machine with GPUs")
    path = cache_path(device[0])
    check_output(path, "the cache of rates")
    if "RANK" not in os.environ:
        torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // world_size[0]))
    elif args.threads:
        torch.set_num_threads(args.threads)
    report = measure(world_size[0], args.repeats, device[0])
    if report is None:
        return Outcome(0, {})
    write_json(path, rates_json(report.rates))
    if os.environ.get("RANK", "0") == "0":
        print_report(report)
        print(f"kept for the scheme auto in {path}")
    return Outcome(0, {"machine": machine(device[0]), "rates": rates_json(report.rates), "rows": report.rows})


def print_report(report: Report) -> None:
    """A line for each link and size, and the rates."""
    console = Console()
    table = Table("link", "carrier", box=None, padding=(0, 1))
    for column in ("KiB", "us", "GB/s each way"):
        table.add_column(column, justify="right")
    for row in sorted(report.rows, key=lambda row: (row["link"], row["carrier"], row["num_bytes"])):
        numbers = f"{row['num_bytes'] >> 10}", f"{row['seconds'] * 1e6:.1f}", f"{row['bytes_per_s'] / 1e9:.3f}"
        table.add_row(row["link"], row["carrier"], *numbers)
    console.print(table)
    rates = report.rates
    for name, link in (("within a host", rates.within), ("between hosts", rates.between)):
        if link is not None:
            speed = f"{link.latency_s * 1e6:.1f} us a message, {link.bytes_per_s / 1e9:.3f} GB/s each way"
            speed += f", {link.host_bytes_per_s / 1e9:.3f} of a host" if link.host_bytes_per_s else ""
            print(f"{name}: {speed}, kernels run in {link.overlap:.0%} of the time")
    message = f"a message: {rates.message_s * 1e6:.0f} us of a rank at either end"
    print(f"{message}; copies: {rates.copy_bytes_per_s / 1e9:.1f} GB/s")
    for dtype, kernel in rates.kernels.items():
        print(
            f"attention, {dtype}: {kernel.forward_flops_per_s / 1e9:.1f} GFLOP/s forward, "
            f"{kernel.backward_flops_per_s / 1e9:.1f} backward, {kernel.call_s * 1e6:.0f} us a call"
        )
