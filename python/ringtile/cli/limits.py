"""Numbers that no training can use, and settings that contradict each other: refused before anything is built."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN

from ringtile.config import nearest_key
from ringtile.errors import ConfigError, shown

_MAX = 2**31 - 1
# Keys of TrainingArguments whose numbers lie elsewhere than in [0, _MAX] (integers), or [0, inf) (floats).
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), (1, _MAX)),
    **dict.fromkeys(("gradient_accumulation_steps", "eval_accumulation_steps", "torch_empty_cache_steps"), (1, _MAX)),
    **dict.fromkeys(("ddp_bucket_cap_mb", "ddp_timeout"), (1, _MAX)),
    **dict.fromkeys(("dataloader_prefetch_factor", "save_total_limit"), (1, _MAX)),
    **dict.fromkeys(("logging_steps", "save_steps", "eval_steps"), (1e-6, _MAX)),
    **dict.fromkeys(("seed", "data_seed"), (0, 2**32 - 1)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), (0, math.nextafter(1, 0))),
    "label_smoothing_factor": (0, math.nextafter(1, 0)),
    "dataloader_num_workers": (0, 1024),
    "num_train_epochs": (1e-6, _MAX),
    "local_rank": (-1, _MAX),
}
# Of a model, under transformers' own names, which attribute_map translates.
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)
# How many layers there are, by the names of all types.
LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    *("num_encoder_layers", "num_decoder_layers", "num_blocks"),
)
# Of a config.json, by name: what constructors make lists, mappings or modules of.
_LARGEST = {
    **dict.fromkeys((*LAYER_COUNTS, "depth"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_labels"), 2**16),
}
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def check_training(training: Mapping[str, Any], has_eval_files: bool) -> None:
    """Raises ConfigError, naming the key of the training section."""
    for key, value in training.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(key, value)
    if training.get("deepspeed") in ({}, ""):
        raise ConfigError("training.deepspeed is empty; expected DeepSpeed's keys, or the path of a JSON file")
    evaluates = _name(training.get("eval_strategy", "no")) != "no"
    for key, is_set in {"eval_strategy": evaluates, "eval_on_start": training.get("eval_on_start")}.items():
        if is_set and not has_eval_files:
            raise ConfigError(
                f"training.{key} is {_name(training[key])} but there is no data to evaluate; set data.eval_files, or "
                f"remove training.{key}"
            )
    if training.get("load_best_model_at_end") and not evaluates:
        raise ConfigError(
            "training.load_best_model_at_end is true but nothing is evaluated; set training.eval_strategy and "
            "data.eval_files, or remove it"
        )


def _check_number(key: str, value: float) -> None:
    if key == "max_steps":
        if value != -1 and not 1 <= value <= _MAX:
            raise ConfigError(f"training.max_steps is {value}; expected 1 to {_MAX}, or -1 for num_train_epochs")
        return
    low, high = _RANGES.get(key, (0, _MAX if isinstance(value, int) else math.inf))
    if not low <= value <= high or math.isinf(value):
        expected = f"{low:g} to {high:.10g}"
        if high < 1:
            expected = f"{low:g} or more, and less than 1"
        elif math.isinf(high):
            expected = f"a finite number, {low:g} or more"
        raise ConfigError(f"training.{key} is {shown(value)}; expected {expected}")


def _name(value: Any) -> str:
    """The text of a value that may be a member of an enumeration."""
    return str(getattr(value, "value", value)).lower()


def read_config(folder: str) -> PretrainedConfig:
    """The configuration in a folder; which implementations it names is forgotten, as a name may be code of a hub.

    Raises ConfigError for a size that would take forever, and what transformers raises.
    """
    keys, _ = PretrainedConfig.get_config_dict(folder)
    check_counts(keys)
    config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config._attn_implementation = config._experts_implementation = None
    return config


def check_counts(keys: Any) -> None:
    """ConfigError for so many layers, experts or labels, at any depth of a config.json, that nothing ends."""
    for key, value in keys.items() if isinstance(keys, dict) else ():
        if isinstance(value, int) and value > _LARGEST.get(key, value):
            raise ConfigError(f"model.{key} is {shown(value)}; expected at most {_LARGEST[key]}")
        check_counts(value)


def check_model_config(config: PretrainedConfig, *, is_built: bool = True) -> None:
    """Raises ConfigError, naming the key of the model section as transformers reads it.

    is_built: on this machine, whose memory must then hold its weights.
    """
    text = config.get_text_config()

    def refuse(key: str, expected: str) -> None:
        name = text.attribute_map.get(key, key)
        raise ConfigError(f"model.{name} is {shown(getattr(text, key))}; expected {expected}")

    sizes = {key: value for key in _SIZES if (value := getattr(text, key, None)) is not None}
    for key, value in sizes.items():
        if isinstance(value, int) and not 1 <= value <= _MAX:
            refuse(key, f"1 to {_MAX}")
    heads, kv_heads = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        refuse("num_key_value_heads", f"a divisor of the number of query heads, {heads}")
    for key, value in text.to_dict().items():
        if re.search("drop(out)?", key) and isinstance(value, int | float) and not 0 <= value <= 1:
            refuse(key, "a probability, 0 to 1")
    for key in _ACTIVATIONS:
        name = getattr(text, key, None)
        if isinstance(name, str) and name not in ACT2FN:
            refuse(key, f"an activation of transformers: {nearest_key(name, list(ACT2FN))}")
    if is_built:
        check_memory(sizes)


def check_memory(sizes: Mapping[str, Any]) -> None:
    """Raises ConfigError for random weights that this machine's memory cannot hold: at least the embedding, and one
    matrix of the MLP and of the attention in each layer, in float32."""
    hidden, layers = sizes.get("hidden_size"), sizes.get("num_hidden_layers")
    if not isinstance(hidden, int) or not isinstance(layers, int):
        return
    widths = [sizes.get(key) for key in ("intermediate_size", "hidden_size")]
    rows = sizes.get("vocab_size", 0) + layers * sum(width for width in widths if isinstance(width, int))
    needed, memory = 4 * hidden * rows, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ConfigError(
            f"model: {layers} layers of hidden_size {hidden} need at least {needed / 2**30:,.0f} GiB in float32, and "
            f"this machine has {memory / 2**30:,.0f}; expected a smaller model"
        )
