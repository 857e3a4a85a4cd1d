"""One training run: from a recipe to a report."""

from __future__ import annotations

import dataclasses
import gc
import math
import pathlib
from typing import Any

import datasets  # type: ignore[import-untyped]
import torch.distributed as dist
from transformers import PreTrainedModel, ProgressCallback, Trainer, TrainerCallback, set_seed

import ringtile
from ringtile.cli import world
from ringtile.cli.data import digest_files, find_files, load_documents, make_collator, make_rows
from ringtile.cli.doctor import owner_name, versions
from ringtile.cli.meter import DEVICE, Meter
from ringtile.cli.output import check_output_folder
from ringtile.cli.recipe import Recipe, make_arguments, make_encoder, make_model, told_as_ours
from ringtile.config import Config
from ringtile.errors import ConfigError, PeerLostError, RingMismatchError
from ringtile.hf.loss import tile_tokens_of
from ringtile.hf.peers import leave_groups, of_a_collective
from ringtile.hf.trainer import first_batch_of
from ringtile.peak_memory import peak_bytes


class LossBar(ProgressCallback):
    """transformers' progress bar on rank 0, with the time left, the loss, and the speed of all ranks, instead of a line
    for every step."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.training_bar is None or not logs or "loss" not in logs:
            return
        shown = {"loss": f"{logs['loss']:.4f}"}
        alone = self.meter.tokens_per_s() if args.world_size == 1 else None
        if (speed := logs.get("tokens_per_s", alone)) is not None:
            shown["tokens/s"] = f"{speed:.0f}"
        self.training_bar.set_postfix(shown)


class EndWatch(TrainerCallback):
    """From then on the ranks notice in collectives who is lost."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        world.end_watch()


def train(recipe: Recipe) -> dict[str, Any]:
    """Trains, and returns the report of the run, the same on every rank.

    Raises ConfigError for a recipe that cannot run, and whatever the ring raises.
    """
    try:
        report = _train(recipe)
    except Exception as error:
        if dist.is_initialized() and not isinstance(error, PeerLostError):  # with which the ranks have hung up already
            if not of_a_collective(error) and not isinstance(error, RingMismatchError):
                world.fail(error)  # before the others notice that this rank has left, and look for the reason
            leave_groups(error)
        raise
    if dist.is_initialized():
        # Free the model first. The last owner of a process group joins gloo's threads; DDP would join them while it
        # holds the GIL, which such a thread may need to free a tensor (seen to hang with torch 2.13).
        gc.collect()
        dist.destroy_process_group()
    return report


def _train(recipe: Recipe) -> dict[str, Any]:
    files = {key: find_files(getattr(recipe.data, key), f"data.{key}") for key in ("files", "eval_files")}
    data_digest = digest_files(files["files"])
    encoder = make_encoder(recipe)
    args = make_arguments(recipe.training)
    if args.fsdp and args.world_size == 1:
        raise ConfigError("training.fsdp is set for one process; expected torchrun with several, or no fsdp")
    if args.disable_tqdm or args.process_index > 0:
        datasets.disable_progress_bars()
    if args.should_save:
        check_output_folder(pathlib.Path(str(args.output_dir)), "training.output_dir")
    with args.main_process_first(desc="reading the data"):  # the others then read the cache of `datasets`
        rows = {
            key: make_rows(
                load_documents(names, recipe.data.text_column, f"data.{key}"), recipe.data, encoder, f"data.{key}"
            )
            for key, names in files.items()
            if names
        }
    set_seed(args.seed)
    model = make_model(recipe, encoder)
    with told_as_ours("training"):
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=rows["files"],
            eval_dataset=rows.get("eval_files"),
            data_collator=make_collator(encoder.pad_id),
        )
    if args.fsdp and not trainer.is_fsdp_enabled:
        raise ConfigError("training.fsdp is set, but accelerate ignores it on a CPU; expected GPUs")
    meter = Meter(model, args)
    trainer.add_callback(meter)
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(LossBar(meter))
    patches = None
    if recipe.ringtile != Config() or dist.is_initialized():
        logs_metrics = {} if "log_metrics" in recipe.ringtile.model_fields_set else {"log_metrics": True}
        patches = ringtile.enable(trainer, recipe.ringtile.model_copy(update=logs_metrics))
    if dist.is_initialized():
        trainer.add_callback(EndWatch())
    patched = [] if patches is None else [f"{owner_name(owner)}.{name}" for owner, name in patches.entries]
    with told_as_ours("training", has_begun=lambda: meter.has_begun):
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    proof = first_batch_of(trainer)
    if args.save_strategy != "no":
        trainer.save_model()
    report = make_report(recipe, trainer.state.log_history, meter, gather(meter)) | {
        "num_rows": len(rows["files"]),
        "data_digest": data_digest,
        "tile_tokens": tile_tokens(recipe.ringtile, model, meter.batch_tokens),
        "patched": patched,
        "first_batch": None if proof is None else dataclasses.asdict(proof),
    }
    ringtile.restore(trainer)
    return report


def gather(meter: Meter) -> list[dict[str, Any]]:
    """The measurements of every rank, by rank. A collective."""
    mine = {
        "tokens_per_s": meter.tokens_per_s(),
        "moved_bytes": meter.moved_bytes,
        "plan_bytes": meter.plan_bytes,
        "peak_bytes": peak_bytes(DEVICE),
    }
    if not dist.is_initialized():
        return [mine]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def make_report(
    recipe: Recipe, log_history: list[dict[str, Any]], meter: Meter, ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    """The logged and measured numbers; last_plan and batch_tokens are this rank's own, the rest is the same on all."""
    logs = [log for log in log_history if "loss" in log]
    evaluations = [log for log in log_history if "eval_loss" in log]
    return {
        "world_size": len(ranks),
        "data_parallel_size": len(ranks) // recipe.ringtile.context_parallel_size,
        "steps": [log["step"] for log in logs],
        "losses": [log["loss"] for log in logs],
        "grad_norms": [log["grad_norm"] for log in logs],
        "eval_steps": [log["step"] for log in evaluations],
        "eval_losses": [log["eval_loss"] for log in evaluations],
        "tokens_per_s": sum(rank["tokens_per_s"] for rank in ranks),
        "peak_bytes": [rank["peak_bytes"] for rank in ranks],
        "bytes_moved": sum(rank["moved_bytes"] for rank in ranks),
        "plan_bytes": sum(rank["plan_bytes"] for rank in ranks),
        "last_plan": None if meter.last_plan is None else str(meter.last_plan),
        "batch_tokens": meter.batch_tokens,
        "recipe": recipe.mapping(),
        "versions": versions(),
    }


def tile_tokens(config: Config, model: PreTrainedModel, num_tokens: int) -> dict[str, int]:
    """Tokens in a tile of the MLP and of the loss, where they are tiled; num_tokens: of a batch on this rank."""
    found = {}
    if config.tiled_mlp:
        shards = config.tiled_mlp_num_shards
        found["mlp"] = config.tile_tokens if shards is None else math.ceil(num_tokens / shards)
    if config.tiled_loss:
        found["loss"] = tile_tokens_of(config, model.config.vocab_size, model.dtype, model.device)
    return found
