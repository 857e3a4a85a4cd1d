"""Trainers: those whose loss context parallelism knows, and what it refuses before anything is changed."""

from __future__ import annotations

import functools
import logging
import re
import sys
from typing import Any

from transformers import Trainer

from ringtile.errors import RefusedError
from ringtile.hf.group import accelerate_knows_groups
from ringtile.hf.liger import check_liger
from ringtile.hf.model import adapters_of, adds_tokens, base_model, reads_rows
from ringtile.tiled.mlp import sends_tokens

logger = logging.getLogger("ringtile")

# Modules whose compute_loss sums over tokens wherever they are. Any other compute_loss gets full sequences.
SFT, _ORPO = "trl.trainer.sft_trainer", "trl.experimental.orpo.orpo_trainer"
_SUM_OVER_TOKENS = ("transformers.trainer", SFT, "axolotl.core.trainers.base")
# Modules whose compute_loss reads nothing of a model but what it says of each token by itself.
_SHARE_ROWS = {f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo", "dpo", "kto", "reward")}
# Modules whose versions of the other methods work on shards. axolotl's were read, the others tested.
_WORK_ON_SHARDS = {
    *_SUM_OVER_TOKENS,
    *_SHARE_ROWS,
    "trl.trainer.distillation_trainer",
    _ORPO,
    "axolotl.core.trainers.mixins.activation_checkpointing",
    "axolotl.core.trainers.mixins.layer_offloading",
}
_METHODS = (
    *("_prepare_context_parallel_inputs", "_prepare_inputs", "training_step", "prediction_step", "evaluation_loop"),
    *("_get_num_items_in_batch", "_track_num_input_tokens", "get_total_train_batch_size"),
)


def needs_full_sequences(trainer: Trainer) -> bool:
    """Whether the Trainer computes a loss of its own, which may combine tokens in any way, or its model adds tokens, or
    reads whole rows."""
    own = home(trainer, "compute_loss").__module__ not in _SUM_OVER_TOKENS
    whole = adds_tokens(trainer.model) or reads_rows(base_model(trainer.model))
    return own or trainer.compute_loss_func is not None or whole


def shares_rows(trainer: Trainer) -> bool:
    """Whether rows of the Trainer may share tokens. Asked before its compute_loss is replaced."""
    return home(trainer, "compute_loss").__module__ in _SHARE_ROWS


def generates(trainer: Trainer) -> bool:
    """Whether it samples completions as TRL's GRPOTrainer does."""
    return hasattr(trainer, "_generate_single_turn") and hasattr(trainer, "_generate_and_score_completions")


def home(trainer: Trainer, method: str) -> type:
    """The class that defines a method. For a method set on the instance: the type of that function."""
    if method in vars(trainer):
        return type(trainer.__dict__[method])
    return next((cls for cls in type(trainer).__mro__ if method in vars(cls)), Trainer)


def _mesh(trainer: Trainer) -> Any:
    """The DistributedConfig by which transformers has sharded the model while it loaded it; None: it has not."""
    base = base_model(trainer.model)
    return base.config.distributed_config if getattr(base, "_is_distributed_loading_by_transformers", False) else None


def check_experts(trainer: Trainer) -> None:
    """Raises RefusedError where ranks share experts otherwise than was compared with one process: each dispatches its
    own tokens to whole experts. Tiles of them are refused where tiles are (tiled/mlp.py)."""
    mesh = _mesh(trainer)
    if mesh is None or mesh.ep_size == 1:
        return
    assert trainer.model is not None  # base_model has refused it otherwise
    parts = trainer.model.named_modules()
    adapted = [name.partition(".base_layer") for name, part in parts if sends_tokens(part)]
    refused = {
        f"ep_implementation {mesh.ep_implementation!r}": (
            mesh.ep_implementation not in ("auto", "all_to_all"),
            "expected all_to_all, by which each rank dispatches its own tokens",
        ),
        f"tp_size {mesh.tp_size}": (mesh.tp_size > 1, "experts of ranks that hold the same tokens were not compared"),
        f"adapters on {next((name for name, inside, _ in adapted if inside), '')}": (
            any(inside for _, inside, _ in adapted),
            "a rank holds some of these experts, and PEFT's factors are of all; adapt other modules",
        ),
    }
    for setting, (is_set, reason) in refused.items():
        if is_set:
            raise RefusedError(f"ep_size is {mesh.ep_size}, beside {setting}; unset one of the two: {reason}")


def check_trainer(trainer: Trainer) -> None:
    """Raises RefusedError where the Trainer's numbers would differ from those of one process.

    What the first batch shows is not asked here. It does not see these: hooks of axolotl's do not run in it, a model
    that model_init makes later has none of ringtile's, and what tensor parallelism does to gradients comes after the
    backward that it compares.
    """
    tp_size = trainer.get_tp_size()
    mesh = _mesh(trainer)
    refused = {
        "axolotl's own context parallelism": (
            accelerate_knows_groups(trainer.accelerator)
            and any(cls.__module__.startswith("axolotl.") for cls in type(trainer).__mro__),
            "it would shard each shard once more. plugins: [ringtile.hf.axolotl.RingtilePlugin] takes its keys over",
        ),
        "model_init": (trainer.model_init is not None, "it replaces the model after ringtile has prepared it"),
        f"tensor parallelism of size {tp_size}, not by transformers": (
            tp_size > 1 and mesh is None,
            "load the model by from_pretrained(distributed_config=DistributedConfig(tp_size=..., fsdp_size=...))",
        ),
        "pp_size in distributed_config": (
            mesh is not None and mesh.pp_size > 1,
            "pipeline parallelism was not compared with one process",
        ),
        "adapters under tensor parallelism": (
            tp_size > 1 and bool(adapters_of(trainer.model)),
            "transformers averages their gradients as if each rank held all of them",
        ),
    }
    for setting, (is_set, reason) in refused.items():
        if is_set:
            raise RefusedError(f"{type(trainer).__name__} uses {setting}; unset it under context parallelism: {reason}")
    for owner, method in ((home(trainer, method), method) for method in _METHODS):
        if owner.__module__ not in _WORK_ON_SHARDS:
            raise RefusedError(
                f"{owner.__name__}.{method} replaces that of transformers.Trainer; expected Trainer, or TRL's "
                f"SFTTrainer, DPOTrainer, KTOTrainer, ORPOTrainer, RewardTrainer, GRPOTrainer, RLOOTrainer or "
                f"DistillationTrainer, with at most a compute_loss of "
                f"your own: ringtile cannot tell whether another {method} works on shards"
            )
    check_liger(trainer)


# The newest minor releases that `make matrix` has tried; the extra dev of pyproject.toml ends there.
TRIED = {
    **{"torch": (2, 15), "transformers": (5, 24), "accelerate": (1, 15)},
    **{"trl": (1, 16), "peft": (0, 21), "deepspeed": (0, 19)},
}


@functools.cache
def warn_of_untried() -> None:
    """Name the packages, of those imported now, that are newer than the releases ringtile was tried with. Once."""
    versions = {name: str(getattr(sys.modules.get(name), "__version__", "0")) for name in TRIED}
    newer = [
        f"{name} {version} is newer than {TRIED[name][0]}.{TRIED[name][1]}"
        for name, version in versions.items()
        if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) > TRIED[name]
    ]
    if newer:
        logger.warning(
            f"{', '.join(newer)}, the newest release that ringtile was tried with; what it changes may be refused, or "
            "only be seen by the first batch's proof"
        )
