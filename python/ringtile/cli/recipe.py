"""The YAML file of `ringtile train`, `verify` and `plan`; docs/guide/train.md describes every key."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import glob
import os
import pathlib
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.distributed as dist
import yaml
from transformers import HfArgumentParser, TrainingArguments

from ringtile.cli.environment import world_size
from ringtile.errors import PAGES, ConfigError, refusing, shown
from ringtile.hf.config import Config, Count, Section, check_keys, check_types, flat
from ringtile.hf.yaml_file import parse_yaml, read_yaml

SECTIONS = ("model", "data", "training")
ENGINES = ("fsdp", "fsdp_config", "deepspeed")  # training keys of several ranks
DEFAULTS: dict[str, Any] = {"output_dir": "out", "logging_steps": 1, "report_to": "none"}  # not transformers'
DEFAULTS["use_cpu"] = not torch.accelerator.is_available()  # accelerate trains on several CPU ranks only with it


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Text files and how rows are made of them. A single path stands for a list of it.

    - files: paths and globs, relative to the YAML file; .jsonl, .json and .parquet hold a document per record.
    - eval_files: the same, for evaluation.
    - seq_len: tokens of a row.
    - packing: fill rows with several documents, which do not attend each other.
    - text_column: the column of records that holds the text.
    - tokenizer: a folder or a hub name; the model's own without it.
    """

    prefix = "data."
    files: list[str] | str
    eval_files: list[str] | str = dataclasses.field(default_factory=list)
    seq_len: Annotated[int, 2, 2**31 - 1]
    packing: bool = True
    text_column: str = "text"
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        for name in ("files", "eval_files"):
            paths = getattr(self, name)
            object.__setattr__(self, name, [paths] if isinstance(paths, str) else paths)
        if not self.files:
            raise ConfigError(f"data.files is {shown(self.files)}; expected one path or more")


@functools.cache
def training_types() -> dict[str, Any]:
    """Return the keys of TrainingArguments with their types; two take bool, and three no number below 1, unlike
    annotated."""
    hints = typing.get_type_hints(TrainingArguments)
    counts = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
    hints |= dict.fromkeys(("fsdp", "resume_from_checkpoint"), bool | str | None) | dict.fromkeys(counts, Count)
    return {field.name: hints[field.name] for field in dataclasses.fields(TrainingArguments) if field.init}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One training run. Relative paths of the file are absolute here."""

    model: dict[str, Any]  # `name`, a folder or hub name, or `model_type`; and keys of the transformers config
    data: DataConfig
    training: dict[str, Any]  # keys of TrainingArguments, with DEFAULTS
    ringtile: Config

    @classmethod
    def load(
        cls, path: pathlib.Path, default_data: Mapping[str, Any] | None = None, changes: Sequence[str] = ()
    ) -> Recipe:
        """Read a YAML file. ConfigError names the key.

        default_data: the section `data` of a file that has none. changes: KEY=VALUE of `--set`, in place of the file's.
        """
        folder = path.absolute().parent
        try:
            keys = flat(with_changes(read_yaml(path), changes))
            check_keys(keys, {*SECTIONS, *Config.names()})
            given = keys.get("model")
            model = {"name": given} if isinstance(given, str) else _section(keys, "model")
            if not isinstance(model.get("name", model.get("model_type")), str):
                raise ConfigError(f"model is {shown(given)}; expected a name, or keys with model_type")
            data = DataConfig(**_section(keys, "data", default_data))
            base, places = glob.escape(str(folder)), dataclasses.asdict(data)
            for key in ("files", "eval_files"):
                places[key] = [os.path.join(base, pattern) for pattern in places[key]]
            for section, key, name in ((model, "name", model.get("name")), (places, "tokenizer", data.tokenizer)):
                if name is not None and os.path.isdir(folder / name):
                    section[key] = str(folder / name)
            training = _section(keys, "training", {})
            check_types(training, training_types(), "training.")
            config = Config.load({key: value for key, value in keys.items() if key not in SECTIONS})
            return cls(model, DataConfig(**places), DEFAULTS | training, config)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def alone(self, data_parallel_size: int, output_dir: str) -> Recipe:
        """Return the same training in one plain process: no context parallelism, no tiles, the same rows per step."""
        rows = self.training.get("per_device_train_batch_size", TrainingArguments.per_device_train_batch_size)
        training = {key: value for key, value in self.training.items() if key not in ENGINES}
        training |= {"per_device_train_batch_size": rows * data_parallel_size, "output_dir": output_dir}
        return dataclasses.replace(self, training=training | {"push_to_hub": False}, ringtile=Config())

    def mapping(self) -> dict[str, Any]:
        """Return the keys that `load` reads, in plain types and without tokens of a hub."""
        training = {key: value for key, value in self.training.items() if not key.endswith("token")}
        sections = {"model": self.model, "data": dataclasses.asdict(self.data), "training": training}
        return sections | self.ringtile.given


def with_changes(given: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Return a copy of the given keys with those of `--set KEY=VALUE`. ConfigError: text of another form."""
    keys: dict[str, Any] = copy.deepcopy(dict(given))
    for text in changes:
        path, is_given, value = text.partition("=")
        *sections, key = path.split(".")
        at: Any = keys
        for section in sections:
            at = at.setdefault(section, {}) if isinstance(at, dict) else None
        try:
            if not (is_given and key and isinstance(at, dict)):
                raise ValueError("a key of the file, with dots between sections, and its value")
            at[key] = parse_yaml(value)
        except (ValueError, yaml.YAMLError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"--set is {shown(text)} ({reason}); expected KEY=VALUE, as training.max_steps=10 or tile_tokens=8192"
            ) from None
    return keys


def _section(keys: Mapping[str, Any], name: str, default: Any = None) -> dict[str, Any]:
    if isinstance(value := keys.get(name, default), Mapping):
        return {str(key): each for key, each in value.items()}
    raise ConfigError(f"{name} is {shown(value)}; expected a mapping of keys, as {PAGES}docs/guide/train.md has them")


def make_arguments(training: Mapping[str, Any]) -> TrainingArguments:
    """TrainingArguments; where there are several ranks, this also makes their process group."""
    with refusing("training"):
        # transformers would make it too, but on CPUs with torch's own timeout, whatever ddp_timeout says.
        if training.get("use_cpu") and world_size() > 1 and not dist.is_initialized():
            seconds = training.get("ddp_timeout", TrainingArguments.ddp_timeout)
            dist.init_process_group(training.get("ddp_backend", "gloo"), timeout=datetime.timedelta(seconds=seconds))
        parser: Any = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
        return parser.parse_dict(copy.deepcopy(dict(training)))[0]  # type: ignore[no-any-return]  # it changes dicts


def check_same(recipe: Recipe) -> None:
    """ConfigError on every rank where two ranks have other configurations. A collective."""
    mapping = recipe.mapping()
    mine = {f"{name}.{key}": value for name in SECTIONS for key, value in mapping.pop(name).items()} | mapping
    ranks: list[Any] = [mine] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(ranks, mine)
    for rank, other in enumerate(ranks):
        for key in sorted({**ranks[0], **other}):
            if (first := ranks[0].get(key)) != (second := other.get(key)):
                values = f"{key} is {shown(first)} on rank 0 and {shown(second)} on rank {rank}"
                raise ConfigError(f"{values}; expected the same file on every rank")
