"""The YAML file of `ringtile train`: read, checked key by key, and turned into the arguments of a Trainer.

Four parts: `model`, `data`, `training` (keys of transformers.TrainingArguments), and ringtile.Config's keys at the
top level. docs/guide/train.md describes every key.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import enum
import glob
import os
import pathlib
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pydantic
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ringtile.cli.data import ByteEncoder, DataConfig, Encoder, PretrainedEncoder
from ringtile.cli.environment import world_size
from ringtile.cli.limits import check_model_config, check_training
from ringtile.config import MAX_KEY, Config, flat, nearest_key
from ringtile.errors import ConfigError, RingtileError, shown
from ringtile.yaml_file import read_yaml

SECTIONS = ("model", "data", "training")
ENGINES = ("fsdp", "fsdp_config", "deepspeed")  # training keys that shard the model over ranks
# Defaults that differ from transformers'. Without use_cpu, accelerate does not train on several CPU ranks.
TRAINING_DEFAULTS = {
    "output_dir": "out",
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": not torch.accelerator.is_available(),
}
# torch names no class for what a collective raises when a peer is gone.
# Values of TrainingArguments' keys that are named like secrets.
_SECRET = re.compile("(^|_)(token|api_key|password|secret)$", re.IGNORECASE)
_OF_A_PEER = re.compile("gloo|nccl|connection|socket|peer", re.IGNORECASE)
_FIELD = re.compile(r"Validation error for field '(\w+)'")  # how transformers' configs name the key


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One training run. Relative paths of the file are absolute here."""

    model: dict[str, Any]  # keys of a transformers config; with `name`, a folder or hub name: beside its own
    data: DataConfig
    training: dict[str, Any]  # keys of TrainingArguments, with TRAINING_DEFAULTS
    ringtile: Config

    @classmethod
    def load(cls, path: pathlib.Path, default_data: Mapping[str, Any] | None = None) -> Recipe:
        """Reads a YAML file; relative paths start at its folder. ConfigError names the key.

        default_data: the section `data` of a file that has none.
        """
        folder = path.absolute().parent
        try:
            mapping = flat(read_yaml(path))
            check_keys(mapping, {*SECTIONS, *Config.model_fields}, "")
            recipe = cls(
                model=load_model_keys(mapping.get("model"), folder),
                data=load_data_config(mapping.get("data", default_data), folder),
                training=load_training(mapping.get("training", {})),
                ringtile=Config.load({key: mapping[key] for key in mapping if key not in SECTIONS}),
            )
            check_training(recipe.training, bool(recipe.data.eval_files))
            return recipe
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @property
    def timeout_seconds(self) -> float:
        """How long a rank waits for the others, in seconds."""
        return self.ringtile.timeout_seconds

    def alone(self, data_parallel_size: int, output_dir: str) -> Recipe:
        """The same training in one plain process: no context parallelism, no tiles, the same rows per step."""
        rows = self.training.get("per_device_train_batch_size", TrainingArguments.per_device_train_batch_size)
        changes = {"per_device_train_batch_size": rows * data_parallel_size, "output_dir": output_dir}
        changes |= dict.fromkeys((*ENGINES, "hub_token")) | {"push_to_hub": False}
        return dataclasses.replace(self, training=self.training | changes, ringtile=Config())

    def mapping(self) -> dict[str, Any]:
        """The mapping that `load` reads: plain types, ready for YAML or JSON, without the values of secrets."""
        sections = {"model": self.model, "data": self.data.model_dump(), "training": without_secrets(self.training)}
        return sections | self.ringtile.model_dump(mode="json", exclude_unset=True)


@contextlib.contextmanager
def told_as_ours(section: str, has_begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Tells what transformers, accelerate, datasets or torch raise while they prepare a training as a ConfigError.

    section: of the file, that they work on. has_begun: whether the training has, so that errors are its own.
    """
    try:
        yield
    except RingtileError:
        raise
    except Exception as error:
        of_a_peer = dist.is_initialized() and dist.get_world_size() > 1 and isinstance(error, RuntimeError | OSError)
        if has_begun() or (of_a_peer and _OF_A_PEER.search(f"{type(error).__name__} {error}")):
            raise
        if (field := _FIELD.match(str(error))) is not None:
            raise ConfigError(f"{section}.{field[1]}: {error.__cause__ or error}") from error
        plain = isinstance(error, ValueError | ImportError | OSError) and str(error)
        raise ConfigError(f"{section}: {error if plain else f'{type(error).__name__}: {error}'}") from error


def check_keys(given: Mapping[str, Any], known: Collection[str], prefix: str) -> None:
    """Raises ConfigError for the first unknown key, naming the nearest known one."""
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key {prefix}{str(key)[:MAX_KEY]}: {nearest_key(key, known)}")


def load_model_keys(given: Any, folder: pathlib.Path) -> dict[str, Any]:
    """The `model` section, which may be a name alone; a relative path starts at `folder`."""
    if isinstance(given, str):
        given = {"name": given}
    if isinstance(given, dict) and isinstance(given.get("model_type"), str):
        return given
    if isinstance(given, dict) and isinstance(name := given.get("name"), str):
        return {**given, "name": str(folder / name) if os.path.isdir(folder / name) else name}
    raise ConfigError(
        f"model is {shown(given)}; expected a folder, a hub name, or keys of a config with name or model_type"
    )


def load_data_config(given: Any, folder: pathlib.Path) -> DataConfig:
    """The `data` section; relative paths of files and of a tokenizer's folder start at `folder`."""
    if not isinstance(given, dict):
        raise ConfigError(f"data is {shown(given)}; expected keys like files and seq_len")
    given = {str(key): value for key, value in given.items()}
    given |= {key: [given[key]] for key in ("files", "eval_files") if isinstance(given.get(key), str)}
    config = DataConfig(**given)
    base = pathlib.Path(glob.escape(str(folder)))
    places: dict[str, Any] = {
        key: [str(base / pattern) for pattern in getattr(config, key)] for key in ("files", "eval_files")
    }
    if config.tokenizer and os.path.isdir(folder / config.tokenizer):
        places["tokenizer"] = str(folder / config.tokenizer)
    return config.model_copy(update=places)


def training_fields() -> dict[str, Any]:
    """The keys of TrainingArguments and their types."""
    with_bool = dict.fromkeys(("fsdp", "resume_from_checkpoint"), bool | str | None)  # annotated without it
    hints = typing.get_type_hints(TrainingArguments) | with_bool
    return {field.name: hints[field.name] for field in dataclasses.fields(TrainingArguments) if field.init}


def load_training(given: Any) -> dict[str, Any]:
    """The `training` section, every value converted to the type of its field (YAML reads 1e-3 as a string)."""
    if not isinstance(given, dict):
        raise ConfigError(f"training is {shown(given)}; expected keys of transformers.TrainingArguments")
    fields = training_fields()
    check_keys(given, fields, "training.")
    return TRAINING_DEFAULTS | {key: convert(key, value, fields[key]) for key, value in given.items()}


def without_secrets(value: Any, key: str = "") -> Any:
    """The same with "<hub_token>" for the value of hub_token, and so on."""
    if value is not None and _SECRET.search(key):
        return f"<{key}>"
    if isinstance(value, dict):
        return {name: without_secrets(each, str(name)) for name, each in value.items()}
    return [without_secrets(each) for each in value] if isinstance(value, list) else value


def convert(key: str, value: Any, field_type: Any) -> Any:
    """A value of the training section, converted to the type of its field."""
    quotes = " (without quotes, YAML reads no, off, yes and on as booleans)" if isinstance(value, bool) else ""
    got = f"training.{key} is {shown(without_secrets(value, key))}"
    try:
        converted = pydantic.TypeAdapter(field_type).validate_python(value)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{got}; expected: {error.errors()[0]['msg']}{quotes}") from error
    if isinstance(value, bool) and not isinstance(converted, bool):
        raise ConfigError(f"{got}; expected a number")
    for kind in typing.get_args(field_type):
        if isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(converted, str):
            names = [str(member.value) for member in kind]
            if getattr(converted, "value", converted) not in names:
                raise ConfigError(f"{got}: {nearest_key(converted, names)}")
    return converted


def make_arguments(training: dict[str, Any]) -> TrainingArguments:
    """TrainingArguments. Under torchrun this also starts the process group."""
    with told_as_ours("training"):
        # transformers would start it too, but on CPUs with torch's own timeout, whatever ddp_timeout says.
        of_cpus = training.get("use_cpu") and training.get("ddp_backend") in (None, "gloo")
        if of_cpus and world_size() > 1 and not dist.is_initialized():
            seconds = training.get("ddp_timeout", TrainingArguments.ddp_timeout)
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
        return TrainingArguments(**copy.deepcopy(training))  # it changes the dicts it is given


def make_encoder(recipe: Recipe) -> Encoder:
    """The encoder of data.tokenizer. Without one: a pretrained model's own, or bytes for a model built here."""
    key, name = "data.tokenizer", recipe.data.tokenizer
    if not name:
        key, name = "model", recipe.model.get("name", "bytes")
    return ByteEncoder() if name == "bytes" else PretrainedEncoder(name, key)


def make_model(recipe: Recipe, encoder: Encoder) -> PreTrainedModel:
    """Loads the model, or builds it with random weights (seed first). Its vocabulary must hold the encoder's."""
    with told_as_ours("model"):
        if "model_type" not in recipe.model:
            config = pretrained_config(recipe.model)
            model = AutoModelForCausalLM.from_pretrained(recipe.model["name"], config=config)
        else:
            config = make_model_config(recipe.model, recipe.data.seq_len, encoder)
            check_model_config(config)
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    check_fits(model.config, encoder.vocab_size, recipe.data.seq_len, recipe.model.get("name"))
    return model


def check_fits(config: Any, vocab_size: int, seq_len: int, name: str | None) -> None:
    """Raises ConfigError where a model is too small for the data. name: of a pretrained model."""
    words, positions = getattr(config, "vocab_size", vocab_size), getattr(config, "max_position_embeddings", seq_len)
    if words < vocab_size:
        raise ConfigError(f"model.vocab_size is {words}; expected at least {vocab_size}, for data.tokenizer")
    if positions >= seq_len:
        return
    message = f"model.max_position_embeddings is {positions}; expected at least {seq_len}, for data.seq_len"
    if name is not None and "rope_type" in (getattr(config, "rope_parameters", None) or {}):  # the same in all layers
        yarn = f"rope_type: yarn, factor: {seq_len / positions}"
        message += (
            f". With YaRN: model: {{name: {name}, max_position_embeddings: {seq_len}, rope_parameters: {{{yarn}, "
            f"original_max_position_embeddings: {positions}}}}}, with the numbers that the model's card recommends"
        )
    raise ConfigError(message)


def pretrained_config(given: Mapping[str, Any]) -> Any:
    """The config of a folder or hub name, with the keys given beside it; a mapping adds to the config's own.

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


def make_model_config(given: dict[str, Any], seq_len: int, encoder: Encoder) -> Any:
    """A transformers config from its keys. If left out, vocab_size and max_position_embeddings fit the data."""
    model_type = given["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"unknown model.model_type {model_type[:MAX_KEY]}: {nearest_key(model_type, list(CONFIG_MAPPING.keys()))}"
        )
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)} | {*config_class.attribute_map, "model_type"}
    check_keys(given, known, "model.")
    fitting = {"vocab_size": encoder.vocab_size, "max_position_embeddings": seq_len}
    keys = {key: value for key, value in fitting.items() if key in known} | given
    return AutoConfig.for_model(**keys)
