"""The transformers config of a model that may be anybody's: made of keys, read from a folder, checked before use."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN

from ringtile.errors import ConfigError, refusing, shown
from ringtile.hf.config import MAX_KEY, check_keys, nearest_key

_MAX = 2**31 - 1
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


def read_config(folder: str) -> PretrainedConfig:
    """Return the configuration in a folder; which implementations it names is forgotten, as a name may be code of a
    hub.

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


def check_model_config(config: PretrainedConfig) -> None:
    """Raises ConfigError, naming the key of the model section as transformers reads it."""
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


def make_config(given: Mapping[str, Any], seq_len: int, vocab_size: int = 0) -> Any:
    """Return the config of a section `model`, whose model takes rows of seq_len tokens. ConfigError names the key.

    vocab_size: of the tokenizer. What the section leaves out fits the data, for a model with random weights.
    """
    with refusing("model"):
        config = pretrained_config(given) if "name" in given else _config_of_type(given, seq_len, vocab_size)
        check_model_config(config)
    words, positions = getattr(config, "vocab_size", vocab_size), getattr(config, "max_position_embeddings", seq_len)
    if words < vocab_size:
        raise ConfigError(f"model.vocab_size is {words}; expected at least {vocab_size}, for data.tokenizer")
    if positions >= seq_len:
        return config
    message = f"model.max_position_embeddings is {positions}; expected at least {seq_len}, for data.seq_len"
    if "name" in given and "rope_type" in (getattr(config, "rope_parameters", None) or {}):  # the same in all layers
        yarn = f"rope_type: yarn, factor: {seq_len / positions}"
        message += (
            f". With YaRN: model: {{name: {given['name']}, max_position_embeddings: {seq_len}, rope_parameters: "
            f"{{{yarn}, original_max_position_embeddings: {positions}}}}}, with the numbers that the model's card "
            f"recommends"
        )
    raise ConfigError(message)


def pretrained_config(given: Mapping[str, Any]) -> Any:
    """Return the config of a folder or hub name, with the keys given beside it; a mapping adds to the config's own.

    ConfigError: it has no such key, or a hub name's config is not here and cannot be fetched.
    """
    name, keys = given["name"], {key: value for key, value in given.items() if key != "name"}
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)  # None would ask at the terminal
    except OSError as error:
        if os.path.isdir(name):
            raise
        raise ConfigError(
            f"model {name[:MAX_KEY]!r} is no folder, and its configuration cannot be fetched; expected its folder: hf "
            f"download {name[:MAX_KEY]} --local-dir FOLDER, where there is a network (to plan, config.json will do)"
        ) from error
    if not keys:
        return config
    own = config.to_dict()
    check_keys(keys, {*own, *config.attribute_map}, "model.")
    for key, value in keys.items():
        if isinstance(own.get(key), dict) and isinstance(value, dict):
            keys[key] = {**own[key], **value}
    return AutoConfig.from_pretrained(name, trust_remote_code=False, **keys)


def _config_of_type(given: Mapping[str, Any], seq_len: int, vocab_size: int) -> Any:
    model_type = given["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"unknown model.model_type {model_type[:MAX_KEY]}: {nearest_key(model_type, list(CONFIG_MAPPING.keys()))}"
        )
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)} | {*config_class.attribute_map, "model_type"}
    check_keys(given, known, "model.")
    fitting: dict[str, Any] = {"vocab_size": vocab_size, "max_position_embeddings": seq_len}
    return AutoConfig.for_model(**{key: value for key, value in fitting.items() if key in known} | dict(given))
