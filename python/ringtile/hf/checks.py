"""Refusals: Trainers and models that context parallelism cannot run exactly, named before anything is changed."""

from __future__ import annotations

import functools
import inspect
import logging
import shlex
import sys
from collections.abc import Callable
from typing import Any

import accelerate
import torch
import transformers
from packaging.requirements import Requirement
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, Trainer, masking_utils
from transformers.integrations import sdpa_attention

from ringtile.config import Config
from ringtile.errors import EXTRAS, ConfigError, RefusedError
from ringtile.hf.batch import CHECKPOINTING
from ringtile.hf.families import WHOLE_SEQUENCES
from ringtile.hf.group import parallelism_of
from ringtile.hf.layers import RECURRENT_TYPES, known_types, mixers, num_layers
from ringtile.hf.liger import check_liger
from ringtile.hf.model import INSTEAD, adds_tokens, refuse_modules, text_modules
from ringtile.hf.model_loss import is_sum_over_tokens, shifts_labels

logger = logging.getLogger("ringtile")

# Methods that ringtile replaces or relies on, with the arguments it passes. Other versions may lack them.
_TRAINER_METHODS = {
    "_prepare_context_parallel_inputs": ("model", "inputs"),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "training_step": (),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
    "evaluation_loop": ("dataloader",),
    "_prepare_inputs": (),
    "_get_num_items_in_batch": ("batch_samples", "device"),
    "_track_num_input_tokens": ("inputs",),
    "get_total_train_batch_size": ("args",),
}
_FUNCTIONS = (
    (sdpa_attention, "sdpa_attention_forward", ("module", "query", "key", "value", "attention_mask", "scaling")),
    (masking_utils, "sdpa_mask", ("attention_mask", "q_length", "kv_length", "mask_function")),
    (masking_utils, "eager_mask", ("attention_mask", "q_length", "kv_length", "mask_function")),
)
_ACCELERATOR_METHODS = {
    "prepare_data_loader": ("data_loader",),
    "gather": ("tensor",),
    "gather_for_metrics": ("input_data",),
    "_prepare_cp": ("args",),
}
# Modules whose compute_loss sums over tokens wherever they are. Any other compute_loss gets full sequences.
_SFT, _ORPO = "trl.trainer.sft_trainer", "trl.experimental.orpo.orpo_trainer"
_SUM_OVER_TOKENS = ("transformers.trainer", _SFT, "axolotl.core.trainers.base")
# Modules whose versions of the other methods work on shards. axolotl's were read, the others tested.
_WORK_ON_SHARDS = (
    *_SUM_OVER_TOKENS,
    "trl.trainer.dpo_trainer",
    "trl.trainer.kto_trainer",
    "trl.trainer.reward_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
    "trl.trainer.distillation_trainer",
    _ORPO,
    "axolotl.core.trainers.mixins.activation_checkpointing",
    "axolotl.core.trainers.mixins.layer_offloading",
)
_ASYNC = "its completions come from processes of their own, one of which feeds each rank with other rows"
_REFUSED_TRAINERS = {"AsyncGRPOTrainer": _ASYNC, "AsyncDistillationTrainer": _ASYNC}
# Modules whose compute_loss reads nothing of a model but what it says of each token by itself.
_SHARE_ROWS = {f"trl.trainer.{name}_trainer" for name in ("grpo", "rloo", "dpo", "kto", "reward")}
_COUNT_GROUPS = ("transformers.", "trl.", "axolotl.")  # packages that count items as ParallelismConfig asks
_CAUSAL_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
_FULL_MASKS = ("create_bidirectional_mask", "create_bidirectional_sliding_window_mask")
_CROSS_ATTENTION = ("encoder_attn", "crossattention")  # of decoders; without an encoder's output they do not run
_TYPES_BY_TOKEN = frozenset({"mlp", "moe"})  # of hybrid models' layers: each token by itself
_ENGINES = (DistributedDataParallel, FSDPModule)
_ENGINE_NAMES = {"DeepSpeedEngine"}  # by name, so that deepspeed is not imported
_MIN_DEEPSPEED = Version("0.19.3")


def uses_model_loss(trainer: Trainer) -> bool:
    """Whether the loss is the model's own. SFTTrainer and label smoothing compute it from shift_labels themselves."""
    return _home(trainer, "compute_loss").__module__ != _SFT and trainer.label_smoother is None


def needs_full_sequences(trainer: Trainer) -> bool:
    """Whether the Trainer computes a loss of its own, which may combine tokens in any way, or its model adds tokens."""
    own = _home(trainer, "compute_loss").__module__ not in _SUM_OVER_TOKENS
    return own or trainer.compute_loss_func is not None or adds_tokens(trainer.model)


def check_sizes(trainer: Trainer, config: Config) -> None:
    """Raises ConfigError when accelerate has another number of ranks share a sequence."""
    parallelism = parallelism_of(trainer.accelerator)
    if parallelism is not None and parallelism.cp_enabled and parallelism.cp_size != config.context_parallel_size:
        raise ConfigError(
            f"context_parallel_size is {config.context_parallel_size} but ParallelismConfig.cp_size is "
            f"{parallelism.cp_size}; expected the same size: set only one of them, or both alike"
        )


def check_trainer(trainer: Trainer) -> None:
    """Raises RefusedError or ConfigError when the Trainer's numbers would differ from those of one process."""
    _check_one_partition(trainer)
    _check_touch_points(trainer)
    args, name = trainer.args, type(trainer).__name__
    refused = {
        "model_init": (trainer.model_init is not None, "it replaces the model after ringtile has prepared it"),
        "eval_use_gather_object": (
            args.eval_use_gather_object,
            "ringtile drops the copies of a batch from tensors only",
        ),
        "train_sampling_strategy='batch_rebalance'": (
            args.train_sampling_strategy == "batch_rebalance",
            "it deals rows to ranks, and the ranks of a group need the same (group_by_length balances too)",
        ),
        "dispatch_batches": (trainer.accelerator.dispatch_batches is True, "each rank would get another batch"),
    }
    for setting, (is_set, reason) in refused.items():
        if is_set:
            raise RefusedError(f"{name} uses {setting}; unset it under context parallelism: {reason}")
    check_liger(trainer)
    _check_parallelism(trainer)


def check_deepspeed(trainer: Trainer, model: PreTrainedModel) -> None:
    """Raises RefusedError where checkpoints and frozen weights meet a ZeRO-3 that frees them while they are compared.

    DeepSpeed's pull request 8148, first released in 0.19.3; without ringtile, too, torch raises CheckpointError.
    """
    args, plugin = trainer.args, trainer.accelerator.state.deepspeed_plugin
    if plugin is None or plugin.zero_stage != 3:
        return
    of_layers = (getattr(module, "gradient_checkpointing", False) for module in model.modules())
    checkpoints = getattr(args, CHECKPOINTING) or any(of_layers)
    kwargs = getattr(args, f"{CHECKPOINTING}_kwargs")
    reentrant = isinstance(kwargs, dict) and kwargs.get("use_reentrant", False)  # these compare no tensors
    frozen = not all(parameter.requires_grad for parameter in model.parameters())
    version = sys.modules["deepspeed"].__version__  # which the plugin has imported
    if checkpoints and not reentrant and frozen and Version(version) < _MIN_DEEPSPEED:
        raise RefusedError(
            f"deepspeed {version} under ZeRO-3 with gradient checkpointing and frozen weights (LoRA); expected "
            f"deepspeed >= {_MIN_DEEPSPEED}: an older one frees a frozen weight before torch has compared it with the "
            f"one of the forward pass. pip install 'deepspeed>={_MIN_DEEPSPEED}'"
        )


def check_not_compiled(trainer: Trainer) -> None:
    """Raises RefusedError when a Trainer that needs full sequences also compiles its model."""
    if trainer.args.torch_compile:
        raise RefusedError(
            f"{type(trainer).__name__} computes its loss from the outputs of full sequences and uses torch_compile; "
            f"expected only one of the two: the hooks that shard and unshard have not been shown to survive compilation"
        )


def check_mean_over_targets(trainer: Trainer, model: PreTrainedModel) -> None:
    """Raises RefusedError where the loss of a shard would be a mean over that shard.

    model_accepts_loss_kwargs may be false (axolotl's Trainer): ringtile then hands the model the number of targets.
    """
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    reason = "a mean over each shard is not the mean over the sequence"
    if not takes_any and not getattr(model, "accepts_loss_kwargs", False):
        raise RefusedError(
            f"{type(model).__name__} does not take num_items_in_batch (its forward has no **kwargs); expected a model "
            f"that hands **kwargs to self.loss_function: {reason}"
        )
    if not trainer.model_accepts_loss_kwargs and _home(trainer, "compute_loss").__module__ == _SFT:
        raise RefusedError(f"{type(trainer).__name__} sets model_accepts_loss_kwargs to false; expected true: {reason}")


def check_model(model: PreTrainedModel, *, classifier: bool = False, proved: bool = False) -> None:
    """Raises RefusedError for models that mix tokens outside of attention, or that need the full sequence.

    classifier: the model scores the last token, and its Trainer computes the loss. proved: the first batch will show
    whether convolutions mix tokens.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    if not classifier and not is_sum_over_tokens(model):
        raise RefusedError(
            f"{name} has a loss of its own for whole sequences; expected a ...ForCausalLM, ...ForMaskedLM or "
            f"...ForTokenClassification model, whose loss is a sum over tokens: load it with AutoModelForCausalLM, "
            f"AutoModelForMaskedLM or AutoModelForTokenClassification"
        )
    causal, modules = attends_causally(model), text_modules(model)
    of_recurrence = mixers(modules)
    layer_types = set(getattr(config, "layer_types", None) or ()) - known_types(causal)
    if causal and of_recurrence and len(of_recurrence) == num_layers(config)[1]:
        layer_types -= RECURRENT_TYPES | _TYPES_BY_TOKEN
    if layer_types:
        raise RefusedError(
            f"{name} has layers of type {', '.join(sorted(layer_types))}; expected only "
            f"{', '.join(sorted(known_types(causal)))}: other layers mix tokens without the ring. Instead, {INSTEAD}"
        )
    convolutions = [
        path
        for path, module in modules
        if isinstance(module, nn.Conv1d) and not any(path.startswith(f"{mixer}.") for mixer in of_recurrence)
    ]
    if convolutions and not proved:
        raise RefusedError(
            f"{name} mixes neighboring tokens in {convolutions[0]} (Conv1d); expected attention only: {INSTEAD}"
        )
    refuse_modules(model, WHOLE_SEQUENCES)


def shares_rows(trainer: Trainer) -> bool:
    """Whether rows of the Trainer may share tokens. Asked before its compute_loss is replaced."""
    return _home(trainer, "compute_loss").__module__ in _SHARE_ROWS


def attends_causally(model: PreTrainedModel) -> bool:
    """Whether no token attends a later one. RefusedError: a decoder in which one does; layers or masks disagree."""
    config, name, modules = model.config.get_text_config(), type(model).__name__, text_modules(model)
    whole = config if shifts_labels(model) else model.config  # T5Gemma 2 says it there alone
    if getattr(config, "is_encoder_decoder", False) or getattr(whole, "is_encoder_decoder", False):
        raise RefusedError(f"{name} has an encoder and a decoder; expected one of the two: {INSTEAD}")
    said: dict[bool, str] = {}  # the first layer that says so
    for path, module in modules:
        flag = getattr(module, "is_causal", None)
        if isinstance(flag, bool) and not path.endswith(_CROSS_ATTENTION):
            said.setdefault(flag, path)
    full_masks = not getattr(config, "is_causal", True)
    has_no_head = model.base_model is model  # an encoder whose loss is the Trainer's does not shift either
    if shifts_labels(model) and not (has_no_head and (full_masks or False in said)):
        if full_masks or False in said:
            raise RefusedError(f"{name} is bidirectional {said.get(False, '')}; expected a causal decoder: {INSTEAD}")
        return True
    if len(said) != 1:
        raise RefusedError(
            f"{name} has {'causal and bidirectional layers' if said else 'no layer that says whether it is causal'} "
            f"(is_causal); expected all layers to say the same, as those that attend through transformers' "
            f"AttentionInterface do: {INSTEAD}"
        )
    causal = True in said
    files = {sys.modules[type(module).__module__] for _, module in modules if isinstance(module, PreTrainedModel)}
    makes_causal, makes_full = (
        any(hasattr(f, mask) for f in files for mask in m) for m in (_CAUSAL_MASKS, _FULL_MASKS)
    )
    if not ((makes_causal and not full_masks) if causal else (makes_full or (makes_causal and full_masks))):
        raise RefusedError(
            f"{name} is {'causal' if causal else 'bidirectional'} in its layers ({said[causal]}.is_causal) but not in "
            f"its masks, or makes masks of its own; expected those of transformers and is_causal to agree: {INSTEAD}"
        )
    return causal


def check_training_model(model: nn.Module) -> None:
    """Raises RefusedError for a model whose gradients no engine averages."""
    if not has_engine(model):
        inner = getattr(model, "_orig_mod", model)
        raise RefusedError(
            f"the model in training is a bare {type(inner).__name__}, whose gradients no engine averages over the "
            f"ranks; expected DistributedDataParallel, FSDP2 or DeepSpeed. accelerate {accelerate.__version__} leaves "
            f"a model bare on CPU ranks (set use_cpu=True in TrainingArguments)"
        )


def has_engine(model: nn.Module) -> bool:
    """Whether an engine that averages gradients over the ranks has wrapped the model."""
    inner = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    return isinstance(inner, _ENGINES) or type(inner).__name__ in _ENGINE_NAMES


def _check_one_partition(trainer: Trainer) -> None:
    """Raises RefusedError where axolotl shards each batch itself: its Trainer says so through accelerate alone."""
    parallelism = parallelism_of(trainer.accelerator)
    is_axolotls = any(cls.__module__.startswith("axolotl.") for cls in type(trainer).__mro__)
    if is_axolotls and parallelism is not None and parallelism.cp_enabled:
        raise RefusedError(
            f"axolotl's own context parallelism is on, with {parallelism.cp_size} ranks, and would shard each shard "
            f"once more; expected ringtile's plugin, which takes over context_parallel_size: "
            f"plugins: [ringtile.hf.axolotl.RingtilePlugin]"
        )


def _check_touch_points(trainer: Trainer) -> None:
    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, accelerate {accelerate.__version__}"
    )
    touched = [
        *((trainer, name, arguments) for name, arguments in _TRAINER_METHODS.items()),
        *((trainer.accelerator, name, arguments) for name, arguments in _ACCELERATOR_METHODS.items()),
        *((module, name, arguments) for module, name, arguments in _FUNCTIONS),
    ]
    for owner, name, arguments in touched:
        function = getattr(owner, name, None)
        if function is None or not _takes(function, arguments):
            place = getattr(owner, "__name__", type(owner).__name__)
            raise RefusedError(
                f"{place}.{name}({', '.join(arguments)}) is not there ({versions}); expected transformers >= 5.17 and "
                f"accelerate >= 1.15, which ringtile is tested with"
            )
    for cls in type(trainer).__mro__:
        if cls.__name__ in _REFUSED_TRAINERS:
            raise RefusedError(f"{cls.__name__} is not supported: {_REFUSED_TRAINERS[cls.__name__]}")
    for method in _TRAINER_METHODS:
        home = _home(trainer, method)
        if method != "compute_loss" and home.__module__ not in _WORK_ON_SHARDS:
            raise RefusedError(
                f"{home.__name__}.{method} replaces that of transformers.Trainer; expected Trainer, or TRL's "
                f"SFTTrainer, DPOTrainer, KTOTrainer, ORPOTrainer, RewardTrainer, GRPOTrainer, RLOOTrainer or "
                f"DistillationTrainer, with at most a compute_loss of "
                f"your own: ringtile cannot tell whether another {method} works on shards"
            )


# By `make matrix`, as in pyproject.toml.
_PROVED = shlex.split(EXTRAS["hf"])
_PROVED += ["torch>=2.11,<2.16", "trl>=1.14,<1.17", "peft>=0.21,<0.22", "deepspeed>=0.19.3,<0.20"]


@functools.cache
def warn_of_unproved() -> None:
    """Names each package, of those imported now, that is newer than the releases ringtile was tried with. Once."""
    for text in _PROVED:
        package = Requirement(text)
        version = Version(str(getattr(sys.modules.get(package.name), "__version__", "0")))
        end = next(Version(bound.version) for bound in package.specifier if bound.operator == "<")
        if version.release >= end.release:  # of a development version too
            logger.warning(
                f"{package.name} {version} is newer than the releases that ringtile was tried with: what it changes "
                f"may be refused, or only be seen by the first batch's proof; expected one of those: pip install "
                f"'{text}'"
            )


def _takes(function: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or set(arguments) <= parameters.keys()


def _home(trainer: Trainer, method: str) -> type:
    """The class that defines a method. For a method set on the instance: the type of that function."""
    if method in vars(trainer):
        return type(trainer.__dict__[method])
    return next(cls for cls in type(trainer).__mro__ if method in vars(cls))


def _check_parallelism(trainer: Trainer) -> None:
    parallelism = parallelism_of(trainer.accelerator)
    if trainer.args.n_gpu > 1:
        raise RefusedError(
            f"one process drives {trainer.args.n_gpu} GPUs (DataParallel); expected one process per GPU (torchrun)"
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 1:
        raise RefusedError("FSDP1 (fsdp_version 1) was not tested under context parallelism; expected fsdp_version 2")
    if trainer.get_tp_size() > 1:
        raise RefusedError(
            f"tensor parallelism of size {trainer.get_tp_size()}; expected 1: transformers slices a model over all "
            f"ranks (tp_plan), so that no two of them can share a sequence. Load the model without tp_plan, or combine "
            f"both in plain PyTorch (examples/train_3d.py)"
        )
    if getattr(trainer.model, "_is_distributed_loading_by_transformers", False):
        raise RefusedError(
            "the model was sharded while it was loaded (distributed_config), and reduces its gradients itself, which "
            "was not tested under context parallelism; expected one that accelerate shards: load it without "
            "distributed_config, and set fsdp in TrainingArguments"
        )
    home = _home(trainer, "get_batch_samples")
    if parallelism is not None and parallelism.cp_enabled and not home.__module__.startswith(_COUNT_GROUPS):
        raise RefusedError(
            f"{home.__name__}.get_batch_samples replaces that of transformers.Trainer, with ParallelismConfig.cp_size "
            f"> 1; expected transformers' own, which divides the number of items by cp_size: leave cp_size at 1 and "
            f"set context_parallel_size in ringtile's configuration, under which each item counts once"
        )
    if parallelism is not None and parallelism.cp_enabled and not trainer.args.average_tokens_across_devices:
        raise RefusedError(
            "average_tokens_across_devices is false with ParallelismConfig.cp_size > 1, where transformers rounds the "
            "number of tokens down; set it to true, or leave cp_size at 1"
        )
