"""`ringtile verify CONFIG.yaml`: proves on this machine, for this model, that n ranks compute the same as one.

torchrun --standalone --nproc-per-node 2 -m ringtile verify run.yaml

Reads the same file as `ringtile train`. Without `data`, it trains on text that ships with ringtile.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import Any

import ringtile
from ringtile.cli import Outcome
from ringtile.cli.data import make_encoder
from ringtile.cli.environment import rank
from ringtile.cli.output import table
from ringtile.cli.proofs import LIMITS, max_rel_diff, prove_ops
from ringtile.cli.recipe import Recipe, check_same, make_arguments
from ringtile.cli.train import make_model, train, train_alone
from ringtile.hf.group import ContextParallelGroup

STEPS = 5
DEFAULT_SEQ_LEN = 512
# Two runs must agree to float32 rounding: no rounding to bf16, no optimizer that divides by small roots, no clipping,
# which would hide a wrong scale.
TRAINING = {
    "max_steps": STEPS,
    "bf16": False,
    "fp16": False,
    "optim": "sgd",
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e9,
    "logging_steps": 1,
    "save_strategy": "no",
    "eval_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml", type=pathlib.Path, help="as for train: docs/guide/train.md")


def run(args: argparse.Namespace) -> Outcome:
    """Checks the ops, then trains on all ranks and in one process; rank 0 prints a table. Status 1: a check failed."""
    recipe = Recipe.load(args.config, default_data=default_data())
    data = recipe.data.model_copy(update={"eval_files": []})
    recipe = dataclasses.replace(recipe, training=recipe.training | TRAINING, data=data)
    arguments = make_arguments(recipe.training)
    check_same(recipe)
    config, group = recipe.ringtile, None
    if config.context_parallel_size > 1:
        group = ContextParallelGroup(config.context_parallel_size, arguments.ddp_timeout, arguments.device)
    model: Any = make_model(recipe, make_encoder(recipe))
    proofs = prove_ops(model.float(), config, group.process_group if group else None)
    del model, group
    report = train(recipe)
    if rank() > 0:
        return Outcome(0, {})
    report |= train_alone(recipe, report["data_parallel_size"])
    outcome = verdict([proof._asdict() for proof in proofs], report)
    print_table(outcome)
    return Outcome(int(not outcome["verified"]), outcome)


def default_data() -> dict[str, Any]:
    """The `data` section for a file without one: ringtile's own source, tokenized as bytes."""
    folder = pathlib.Path(ringtile.__file__).parent
    return {"files": [str(folder / "**" / "*.py")], "seq_len": DEFAULT_SEQ_LEN, "tokenizer": "bytes"}


def verdict(proofs: list[dict[str, Any]], report: dict[str, Any]) -> dict[str, Any]:
    """The rows of the table, and whether all of them hold."""
    names = {"losses": "loss", "grad_norms": "gradient norm"}
    rows = [*proofs, *_of_first_batch(report["first_batch"])]
    for key, limit in LIMITS.items():
        single = report[f"{key}_single"]
        name, difference = f"{names[key]} of {len(single)} training steps", max_rel_diff(report[key], single)
        rows.append({"name": name, "difference": difference, "limit": limit})
    return {**report, "verified": all(row["difference"] <= row["limit"] for row in rows), "rows": rows}


def _of_first_batch(found: dict[str, float] | None) -> list[dict[str, Any]]:
    """The rows of what `hf/first_batch.py` found: differences over those that rounding makes."""
    from ringtile.first_batch.run import TIMES

    names = {"forward": "hidden states", "loss": "loss", "backward": "gradients"}
    return [
        {"name": f"first batch: {name}, in units of rounding", "difference": found[key], "limit": TIMES}
        for key, name in names.items()
        if found is not None
    ]


def print_table(outcome: dict[str, Any]) -> None:
    ranks = f"{outcome['world_size']} ranks ({outcome['data_parallel_size']} data parallel)"
    rows = [
        (
            row["name"],
            f"{row['difference']:.1e}",
            f"{row['limit']:.1e}",
            "equal" if row["difference"] <= row["limit"] else "DIFFERENT",
        )
        for row in outcome["rows"]
    ]
    header = ("", "largest relative difference", "allowed", "")
    print(table(f"ringtile verify: {ranks} against one process, float32", rows, header))
    print("verdict: the same numbers" if outcome["verified"] else "verdict: NOT the same numbers")
