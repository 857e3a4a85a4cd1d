"""The axolotl plugin: `plugins: [ringtile.hf.axolotl.RingtilePlugin]` and ringtile's keys in axolotl's YAML file.

axolotl has keys of the same names (context_parallel_size, tiled_mlp, ...) that start ring-flash-attn and its own tiled
MLP. The plugin reads the file first and moves the keys under `ringtile`, where they are validated and where
`ringtile.enable` finds them once the Trainer is built.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from ringtile.config import Config
from ringtile.errors import ConfigError
from ringtile.hf.trainer import enable

_SECTION = "ringtile"
_OLD_SIZE = "sequence_parallel_degree"  # what axolotl called context_parallel_size
_LEFT_TO_AXOLOTL = {"gc_steps"}  # it means the same to axolotl


class RingtileArgs(BaseModel):
    """Adds to axolotl's configuration the mapping `ringtile`, with the keys of `ringtile.Config`."""

    ringtile: dict[str, Any] | None = None

    @field_validator("ringtile")
    @classmethod
    def _is_a_config(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        """Raises ConfigError naming the key; pydantic wraps it in its ValidationError."""
        if value is not None:
            Config.load(value)
        return value


class RingtilePlugin(BasePlugin):  # type: ignore[misc]
    """Enables ringtile on the Trainer that axolotl builds."""

    def __init__(self) -> None:
        super().__init__()
        self._batch_size_is_right = False

    def register(self, cfg: MutableMapping[str, Any]) -> None:
        """Moves ringtile's keys under `ringtile` before axolotl validates its own.

        Raises ConfigError when a key has two different values.
        """
        section = dict(cfg.get(_SECTION) or {})
        if section and cfg.get("use_ray") and cfg.get("context_parallel_size") == 1:
            del cfg["context_parallel_size"]  # Ray workers register again, after axolotl's validation added the default
        for key in (_OLD_SIZE, *Config.model_fields):
            if key in _LEFT_TO_AXOLOTL or cfg.get(key) is None:
                continue
            name = "context_parallel_size" if key == _OLD_SIZE else key
            value = cfg.pop(key)
            if section.setdefault(name, value) != value:
                raise ConfigError(
                    f"{key} is {value!r} but {name} is {section[name]!r} too; expected one value, given in one place"
                )
        cfg[_SECTION] = section

    def get_input_args(self) -> str:
        return "ringtile.hf.axolotl.RingtileArgs"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Divides axolotl's rows per step, which count every rank, by the group size: warm-up and saving use them."""
        config = _config(cfg)
        if not self._batch_size_is_right and cfg.get("world_size", 1) > 1:
            cfg["batch_size"] //= config.context_parallel_size
        self._batch_size_is_right = True

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        if cfg.get("orpo_alpha"):
            raise ConfigError("orpo_alpha is set; remove it: its loss compares full sequences and a rank has a shard")
        enable(trainer, _config(cfg))


def _config(cfg: Mapping[str, Any]) -> Config:
    return Config.load(dict(cfg.get(_SECTION) or {}))
