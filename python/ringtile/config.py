"""ringtile's configuration: one frozen object with the same keys in Python, YAML and on the command line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ringtile.errors import ConfigError


class Section(BaseModel):
    """A mapping in a YAML file with a fixed set of keys: frozen; each error is a ConfigError that names the key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    prefix: ClassVar[str] = ""  # put before the section's keys in errors, e.g. "data."

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(one, type(self)) for one in error.errors())) from None


class Config(Section):
    """Selects what `ringtile.enable` turns on. The defaults change nothing.

    ConfigError, naming the key: it is unknown, has a wrong type or value, or contradicts another key.
    """

    context_parallel_size: int = Field(default=1, ge=1)  # ranks that share one sequence; 1 = off
    layout: Literal["zigzag", "contiguous", "striped"] = "zigzag"  # which tokens a rank holds
    block_kernel: Literal["auto", "ringtile", "aten"] = "ringtile"  # of the attention forward, see docs/design/ring.md
    tiled_mlp: bool = False
    tiled_mlp_num_shards: int | None = Field(default=None, ge=1)  # tiles per MLP call, instead of tile_tokens
    tiled_mlp_use_original_mlp: bool = False  # True: the module's own forward even where a GLU kernel is exact
    tile_tokens: int = Field(default=16384, ge=1)  # tokens per tile, of the MLP and the loss
    tiled_loss: bool = False
    activation_offload: bool = False  # keep the inputs of checkpointed layers in host memory
    gc_steps: int | None = Field(default=None, ge=1)  # collect garbage at the start and every gc_steps steps
    timeout_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)  # a rank silent for longer counts as lost

    @model_validator(mode="after")
    def _keys_agree(self) -> Config:
        if self.tiled_mlp_num_shards is not None and not self.tiled_mlp:
            raise ValueError(
                f"tiled_mlp_num_shards is {self.tiled_mlp_num_shards} but tiled_mlp is false; "
                f"set tiled_mlp: true or remove tiled_mlp_num_shards"
            )
        return self

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | os.PathLike[str]) -> Config:
        """A Config from a Config, a mapping, or the path of a YAML file.

        ConfigError: the file is missing, is not YAML, or does not hold a mapping of known keys.
        """
        if isinstance(source, Config):
            return source
        if isinstance(source, Mapping):
            return cls(**{str(key): value for key, value in source.items()})
        path = Path(source)
        try:
            return cls.load(read_yaml(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Reads the mapping in a YAML file. ConfigError: unreadable, not YAML, or not a mapping."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{error.strerror}; expected a readable YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"holds {type(values).__name__}; expected a mapping of keys to values")
    return values


def nearest_key(key: str, valid: list[str]) -> str:
    """Completes the error for an unknown key: the closest valid key, or all of them if none is close."""
    close = difflib.get_close_matches(key, valid, n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(sorted(valid))}"


def _explain(error: Any, section: type[Section]) -> str:
    """One pydantic error as one line: the key, the value got, the value expected."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown key {section.prefix}{key}: {nearest_key(key, list(section.model_fields))}"
    if error["type"] == "missing":
        return f"{section.prefix}{key} is missing; expected a value for it"
    if not key:
        return str(error["ctx"]["error"])
    return f"{section.prefix}{key} is {error['input']!r}; expected: {error['msg']}"
