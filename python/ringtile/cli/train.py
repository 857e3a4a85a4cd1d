"""`ringtile train CONFIG.yaml`: trains with a Hugging Face Trainer; `--compare` checks the losses against one process.

ringtile train run.yaml                                                one process
torchrun --standalone --nproc-per-node 2 -m ringtile train run.yaml    two ranks
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import datasets  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, get_scheduler, set_seed

import ringtile
from ringtile.cli import SET, Outcome
from ringtile.cli.data import Encoder, load_documents, make_collator, make_encoder, make_rows
from ringtile.cli.doctor import versions
from ringtile.cli.environment import local_world_size, rank, without_torchrun
from ringtile.cli.model_config import make_config
from ringtile.cli.output import table, write_json
from ringtile.cli.proofs import LIMITS, max_rel_diff
from ringtile.cli.recipe import Recipe, check_same, make_arguments
from ringtile.errors import PAGES, ConfigError, RingtileError, refusing
from ringtile.hf.trainer import first_batch_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG.yaml", type=pathlib.Path, help=f"every key: {PAGES}docs/guide/train.md"
    )
    parser.add_argument("--set", **SET)
    parser.add_argument("--compare", action="store_true", help="repeat it in one process; status 1 unless losses agree")


def run(args: argparse.Namespace) -> Outcome:
    """Trains; with --compare, rank 0 trains once more alone, and prints both losses."""
    recipe = Recipe.load(args.config, changes=args.set)
    report = train(recipe)
    if rank() > 0 or not args.compare:
        return Outcome(0, report)
    report |= train_alone(recipe, report["data_parallel_size"])
    curve = [*zip(report["steps"], report["losses"], report["losses_single"], strict=False)]
    shown = [(str(n), f"{a:.7f}", f"{b:.7f}") for n, a, b in curve[:: min(-1, -len(curve) // 10)][::-1]]
    print(table("loss", shown, ("step", f"{report['world_size']} ranks", "one process"), right=True))
    report["differences"] = {key: max_rel_diff(report[key], report[f"{key}_single"]) for key in LIMITS}
    for key, difference in report["differences"].items():
        print(f"largest relative difference of {key}: {difference:.1e}, allowed {LIMITS[key]:.0e}")
    return Outcome(int(not all(report["differences"][key] <= LIMITS[key] for key in LIMITS)), report)  # NaN fails too


def make_model(recipe: Recipe, encoder: Encoder) -> PreTrainedModel:
    config, name = make_config(recipe.model, recipe.data.seq_len, encoder.vocab_size), recipe.model.get("name")
    with refusing("model"):
        auto = AutoModelForCausalLM
        return auto.from_pretrained(name, config=config) if name else auto.from_config(config)  # type: ignore[no-untyped-call]


def read_rows(recipe: Recipe, encoder: Encoder, key: str) -> Any:
    """Return the rows of data.files or data.eval_files."""
    documents = load_documents(getattr(recipe.data, key), recipe.data.text_column, f"data.{key}")
    return make_rows(documents, recipe, encoder, f"data.{key}")


def train(recipe: Recipe) -> dict[str, Any]:
    """Trains, and returns the report of the run, the same on every rank. ConfigError: the recipe cannot run."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    args = make_arguments(recipe.training)
    check_same(recipe)
    encoder, rows = make_encoder(recipe), {}
    datasets.disable_progress_bars()
    with args.main_process_first(desc="reading the data"):  # the others then read the cache of `datasets`
        for key in ("files", "eval_files"):
            if getattr(recipe.data, key):
                rows[key] = read_rows(recipe, encoder, key)
    with refusing("training.seed"):
        set_seed(args.seed)
    model = make_model(recipe, encoder)
    with refusing("training.lr_scheduler_kwargs"):  # the Trainer finds out when it trains
        optimizer, steps = torch.optim.SGD([torch.zeros(1)]), (args.get_warmup_steps(1), 1)
        options: Any = args.lr_scheduler_kwargs
        get_scheduler(args.lr_scheduler_type, optimizer, *steps, options)
    with refusing("training"):
        trainer = Trainer(model, args, make_collator(encoder.end), rows["files"], rows.get("eval_files"))
    if args.fsdp and not trainer.is_fsdp_enabled:
        raise ConfigError("training.fsdp is set, but accelerate ignores it on a CPU; expected GPUs")
    if recipe.ringtile != ringtile.Config() or args.world_size > 1:
        trainer.add_callback(ringtile.CollectGarbageCallback())
        ringtile.enable(trainer, recipe.ringtile)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if args.save_strategy != "no":
        trainer.save_model()
    proof, history = first_batch_of(trainer), trainer.state.log_history
    ringtile.restore(trainer)
    del trainer, model
    gc.collect()  # the last owner of a process group joins gloo's threads, one of which may need the GIL for a tensor
    if dist.is_initialized():
        dist.destroy_process_group()
    logs = [log for log in history if "loss" in log]
    size = 1 if recipe.ringtile.dynamic_context_parallel else recipe.ringtile.context_parallel_size
    return {
        "world_size": args.world_size,
        "data_parallel_size": args.world_size // size,
        "steps": [log["step"] for log in logs],
        "losses": [log["loss"] for log in logs],
        "grad_norms": [log["grad_norm"] for log in logs],
        "log_history": history,
        "first_batch": None if proof is None else dataclasses.asdict(proof),
        "recipe": recipe.mapping(),
        "versions": versions(),
    }


def train_alone(recipe: Recipe, data_parallel_size: int) -> dict[str, Any]:
    """Return the report of the same training in one separate process, with the threads of all ranks of this machine."""
    environment = without_torchrun()
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads() * local_world_size())
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve each other on a busy machine
    with tempfile.TemporaryDirectory() as folder:
        config, result = pathlib.Path(folder, "single.yaml"), pathlib.Path(folder, "single.json")
        write_json(config, recipe.alone(data_parallel_size, folder).mapping())  # JSON is YAML
        command = [sys.executable, "-m", "ringtile", "train", str(config), "--json", str(result)]
        if status := subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode:
            raise RingtileError(f"the run in one process ended with status {status}; see its error above")
        report = json.loads(result.read_text())
    return {f"{key}_single": report[key] for key in LIMITS}
