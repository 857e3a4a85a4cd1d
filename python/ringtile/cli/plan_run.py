"""`ringtile plan RUN.yaml`: what the file of `ringtile train` says of a training, for the planner."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from ringtile.errors import ConfigError
from ringtile.planner.optimizers import OPTIMIZERS
from ringtile.planner.sizes import parse_bytes, parse_tokens
from ringtile.scheme import Scheme

MEMORY_OF_A_RUN = "80GiB"  # an H100's, where none is given
# Options that the file says, and what they are when they are not given.
_SAID = {
    **dict.fromkeys(("model", "context_parallel_size", "tile_tokens", "dtype"), None),
    **dict.fromkeys(("gradient_checkpointing", "activation_offloading", "bf16"), False),
    **dict.fromkeys(("tiled_mlp", "tiled_norm", "tiled_loss", "stream"), False),
    **{"completion_tokens": None, "generation_rows": None, "reference_model": False},  # of a GRPO step: no file's
    **{"images": None, "image_size": None, "expert_parallel_size": 1},  # nor of images, or experts over ranks
    **{"engine": "ddp", "layout": "auto", "scheme": "ring", "batch": 1},
    **{"optimizer": "adamw", "offload_optimizer": False},
}
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # since transformers 5.23, and before
# Values of training.optim, and what they are for the planner.
_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adamw"),
    **{"adamw_bnb_8bit": "adamw_8bit"},
    **{name: name for name in OPTIMIZERS if name != "adamw"},
}


def setup_of(args: argparse.Namespace) -> tuple[Any, int]:
    """Return the planner's Setup and the tokens of a row. ConfigError."""
    from transformers import TrainingArguments

    from ringtile.cli.data import make_encoder
    from ringtile.cli.model_config import make_config
    from ringtile.cli.recipe import Recipe
    from ringtile.planner.setup import Setup

    for name, default in _SAID.items():
        if getattr(args, name) != default:
            raise ConfigError(
                f"--{name.replace('_', '-')} is given beside {args.run}, which says it; expected one of the two: "
                f"change the file, or leave it out"
            )
    recipe = Recipe.load(args.run, changes=args.set)
    training, keys = recipe.training, recipe.ringtile
    seq_len = recipe.data.seq_len if args.seq_len is None else parse_tokens(args.seq_len)
    vocab_size = 0 if "name" in recipe.model else make_encoder(recipe).vocab_size  # a name needs no tokenizer here
    config = make_config(recipe.model, seq_len, vocab_size)
    devices = keys.context_parallel_size if args.devices is None else args.devices
    if devices < 1 or devices % keys.context_parallel_size:
        raise ConfigError(
            f"--devices is {devices}; expected a multiple of {keys.context_parallel_size}, the file's "
            f"context_parallel_size"
        )
    fsdp = _fsdp_of(training)
    zero = _zero_of(training)
    engine = _engine_of(training, fsdp, zero)
    checkpointed, offloaded = _checkpointing_of(training)
    if offloaded and not keys.activation_offloading:
        print(
            "note: activation_checkpointing_kwargs has offload; planned as activation_offloading, which moves the same"
        )
        keys = keys.changed(activation_offloading=True)
    optimizer = str(getattr(training.get("optim"), "value", training.get("optim") or "adamw_torch"))
    if optimizer not in _OPTIMIZERS:
        print(f"note: training.optim is {optimizer}; the plan counts AdamW's state, 8 bytes a parameter")
    if training.get("use_liger_kernel"):
        print(
            "note: training.use_liger_kernel is not planned: norms, GLUs and loss are those of transformers, or tiled"
        )
    if not Scheme.parse(keys.context_parallel_scheme).is_resolved:
        print(f"note: context_parallel_scheme {keys.context_parallel_scheme} is chosen by ranks; planned as ring")
        keys = keys.changed(context_parallel_scheme="ring")
    setup = Setup(
        config,
        devices=devices,
        engine=engine,
        ringtile=keys,
        batch=training.get("per_device_train_batch_size", TrainingArguments.per_device_train_batch_size),
        gradient_checkpointing=checkpointed or bool(engine == "fsdp2" and fsdp.get("activation_checkpointing")),
        dtype=getattr(config, "dtype", None) or torch.float32,
        bf16=bool(training.get("bf16")),
        on_gpu=args.device != "cpu",
        memory_bytes=parse_bytes(args.memory or MEMORY_OF_A_RUN),
        lora_rank=args.lora_rank,
        load_in_4bit=args.load_in_4bit,
        optimizer=_OPTIMIZERS.get(optimizer, "adamw"),
        offload_optimizer=_offloads(zero, "offload_optimizer"),
    )
    return setup, seq_len


def _checkpointing_of(training: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether layers are checkpointed, and what they save moved to the host, under either name. ConfigError."""
    name = next((name for name in _CHECKPOINTING if training.get(name) is not None), _CHECKPOINTING[0])
    settings = next((x for x in _CHECKPOINTING if training.get(f"{x}_kwargs") is not None), name)
    kwargs = _mapping_of(training, f"{settings}_kwargs")
    every = kwargs.get("every_n_layers", 1)
    if training.get(name) and every != 1:
        raise ConfigError(
            f"training.{settings}_kwargs: every_n_layers is {every!r:.40}, which is not planned; expected 1: all layers"
        )
    return bool(training.get(name)), bool(training.get(name) and kwargs.get("offload"))


def _engine_of(training: Mapping[str, Any], fsdp: Mapping[str, Any], zero: Mapping[str, Any]) -> str:
    """Who shards weights and their state. ConfigError: what the planner does not know."""
    if training.get("fsdp"):
        version = fsdp.get("version", 2)
        if str(version) != "2":
            raise ConfigError(
                f"training.fsdp_config: version is {version!r:.40}; expected 2: ringtile trains under no other FSDP"
            )
        return "fsdp2"
    if _offloads(zero, "offload_param"):
        print("note: training.deepspeed has offload_param, which is not planned: the weights are counted on the device")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"training.deepspeed: zero_optimization.stage is {stage!r:.40}; expected 0 to 3")
    return f"zero{stage}" if stage else "ddp"


def _zero_of(training: Mapping[str, Any]) -> Mapping[str, Any]:
    zero = _mapping_of(training, "deepspeed").get("zero_optimization")
    return zero if isinstance(zero, Mapping) else {}


def _offloads(zero: Mapping[str, Any], key: str) -> bool:
    held = zero.get(key)
    return isinstance(held, Mapping) and held.get("device", "none") != "none"


def _fsdp_of(training: Mapping[str, Any]) -> dict[str, Any]:
    """training.fsdp_config without the prefix fsdp_ that its keys may have."""
    return {str(key).removeprefix("fsdp_"): value for key, value in _mapping_of(training, "fsdp_config").items()}


def _mapping_of(training: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a mapping of the file, or of the JSON file that it names; empty without one. ConfigError."""
    given = training.get(key) or {}
    if isinstance(given, str):
        try:
            given = json.loads(pathlib.Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"training.{key} is {given}, which cannot be read ({error}); expected JSON") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"training.{key} is {given!r:.80}; expected a mapping, or the path of a JSON file with one")
    return given
