"""Trains 200 steps on packed rows in three ways and writes their losses: python -m tools.pictures.train_packed.

One process, which gets each document as a row of its own; ringtile on two ranks; accelerate's cp_size 2. The rows are
those of the gauntlet's case "packed", in their order.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

from tools.gauntlet import training_cases
from tools.models.workers import Workers

FIGURES = pathlib.Path(__file__).parent / "loss.json"
STEPS = 200
SECONDS = 600.0
WAYS = {"one process": ("", 1), "ringtile, 2 ranks": ("ringtile", 2), "accelerate, cp_size 2": ("accelerate", 2)}


def main() -> None:
    (packed,) = [case for case in training_cases.CASES if case.name == "packed"]
    # At the case's own rate, 0.05, the steps soon grow any rounding to the size of the loss.
    arguments = {"max_steps": STEPS, "train_sampling_strategy": "sequential", "learning_rate": 0.02}
    case = dataclasses.replace(packed, arguments=arguments)
    losses = {}
    for name, (backend, ranks) in WAYS.items():
        workers = Workers(ranks)
        try:
            found = workers.call(training_cases.train, case, backend, seconds=SECONDS)[0]
        finally:
            workers.close()
        if isinstance(found, BaseException):
            raise found
        losses[name] = [round(loss, 7) for loss in found["losses"]]
        print(f"{name}: {losses[name][-1]}", flush=True)
    FIGURES.write_text(json.dumps(losses) + "\n")


if __name__ == "__main__":
    main()
