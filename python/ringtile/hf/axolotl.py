"""The axolotl plugin: `plugins: [ringtile.hf.axolotl.RingtilePlugin]` and ringtile's keys in axolotl's YAML file.

axolotl has keys of the same names (context_parallel_size, tiled_mlp, ...) that start ring-flash-attn and its own tiled
MLP. The plugin reads the file first and moves the keys under `ringtile`, where they are validated and where
`ringtile.enable` finds them once the Trainer is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, field_validator

from ringtile.errors import ConfigError
from ringtile.hf.config import TAKEN, WORDS, Config, Count, Section, flat
from ringtile.hf.features.mlp import tile_mlps
from ringtile.hf.model import base_model
from ringtile.hf.trainer import enable

logger = logging.getLogger("ringtile")

_SECTION = "ringtile"
# What axolotl's mapping `context_parallel` may say since 0.20, in ringtile's words; None: as ringtile does by default.
# Source: axolotl/integrations/context_parallel/args.py of 0.20.0 and 0.21.0.
_BACKENDS = {"auto": "auto", "ring": "ring", "ulysses": "ulysses", "usp": None}
_LAYOUTS = {"auto": None, **WORDS["load_balance"][1]}
_KERNELS = {"auto": None}
_SHARDERS = {True: None, False: None}  # where axolotl cuts the shards
_OFFLOADS = (True, "legacy", "hidden_states")  # the ways of axolotl's activation_offloading into host memory
_LOSSES = ("cut_cross_entropy", "liger_fused_linear_cross_entropy", "chunked_cross_entropy")  # without all logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys(Section):
    """The plugin's keys beside those of ringtile.Config: axolotl's for its tiled MLP, and a callback's."""

    tiled_mlp_num_shards: Count | None = None  # tiles per MLP call, instead of tile_tokens
    tiled_mlp_use_original_mlp: bool = False  # True: the module's own forward even where a GLU kernel is exact


class RingtileArgs(BaseModel):
    """Adds to axolotl's configuration the mapping `ringtile`, with the keys of `ringtile.Config` and `Keys`."""

    ringtile: dict[str, Any] | None = None

    @field_validator("ringtile")
    @classmethod
    def _is_a_config(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        """Raises ConfigError naming the key; pydantic wraps it in its ValidationError."""
        if value is not None:
            _split(value)
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
        section = flat(dict(cfg.get(_SECTION) or {}))
        if section and cfg.get("use_ray") and cfg.get("context_parallel_size") == 1:
            del cfg["context_parallel_size"]  # Ray workers register again, after axolotl's validation added the default
        for key, value in flat(_take(cfg)).items():
            if section.setdefault(key, value) != value:
                raise ConfigError(
                    f"{key} is {value!r:.80} but {key} is {section[key]!r:.80} in the mapping {_SECTION}; expected one "
                    f"value, given in one place"
                )
        experts, size = cfg.get("expert_parallel_size") or 1, section.get("context_parallel_size", 1)
        if experts > 1 and size != 1:
            raise ConfigError(
                f"expert_parallel_size is {experts} and context_parallel_size {size}; expected one of them to be 1: "
                f"axolotl's experts over ranks run on DeepEP's GPU kernels, which were not compared with one process "
                f"(transformers' own, DistributedConfig(ep_size=...), were)"
            )
        on_host = section.get("stream") and section.get("activation_offloading")  # what a loss takes
        if size != 1 or section.get("tiled_loss") or on_host:
            _replace_losses(cfg, section)
        cfg[_SECTION] = section

    def get_input_args(self) -> str:
        return "ringtile.hf.axolotl.RingtileArgs"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        """Divides axolotl's rows per step, which count every rank, by the group size: warm-up and saving use them."""
        config, _ = _split(cfg.get(_SECTION))
        if not self._batch_size_is_right and cfg.get("world_size", 1) > 1:
            cfg["batch_size"] //= config.context_parallel_size
        self._batch_size_is_right = True

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        if cfg.get("orpo_alpha"):
            raise ConfigError("orpo_alpha is set; remove it: its loss compares full sequences and a rank has a shard")
        config, keys = _split(cfg.get(_SECTION))
        if keys.tiled_mlp_num_shards is None and not keys.tiled_mlp_use_original_mlp:
            patches = enable(trainer, config)
        else:
            number, own = keys.tiled_mlp_num_shards, keys.tiled_mlp_use_original_mlp
            with contextlib.ExitStack() as on_failure:
                tiles = tile_mlps(base_model(trainer.model), config.tile_tokens, number, own)
                on_failure.callback(tiles.restore)
                patches = enable(trainer, config.changed(tiled_mlp=False))
                on_failure.pop_all()
            patches.on_restore(tiles.restore)
        # Since 0.21: for how many ranks balance_labels picks rows.
        if config.context_parallel_size > 1 and hasattr(trainer, "_data_parallel_size"):
            patches.wrap(trainer, "_data_parallel_size", lambda original: original() // config.context_parallel_size)


def _take(cfg: MutableMapping[str, Any]) -> dict[str, Any]:
    """Takes ringtile's keys, and other libraries' names for them, out of axolotl's sight. Returns them."""
    left: set[str] = set()
    if cfg.get("activation_offloading") in _OFFLOADS:
        cfg["activation_offloading"] = True
    else:
        left.add("activation_offloading")
    names = dict.fromkeys((*Config.names(), *Keys.names(), *TAKEN))
    for key in map(str, cfg.keys() - names):
        close = difflib.get_close_matches(key, names, n=1, cutoff=0.88)  # closer than any key of axolotl's own
        if close and os.environ.get("RANK", "0") == "0":
            logger.warning(f"{key}: did you mean {close[0]}? axolotl drops a key that it does not know")
    return {name: cfg.pop(name) for name in names if name not in left and cfg.get(name) is not None}


def _replace_losses(cfg: MutableMapping[str, Any], section: dict[str, Any]) -> None:
    """Has tiled_loss take the place of axolotl's losses, which would take a shard for a sequence, and whose kernels
    read no host memory."""
    listed = any(str(plugin).endswith("CutCrossEntropyPlugin") for plugin in cfg.get("plugins") or ())
    if listed and cfg.get("cut_cross_entropy") is None:
        cfg["cut_cross_entropy"] = True  # what its plugin takes it for
    for name in _LOSSES:
        if not cfg.get(name):
            continue
        if section.setdefault("tiled_loss", True) is not True:
            raise ConfigError(
                f"{name} is on and tiled_loss is {section['tiled_loss']!r:.80}; expected tiled_loss: true, which takes "
                f"its place on shards and with hidden states on the host, or {name}: false"
            )
        cfg[name] = False
        if os.environ.get("RANK", "0") == "0":
            logger.warning(f"{name} is taken as tiled_loss: true")


def _translate(cfg: MutableMapping[str, Any]) -> None:
    """Takes the mapping `context_parallel` out of axolotl's sight, whose own context parallelism would run too."""
    given = cfg.pop("context_parallel", None)
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ConfigError(f"context_parallel is {given!r:.80}; expected a mapping with size, backend and load_balance")
    there = {key: value for key, value in given.items() if value is not None}
    _meaning(there, "shard_in_collator", _SHARDERS)
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
    backend, sized = there.get("backend"), there.keys() & {"ulysses_size", "ring_size"}
    scheme = _meaning(there, "backend", _BACKENDS)
    rotation = _meaning(there, "rotate_method", WORDS["rotate_method"][1])
    if rotation is not None and backend != "ring":
        raise ConfigError(f"context_parallel.rotate_method is set and backend is {backend!r}; expected backend: ring")
    if backend in ("ring", "ulysses") and sized:
        raise ConfigError(f"context_parallel.ulysses_size or ring_size is set; backend: {backend} says it, remove them")
    if backend == "usp" and not sized:
        raise ConfigError("context_parallel.backend is 'usp'; expected ulysses_size too: ranks that share heads")
    return None if sized else rotation or scheme


def _meaning(there: dict[str, Any], key: str, meanings: Mapping[Any, str | None]) -> str | None:
    """Takes a key of axolotl out of the mapping. Returns ringtile's word for its value. ConfigError: it has none."""
    value = there.pop(key, None)
    if value is None:
        return None
    if not isinstance(value, str | bool) or value not in meanings:
        raise ConfigError(
            f"context_parallel.{key} is {value!r:.80}, which ringtile does not have; expected one of "
            f"{', '.join(map(str, meanings))}, or ringtile's own keys (context_parallel_scheme, layout)"
        )
    return meanings[value]


def _split(section: Mapping[str, Any] | None) -> tuple[Config, Keys]:
    """The two kinds of keys in the mapping `ringtile`. ConfigError names the key."""
    given = flat(dict(section or {}))
    own = {name: given.pop(name) for name in Keys.names() if name in given}
    config, keys = Config.load(given), Keys(**own)
    for name in own:
        if not config.tiled_mlp:
            raise ConfigError(
                f"{name} is {own[name]!r:.80} but tiled_mlp is false; set tiled_mlp: true or remove {name}"
            )
    return config, keys
