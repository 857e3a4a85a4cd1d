"""`ringtile train CONFIG.yaml`: trains with a Hugging Face Trainer; `--compare` checks the losses against one process.

ringtile train run.yaml                                                one process
torchrun --standalone --nproc-per-node 2 -m ringtile train run.yaml    two ranks
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import torch

from ringtile.cli import Outcome, world
from ringtile.cli.environment import local_world_size, rank, without_torchrun
from ringtile.cli.output import check_output, write_json
from ringtile.errors import ConfigError, RingtileError

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml", type=pathlib.Path, help="every key: docs/guide/train.md")
    parser.add_argument("--plot", metavar="FILE", type=pathlib.Path, help="plot the losses into FILE (loss.png)")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="then repeat it in one process without ringtile; status 1 unless losses and gradient norms agree",
    )


def run(args: argparse.Namespace) -> Outcome:
    """Trains; rank 0 compares, plots and prints."""
    from ringtile.cli.recipe import Recipe
    from ringtile.cli.report import compare, plot_losses, print_summary
    from ringtile.cli.training import train

    if args.plot and rank() == 0:
        if args.plot.suffix not in PLOT_SUFFIXES:
            raise ConfigError(f"--plot is {args.plot}; expected a file name ending in {', '.join(PLOT_SUFFIXES)}")
        check_output(args.plot, "--plot")
    recipe = world.alike(lambda: Recipe.load(args.config))
    report = train(recipe)
    failures: list[str] = []
    if rank() == 0:
        if args.compare:
            failures = compare(report, train_alone(recipe, report["data_parallel_size"]))
        if args.plot:
            plot_losses(args.plot, report)
        print_summary(report)
        for failure in failures:
            print(f"ringtile: comparison failed: {failure}", file=sys.stderr)
    return Outcome(int(bool(failures)), report)


def train_alone(recipe: Any, data_parallel_size: int) -> dict[str, Any]:
    """The report of the same training in one separate process, with the threads of all ranks of this machine."""
    environment = without_torchrun()
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads() * local_world_size())
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve each other on a busy machine
    with tempfile.TemporaryDirectory() as folder:
        config, result = pathlib.Path(folder, "single.yaml"), pathlib.Path(folder, "single.json")
        write_json(config, recipe.alone(data_parallel_size, folder).mapping())  # JSON is YAML
        command = [sys.executable, "-m", "ringtile", "train", str(config), "--json", str(result)]
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise RingtileError(
                f"the run in one process, to compare with, ended with status {done.returncode}; see its error above"
            )
        report: dict[str, Any] = json.loads(result.read_text())
    return report
