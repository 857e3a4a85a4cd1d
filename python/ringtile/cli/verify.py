"""`ringtile verify CONFIG.yaml`: proves on this machine, for this model, that n ranks compute the same as one.

torchrun --standalone --nproc-per-node 2 -m ringtile verify run.yaml
torchrun --standalone --nproc-per-node 2 -m ringtile verify --bits run.yaml    with `reproducible: true`: the same bits

Reads the same file as `ringtile train`. Without `data`, it trains on text that ships with ringtile.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import Any

import datasets  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer, set_seed

import ringtile
from ringtile.cli import SET, Outcome
from ringtile.cli.data import Encoder, make_collator, make_encoder
from ringtile.cli.environment import rank
from ringtile.cli.output import table
from ringtile.cli.proofs import LIMITS, first_difference, max_rel_diff, prove_ops
from ringtile.cli.recipe import Recipe, check_same, make_arguments
from ringtile.cli.train import make_model, read_rows, train, train_alone
from ringtile.errors import PAGES, ConfigError, refusing
from ringtile.hf.batch import active_batch
from ringtile.hf.features.stream import find_layers
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
    "logging_strategy": "steps",
    "logging_steps": 1,
    "save_strategy": "no",
    "eval_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG.yaml", type=pathlib.Path, help=f"as for train: {PAGES}docs/guide/train.md"
    )
    parser.add_argument("--set", **SET)
    parser.add_argument("--bits", action="store_true", help="compare the bits of a forward alone, under reproducible")


def run(args: argparse.Namespace) -> Outcome:
    """Checks the ops, then trains on all ranks and in one process; rank 0 prints a table. Status 1: a check failed."""
    recipe = Recipe.load(args.config, default_data=default_data(), changes=args.set)
    data = recipe.data.changed(eval_files=[])
    recipe = dataclasses.replace(recipe, training=recipe.training | TRAINING, data=data)
    arguments = make_arguments(recipe.training)
    check_same(recipe)
    if args.bits:
        return compare_bits(recipe, arguments)
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


def compare_bits(recipe: Recipe, arguments: Any) -> Outcome:
    """Compare a forward of the first batch on the ranks of a group with one on each rank alone, bit for bit: every
    layer's output, and the loss. Status 1: one differs. ConfigError."""
    config, encoder = recipe.ringtile, make_encoder(recipe)
    if not config.reproducible or config.context_parallel_size == 1:
        raise ConfigError(
            f"verify --bits: reproducible is {str(config.reproducible).lower()} and context_parallel_size "
            f"{config.context_parallel_size}; expected true and at least 2: without, bits are those of some ranks"
        )
    datasets.disable_progress_bars()
    with arguments.main_process_first(desc="reading the data"):
        rows = read_rows(recipe, encoder, "files")
    batch = [rows[i] for i in range(min(len(rows), arguments.per_device_train_batch_size))]
    ranks, one = (
        tensors_of_forward(recipe, encoder, arguments, batch, size) for size in (config.context_parallel_size, 1)
    )
    different = {name: text for name, x in ranks.items() if (text := first_difference(x, one[name]))}
    everywhere: list[Any] = [different] * arguments.world_size
    dist.all_gather_object(everywhere, different)
    different = next((found for found in everywhere if found), {})
    if rank() == 0:
        shown = [(name, different.get(name, "the same bits")) for name in ranks]
        print(table(f"ringtile verify --bits: {config.context_parallel_size} ranks against one", shown, ("", "")))
        print(f"verdict: {'NOT ' if different else ''}the same bits")
    return Outcome(int(bool(different)), {"verified": not different, "rows": list(ranks), "different": different})


def tensors_of_forward(
    recipe: Recipe, encoder: Encoder, arguments: Any, rows: list[Any], size: int
) -> dict[str, Tensor]:
    """Return the output (B, S, E) of each layer, and the loss (), for rows on `size` ranks without an engine."""
    with refusing("training.seed"):
        set_seed(arguments.seed)
    model, collate, found = make_model(recipe, encoder), make_collator(encoder.end), dict[str, Tensor]()

    def record(name: str, output: Any) -> None:
        batch = active_batch()
        assert batch is not None
        found[name] = batch.unshard(output[0] if isinstance(output, tuple) else output)

    for name, layer in find_layers(model).items():
        layer.register_forward_hook(lambda module, args, output, name=name: record(name, output))
    trainer: Any = Trainer(model, arguments, collate)
    keys = recipe.ringtile.given | {"context_parallel_size": size, "first_batch_check": False}
    ringtile.enable(trainer, keys)
    with torch.no_grad(), trainer.accelerator.autocast():
        found["loss"] = trainer.compute_loss(trainer.model.eval(), trainer._prepare_inputs(collate(rows)))
    ringtile.restore(trainer)
    return found


def default_data() -> dict[str, Any]:
    """Return the `data` section for a file without one: ringtile's own source, tokenized as bytes."""
    folder = pathlib.Path(ringtile.__file__).parent
    return {"files": [str(folder / "**" / "*.py")], "seq_len": DEFAULT_SEQ_LEN, "tokenizer": "bytes"}


def verdict(proofs: list[dict[str, Any]], report: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of the table, and whether all of them hold."""
    names = {"losses": "loss", "grad_norms": "gradient norm"}
    rows = [*proofs, *_of_first_batch(report["first_batch"])]
    for key, limit in LIMITS.items():
        single = report[f"{key}_single"]
        name, difference = f"{names[key]} of {len(single)} training steps", max_rel_diff(report[key], single)
        rows.append({"name": name, "difference": difference, "limit": limit})
    return {**report, "verified": all(row["difference"] <= row["limit"] for row in rows), "rows": rows}


def _of_first_batch(found: dict[str, float] | None) -> list[dict[str, Any]]:
    """Return the rows of the check of the first batch: differences over those that rounding makes."""
    from ringtile.first_batch.trace import TIMES

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
