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
from ringtile.cli import Outcome, world
from ringtile.cli.environment import rank
from ringtile.cli.output import table
from ringtile.errors import RingtileError

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
ENGINE_KEYS = ("fsdp", "fsdp_config", "deepspeed", "parallelism_config")  # not for the run in one process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml", type=pathlib.Path, help="as for train: docs/guide/train.md")


def run(args: argparse.Namespace) -> Outcome:
    """Checks the ops, then trains on all ranks and in one process; rank 0 prints a table. Status 1: a check failed."""
    from ringtile.cli.proofs import prove_ops
    from ringtile.cli.recipe import Recipe, make_arguments, make_encoder, make_model
    from ringtile.cli.report import DATA_CHANGED
    from ringtile.cli.train import train_alone
    from ringtile.cli.training import train
    from ringtile.hf.group import ContextParallelGroup

    recipe = world.alike(lambda: Recipe.load(args.config, default_data=default_data()))
    recipe = dataclasses.replace(
        recipe, training=recipe.training | TRAINING, data=recipe.data.model_copy(update={"eval_files": []})
    )
    arguments = make_arguments(recipe.training)
    config = recipe.ringtile
    group = None
    if config.context_parallel_size > 1:
        group = ContextParallelGroup(config.context_parallel_size, config.timeout_seconds, arguments.device)
    model: Any = make_model(recipe, make_encoder(recipe))
    proofs = prove_ops(model.float(), config, group.process_group if group else None)
    del model, group
    report = train(recipe)
    outcome: dict[str, Any] = {}
    if rank() == 0:
        plain = {key: value for key, value in recipe.training.items() if key not in ENGINE_KEYS}
        single = train_alone(dataclasses.replace(recipe, training=plain), report["data_parallel_size"])
        if single["data_digest"] != report["data_digest"]:
            raise RingtileError(DATA_CHANGED)
        outcome = verdict([proof._asdict() for proof in proofs], report, single)
        print_table(outcome)
    return Outcome(int(rank() == 0 and not outcome["verified"]), outcome)


def default_data() -> dict[str, Any]:
    """The `data` section for a file without one: ringtile's own source, tokenized as bytes."""
    folder = pathlib.Path(ringtile.__file__).parent
    return {"files": [str(folder / "**" / "*.py")], "seq_len": DEFAULT_SEQ_LEN, "tokenizer": "bytes"}


def verdict(proofs: list[dict[str, Any]], report: dict[str, Any], single: dict[str, Any]) -> dict[str, Any]:
    """The rows of the table, and whether all of them hold."""
    from ringtile.cli.report import MAX_REL_GRAD_NORM_DIFF, MAX_REL_LOSS_DIFF, max_rel_diff

    pairs = (("loss", "losses", MAX_REL_LOSS_DIFF), ("gradient norm", "grad_norms", MAX_REL_GRAD_NORM_DIFF))
    rows = [
        *proofs,
        *_of_first_batch(report.get("first_batch")),
        *(
            {
                "name": f"{name} of {len(single[key])} training steps",
                "difference": max_rel_diff(report[key], single[key]),
                "limit": limit,
            }
            for name, key, limit in pairs
        ),
        {
            "name": "bytes sent, against the plan",
            "difference": max_rel_diff([report["bytes_moved"]], [report["plan_bytes"]]),
            "limit": 0.0,
        },
    ]
    return {
        "verified": all(row["difference"] <= row["limit"] for row in rows),
        "world_size": report["world_size"],
        "data_parallel_size": report["data_parallel_size"],
        "rows": rows,
        "losses": report["losses"],
        "losses_single": single["losses"],
        "grad_norms": report["grad_norms"],
        "grad_norms_single": single["grad_norms"],
        "recipe": report["recipe"],
        "versions": report["versions"],
    }


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
