"""ringtile's configuration: one frozen object with the same keys in Python, YAML and on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, Union, get_args, get_origin, get_type_hints

from ringtile.errors import ConfigError, InputError, shown
from ringtile.hf.yaml_file import read_yaml
from ringtile.scheme import Scheme

logger = logging.getLogger("ringtile")

MAX_KEY = 80  # characters of an unknown key that an error shows
MAX_NAMED = 20  # names that an error lists
MAX_PROBLEMS = 5  # keys that an error explains: a file of another program has thousands
# The keys that may stand in a mapping `context_parallel`, without the prefix.
NESTED = {"size": "context_parallel_size", "scheme": "context_parallel_scheme", "layout": "layout"}
NESTED |= {name: name for name in ("ulysses_size", "ring_size")}
# Keys of other libraries that can mean nothing else: taken, with what they say besides.
_SIZE: tuple[str, dict[str, Any]] = ("context_parallel_size", {})
TAKEN = {
    **dict.fromkeys(("cp_size", "cp_degree", "cp_world_size", "context_parallel_degree"), _SIZE),
    **dict.fromkeys(("sp_size", "sequence_parallel_size", "sequence_parallel_degree"), _SIZE),
    "ulysses_sequence_parallel_size": ("context_parallel_size", {"context_parallel_scheme": "ulysses"}),
    "offload_activations": ("activation_offloading", {}),
}
# Keys of accelerate, torch and axolotl whose values ringtile has other words for: taken too.
_ROTATIONS = ("context_parallel_scheme", {"allgather": "all_gather", "alltoall": "ring"})
WORDS = {
    **dict.fromkeys(("cp_comm_strategy", "rotate_method"), _ROTATIONS),
    "load_balance": ("layout", {"head_tail": "zigzag", "none": "contiguous"}),
}
# Keys whose values mean something else, or only a part: suggested.
_ELSEWHERE = {
    **dict.fromkeys(("cp", "ulysses_degree", "ring_degree"), "context_parallel_size"),
    **dict.fromkeys(
        ("cp_backend", "sp_backend", "cp_comm_type", "scheme", "ring_attn_func"), "context_parallel_scheme"
    ),
    **dict.fromkeys(("ulysses_size", "ring_size"), "context_parallel_scheme"),
    **dict.fromkeys(("load_balancer", "load_balancing", "sharding_strategy"), "layout"),
    **dict.fromkeys(("activation_offload", "activation_cpu_offload"), "activation_offloading"),
}
# Names that were keys, and what to do instead.
_GONE = {
    **dict.fromkeys(
        ("attention_kernel", "attn_implementation", "attn_backend", "attention_backend"),
        "set the environment variable RINGTILE_ATTENTION_KERNEL",
    ),
    "loss_tile_tokens": "set tile_tokens, the most tokens of any tile",
    "stream_tokens": "set tile_tokens, which the chunks of streamed layers have too",
    "log_metrics": "give the Trainer the callback of examples/metrics.py",
    "gc_steps": "give the Trainer ringtile.CollectGarbageCallback(steps)",
    "timeout_seconds": "set ddp_timeout in TrainingArguments, after which a silent rank counts as lost",
    "tiled_mlp_num_shards": "set tile_tokens, or call ringtile.tile_mlps(model, num_shards=...)",
    "tiled_mlp_use_original_mlp": "call ringtile.tile_mlps(model, use_original_mlp=True)",
}
# Under `reproducible`: of keys with several values, those whose bits do not depend on the number of ranks; auto is the
# first. And the keys that it needs.
_SAME_BITS = {
    "context_parallel_scheme": ("ulysses",),
    "layout": ("contiguous", "zigzag"),
}
_IN_CHUNKS = ("stream", "tiled_loss")
Count: TypeAlias = Annotated[int, 1, 2**31 - 1]  # its least and its largest value


class Section:
    """A mapping in a YAML file with a fixed set of keys: the base of frozen dataclasses with keyword arguments.

    given holds the keys that were set, with their values. ConfigError names each key that is unknown or missing, or
    whose value is of a wrong type or out of range.
    """

    prefix: ClassVar[str] = ""  # put before the section's keys in errors, e.g. "data."
    given: dict[str, Any] = {}  # noqa: RUF012 (no field: a dict of each object's own)
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __new__(cls, **values: Any) -> Self:
        hints, unset = get_type_hints(cls, include_extras=True), dataclasses.MISSING
        check_types(values, {name: hints[name] for name in cls.names()}, cls.prefix)
        for name, field in cls.__dataclass_fields__.items():
            if name not in values and field.default is unset and field.default_factory is unset:
                raise ConfigError(f"{cls.prefix}{name} is missing; expected a value for it")
        section = super().__new__(cls)
        object.__setattr__(section, "given", values)
        return section

    def __reduce__(self) -> Any:
        return functools.partial(type(self), **self.given), ()

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all keys."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values, which are not checked."""
        copy = type(self)(**self.given)
        for name, value in values.items():
            object.__setattr__(copy, name, value)
        copy.given.update(values)
        return copy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Selects what `ringtile.enable` turns on. The defaults ask for nothing, and nothing is replaced.

    - context_parallel_size: ranks that share one sequence; 1 is off.
    - dynamic_context_parallel: the rows of as many processes are one packed row, of whose documents each is on as many
      ranks as balance needs; without context_parallel_size, of all processes.
    - layout: who holds which tokens; auto is zigzag for one document a row, balanced for more.
    - context_parallel_scheme: how those ranks share the work of attention: ring, all_gather, ulysses, usp, usp:M, auto.
    - keep_attention: whether checkpointed layers keep what attention and recurrences gave; auto: in a tenth of the
      device's memory.
    - latents: whether a ring sends latents of keys where they are fewer numbers.
    - tiled_mlp, tiled_norm, tiled_loss: run MLPs, RMSNorms, the loss in tiles of tokens.
    - tile_tokens: tokens of a tile of the MLP, a norm and the loss, and of a chunk of a streamed layer.
    - stream: run layers on chunks of tokens.
    - reproducible: the same bits on any number of ranks.
    - shared_prefix: compute what rows of a batch begin alike with once.
    - activation_offloading: keep the inputs of checkpointed layers in host memory.
    - per_token, per_row: names of tensors of one's own with an entry for each token, or each row.
    - first_batch_check: compare the ranks with one process on the first batch; true is auto.

    ConfigError, naming the key: it is unknown, has a wrong type or value, or contradicts another key.
    """

    context_parallel_size: Count = 1
    dynamic_context_parallel: bool = False
    layout: Literal["auto", "zigzag", "contiguous", "striped", "per_document", "balanced", "whole_documents"] = "auto"
    context_parallel_scheme: str = "ring"
    keep_attention: bool | Literal["auto"] = "auto"
    latents: bool = True
    tiled_mlp: bool = False
    tiled_norm: bool = False
    tile_tokens: Count = 16384
    tiled_loss: bool = False
    stream: bool = False
    reproducible: bool = False
    shared_prefix: bool = False
    activation_offloading: bool = False
    per_token: list[str] = dataclasses.field(default_factory=list)
    per_row: list[str] = dataclasses.field(default_factory=list)
    first_batch_check: bool | Literal["auto", "require"] = "auto"

    def __post_init__(self) -> None:
        if self.reproducible:
            self._take_same_bits()
        if self.dynamic_context_parallel and self.shared_prefix:
            raise ConfigError("dynamic_context_parallel and shared_prefix are true; expected one of the two")
        if self.dynamic_context_parallel and self.given.get("context_parallel_size") == 1:
            raise ConfigError(
                "dynamic_context_parallel is true and context_parallel_size is 1; expected more, or no size"
            )
        try:
            scheme = Scheme.parse(self.context_parallel_scheme)
            if "context_parallel_size" in self.given:  # else accelerate's ParallelismConfig may give it
                scheme.check(self.context_parallel_size)
        except InputError as error:
            raise ConfigError(f"context_parallel_scheme: {error}") from None
        if "tile_tokens" in self.given and not (self.tiled_mlp or self.tiled_norm or self.tiled_loss or self.stream):
            raise ConfigError(
                f"tile_tokens is {self.tile_tokens} but nothing is tiled; set tiled_mlp: true, tiled_norm: true, "
                f"tiled_loss: true or stream: true, or remove tile_tokens"
            )

    def _take_same_bits(self) -> None:
        """Set what `reproducible` asks for. ConfigError: a key asks for something else."""
        for name, values in _SAME_BITS.items():
            value = self.given.get(name, "auto")
            value = values[0] if value == "auto" else value
            if value not in values:
                raise ConfigError(
                    f"reproducible is true and {name} is {shown(value)}, whose bits depend on the number of ranks; "
                    f"expected {' or '.join(values)}"
                )
            object.__setattr__(self, name, value)
            self.given[name] = value
        for name in _IN_CHUNKS:
            if not getattr(self, name):
                raise ConfigError(f"reproducible is true and {name} is not; expected {name}: true, in the same chunks")
        for name in ("shared_prefix", "activation_offloading", "dynamic_context_parallel"):
            if getattr(self, name):
                raise ConfigError(f"reproducible and {name} are true, not shown to be exact; expected one of the two")
        if (size := self.context_parallel_size) & (size - 1):
            raise ConfigError(
                f"reproducible is true and context_parallel_size is {size}, by which gradients are not divided without "
                f"rounding; expected a power of two"
            )

    @property
    def asks(self) -> bool:
        """Return whether a Trainer trains otherwise than without ringtile."""
        tiled = self.tiled_mlp or self.tiled_norm or self.tiled_loss
        return self.attends or tiled or self.activation_offloading

    @property
    def attends(self) -> bool:
        """Return whether attention is ringtile's."""
        return self.context_parallel_size > 1 or self.shared_prefix or self.stream

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | os.PathLike[str]) -> Config:
        """Return a Config from a Config, a mapping, or the path of a YAML file.

        ConfigError: the file is missing, is not YAML, or does not hold a mapping of known keys.
        """
        if isinstance(source, Config):
            return source
        if isinstance(source, Mapping):
            return cls(**{str(key): value for key, value in flat(source).items()})
        path = Path(source)
        try:
            return cls.load(read_yaml(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


def flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys in ringtile's words: those of `context_parallel` beside the others, other libraries' names
    replaced, which the log says. ConfigError names the key."""
    keys = _in_our_words(given)
    nested = keys.pop("context_parallel", {})
    if not isinstance(nested, Mapping):
        raise ConfigError(f"context_parallel is {shown(nested)}; expected a mapping with {', '.join(NESTED)}")
    check_keys(nested, NESTED, "context_parallel.")
    for name, value in nested.items():
        if keys.setdefault(NESTED[name], value) != value:
            raise ConfigError(
                f"context_parallel.{name} is {shown(value)} and {NESTED[name]} is {shown(keys[NESTED[name]])}; "
                f"expected one value, given in one place"
            )
    return _with_scheme(keys)


def _with_scheme(keys: dict[str, Any]) -> dict[str, Any]:
    """ulysses_size neighbors share heads, ring_size such groups form a ring: the scheme usp:M. ConfigError."""
    if not (sizes := {name: keys.pop(name) for name in ("ulysses_size", "ring_size") if name in keys}):
        return keys
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} is {shown(value)}; expected an integer of at least 1")
    said = " and ".join(f"{name} is {shown(value)}" for name, value in sizes.items())
    if len(sizes) == 2:
        keys.setdefault("context_parallel_size", sizes["ulysses_size"] * sizes["ring_size"])
    size = keys.get("context_parallel_size")  # without one, accelerate's ParallelismConfig may give it
    if "ring_size" in sizes and (type(size) is not int or size % sizes["ring_size"]):
        raise ConfigError(f"{said} and context_parallel_size {shown(size)}; expected a multiple of ring_size")
    ulysses = sizes.get("ulysses_size") or size // sizes["ring_size"]
    if size != ulysses * sizes.get("ring_size", 1) and "ring_size" in sizes:
        raise ConfigError(f"{said} and context_parallel_size {size}; expected ulysses_size x ring_size")
    if (scheme := keys.setdefault("context_parallel_scheme", f"usp:{ulysses}")) != f"usp:{ulysses}":
        raise ConfigError(f"{said} and context_parallel_scheme {shown(scheme)}; expected usp:{ulysses}, or one of them")
    return keys


def _in_our_words(given: Mapping[str, Any]) -> dict[str, Any]:
    keys = {name: value for name, value in given.items() if name not in TAKEN and name not in WORDS}
    for name in [name for name in given if name not in keys]:
        if name in TAKEN:
            key, besides = TAKEN[name]
            said = {key: given[name], **besides}
        else:
            key, meanings = WORDS[name]
            if not isinstance(given[name], str) or given[name] not in meanings:
                expected = ", ".join(f"{theirs} ({key}: {ours})" for theirs, ours in meanings.items())
                raise ConfigError(f"{name} is {shown(given[name])}; expected {expected}, or {key} itself")
            said = {key: meanings[given[name]]}
        for ours, value in said.items():
            if keys.setdefault(ours, value) != value:
                raise ConfigError(
                    f"{name} is {shown(given[name])}, which means {ours}: {shown(value)}, and {ours} is "
                    f"{shown(keys[ours])}; expected one value, given in one place"
                )
        if os.environ.get("RANK", "0") == "0":
            words = ", ".join(f"{ours}: {shown(value)}" for ours, value in said.items())
            logger.warning(f"the key {name} is taken as {words}")
    return keys


def check_keys(given: Collection[str], known: Collection[str], prefix: str = "") -> None:
    """ConfigError names the first unknown key, and the nearest known one."""
    for key in given:
        if key not in known:
            raise ConfigError(f"unknown key {prefix}{str(key)[:MAX_KEY]}: {nearest_key(key, known)}")


def nearest_key(key: str, valid: Collection[str]) -> str:
    """Completes the error for an unknown key: a valid key that is close, or all of them, or the closest of many."""
    key, names = str(key)[:MAX_KEY], sorted(valid)
    if key in _GONE and "tile_tokens" in names:
        return _GONE[key]
    if (same := _ELSEWHERE.get(key) or TAKEN.get(key, ("", {}))[0]) in names:
        return f"did you mean {same}?"
    if close := difflib.get_close_matches(key, names, n=1):
        return f"did you mean {close[0]}?"
    if len(names) > MAX_NAMED:
        return f"the closest are {', '.join(difflib.get_close_matches(key, names, n=3, cutoff=0.0))}"
    return f"expected one of {', '.join(names)}"


# ---- types ---------------------------------------------------------------------------------------


def check_types(values: Mapping[str, Any], types: Mapping[str, Any], prefix: str = "") -> None:
    """ConfigError names unknown keys, and values not of their type, as an annotation says it; nothing is converted."""
    wrong = []
    for name, value in values.items():
        if name not in types:
            wrong.append(f"unknown key {prefix}{name[:MAX_KEY]}: {nearest_key(name, types)}")
        elif not _is_of(value, types[name]):
            yes = " (without quotes, YAML reads yes, on, no and off as booleans)" if isinstance(value, bool) else ""
            wrong.append(f"{prefix}{name} is {shown(value)}; expected {in_words(types[name])}{yes}")
    if wrong:
        more = len(wrong) - MAX_PROBLEMS
        raise ConfigError("; ".join(wrong[:MAX_PROBLEMS] + [f"and {more} more such keys"] * (more > 0)))


def _is_of(value: Any, kind: Any) -> bool:
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_of(value, each) for each in of)
    if origin is Annotated:
        return _is_of(value, of[0]) and bool(of[1] <= value <= of[2])
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in of)
    if kind is float:
        return type(value) is int or (type(value) is float and math.isfinite(value))
    if kind in (int, str, bool):
        return type(value) is kind
    if origin is list:
        return isinstance(value, list) and all(_is_of(each, of[0]) for each in value)
    return isinstance(value, origin or kind)


_IN_WORDS: dict[Any, str] = {int: "an integer", float: "a finite number", str: "text", bool: "true or false"}
_IN_WORDS |= {dict: "a mapping", list: "a list", type(None): "nothing"}


def in_words(kind: Any) -> str:
    """Return what a value of an annotation is, as errors say it."""
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(in_words(each) for each in of)
    if origin is Annotated:
        return f"{in_words(of[0])} of at least {of[1]}" + (f", at most {of[2]}" if of[2] < 2**31 - 1 else "")
    if origin is Literal:
        *first, last = (repr(each) for each in of)
        return ", ".join(first) + " or " * bool(first) + last
    return _IN_WORDS.get(origin or kind) or str(getattr(kind, "__name__", kind))
