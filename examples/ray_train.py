"""`ringtile train` on the workers of Ray Train: each is one rank.

    python examples/ray_train.py run.yaml --workers 2 --gpus      # every option of ringtile train goes after --

The YAML file and the data must lie under the same paths on every machine. Tested with Ray 2.60.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def work(config: dict[str, Any]) -> None:
    """Runs on each worker. Ray has set the variables of a rank, and made the process group."""
    from ringtile.cli import main

    if status := main(["train", *config["arguments"]]):
        raise SystemExit(f"ringtile train ended with status {status}; see its line in the log of the workers")


def train(arguments: list[str], scaling: ScalingConfig) -> None:
    """arguments: those of `ringtile train`."""
    TorchTrainer(work, train_loop_config={"arguments": arguments}, scaling_config=scaling).fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run `ringtile train` on Ray Train.")
    parser.add_argument("config", metavar="RUN.yaml", type=os.path.abspath)
    parser.add_argument("--workers", type=int, required=True, help="the number of ranks")
    parser.add_argument("--gpus", action="store_true", help="give a GPU to each")
    parser.add_argument("rest", nargs="*", help="options of ringtile train, after --; with absolute paths")
    args = parser.parse_args()
    train([args.config, *args.rest], ScalingConfig(num_workers=args.workers, use_gpu=args.gpus))
