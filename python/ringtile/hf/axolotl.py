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

from ringtile.config import Config, flat
from ringtile.errors import ConfigError
from ringtile.hf.trainer import enable

_SECTION = "ringtile"
_OLD_SIZE = "sequence_parallel_degree"  # what axolotl called context_parallel_size
# What axolotl's mapping `context_parallel` may say since 0.20, in ringtile's words; None: as ringtile does by default.
# Source: axolotl/integrations/context_parallel/args.py of 0.20.0.
_BACKENDS = {"auto": "auto", "ring": "ring", "ulysses": "ulysses", "usp": None}
_ROTATIONS = {"alltoall": "ring", "allgather": "all_gather"}
_LAYOUTS = {"auto": None, "none": "contiguous", "head_tail": "zigzag"}
_KERNELS = {"auto": None}
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

        Raises ConfigError when a key has two different values, and for a way of sharing that ringtile does not have.
        """
        _translate(cfg)
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


def _translate(cfg: MutableMapping[str, Any]) -> None:
    """Takes the mapping `context_parallel` out of axolotl's sight, whose own context parallelism would run too."""
    given = cfg.pop("context_parallel", None)
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ConfigError(f"context_parallel is {given!r:.80}; expected a mapping with size, backend and load_balance")
    there = {key: value for key, value in given.items() if value is not None}
    translated = {"scheme": _scheme(there), "layout": _meaning(there, "load_balance", _LAYOUTS)}
    _meaning(there, "ring_impl", _KERNELS)
    for key, value in translated.items():
        if value is not None and there.setdefault(key, value) != value:
            raise ConfigError(
                f"context_parallel.{key} is {there[key]!r:.80} but axolotl's keys beside it say {value!r}; expected "
                f"one of the two"
            )
    for key, value in flat({"context_parallel": there}).items():  # names what neither library knows
        if cfg.get(key, value) not in (None, value):
            raise ConfigError(
                f"{key} is {cfg[key]!r:.80} but the mapping context_parallel says {value!r}; expected one value, given "
                f"in one place"
            )
        cfg[key] = value


def _scheme(there: dict[str, Any]) -> str | None:
    """Takes the keys of axolotl that say how ranks share attention out of the mapping. Returns ringtile's scheme."""
    backend = there.get("backend")
    scheme = _meaning(there, "backend", _BACKENDS)
    rotation = _meaning(there, "rotate_method", _ROTATIONS)
    ulysses, ring = there.pop("ulysses_size", None), there.pop("ring_size", None)
    if rotation is not None and backend != "ring":
        raise ConfigError(f"context_parallel.rotate_method is set and backend is {backend!r}; expected backend: ring")
    if backend in ("ring", "ulysses") and (ulysses, ring) != (None, None):
        raise ConfigError(f"context_parallel.ulysses_size or ring_size is set; backend: {backend} says it, remove them")
    if backend == "usp" or (ulysses, ring) != (None, None):
        if type(ulysses) is not int or ulysses < 1 or (ring is not None and ulysses * ring != there.get("size")):
            raise ConfigError(
                f"context_parallel.ulysses_size is {ulysses!r:.80}, ring_size {ring!r:.80}, size "
                f"{there.get('size')!r:.80}; expected the ulysses_size M of ringtile's scheme usp:M, "
                f"and their product as the size"
            )
        return f"usp:{ulysses}"
    return rotation or scheme


def _meaning(there: dict[str, Any], key: str, meanings: Mapping[str, str | None]) -> str | None:
    """Takes a key of axolotl out of the mapping. Returns ringtile's word for its value. ConfigError: it has none."""
    value = there.pop(key, None)
    if value is None:
        return None
    if not isinstance(value, str) or value not in meanings:
        raise ConfigError(
            f"context_parallel.{key} is {value!r:.80}, which ringtile does not have; expected one of "
            f"{', '.join(meanings)}, or ringtile's own keys (context_parallel_scheme, layout)"
        )
    return meanings[value]


def _config(cfg: Mapping[str, Any]) -> Config:
    return Config.load(dict(cfg.get(_SECTION) or {}))
