"""`ringtile config [KEY]`: the keys of RUN.yaml with their types, defaults and meanings; `--schema`: for editors."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import types
import typing
from typing import Any, NamedTuple

import yaml
from transformers import TrainingArguments

from ringtile.cli import Outcome
from ringtile.cli.recipe import DEFAULTS, DataConfig, training_types
from ringtile.errors import ConfigError
from ringtile.hf.config import Config, in_words, nearest_key

_JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null", dict: "object"}
_CLOSED = {"type": "object", "additionalProperties": False}


class Key(NamedTuple):
    """A key of RUN.yaml: its type as an annotation, its default (MISSING: it must be given), its meaning in words."""

    kind: Any
    default: Any
    meaning: str

    def text(self, name: str) -> str:
        """Return the key as two lines."""
        default = "must be given"
        if self.default is not dataclasses.MISSING:
            default = "default " + yaml.safe_dump(self.default, default_flow_style=True).split("\n")[0]
        return f"{name}: {in_words(self.kind)}; {default}\n    {self.meaning}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", nargs="?", metavar="KEY", help="as tile_tokens or training.max_steps; all without it")
    parser.add_argument("--schema", action="store_true", help="print a JSON Schema of RUN.yaml instead")


def run(args: argparse.Namespace) -> Outcome:
    """Print one key, ringtile's keys and the data's, or the schema. ConfigError: an unknown key."""
    known = keys()
    if args.schema:
        print(json.dumps(schema(known), indent=1))
        return Outcome(0, schema(known))
    if args.key is not None and args.key not in known:
        raise ConfigError(f"unknown key {args.key[:80]}: {nearest_key(args.key, known)}")
    named = [args.key] if args.key else [name for name in known if not name.startswith("training.")]
    print("\n".join(known[name].text(name) for name in named))
    if not args.key:
        print("training.KEY: every argument of transformers' TrainingArguments, as training.learning_rate")
    return Outcome(0, {name: {"type": in_words(known[name].kind), "meaning": known[name].meaning} for name in named})


def keys() -> dict[str, Key]:
    """Return every key of RUN.yaml, with dots between sections."""
    found = {
        "model": Key(str | dict, dataclasses.MISSING, "a folder or a hub name; or model_type and keys of its config"),
    }
    for section in (DataConfig, Config):
        kinds, meanings = typing.get_type_hints(section, include_extras=True), meanings_of(section)
        for field in dataclasses.fields(section):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            found[section.prefix + field.name] = Key(kinds[field.name], default, meanings[field.name])
    arguments = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    for name, kind in training_types().items():
        field = arguments[name]
        default = field.default if field.default_factory is dataclasses.MISSING else None
        meaning = " ".join(str(field.metadata.get("help", "see transformers' TrainingArguments")).split())
        found[f"training.{name}"] = Key(kind, DEFAULTS.get(name, getattr(default, "value", default)), meaning)
    return found


def meanings_of(section: type) -> dict[str, str]:
    """Return what the list in a section's docstring says of each key."""
    rows = re.findall(r"^ *- ([\w, ]+): (.*?)(?=\n *- |\n\n|\Z)", section.__doc__ or "", re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()).rstrip(".") for names, text in rows for name in names.split(", ")}


def schema(known: dict[str, Key]) -> dict[str, Any]:
    """Return the JSON Schema of RUN.yaml. Names of other libraries for ringtile's keys are not in it."""
    properties: dict[str, Any] = {"context_parallel": {"type": "object"}}
    for name, key in known.items():
        section, _, inner = name.rpartition(".")
        at = properties.setdefault(section, _CLOSED | {"properties": {}})["properties"] if section else properties
        at[inner] = schema_of(key.kind) | {"description": key.meaning}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "properties": properties} | _CLOSED


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a value of an annotation; {} for kinds that JSON has no word for."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema_of(each) for each in of]}
    if origin is typing.Annotated:
        return schema_of(of[0]) | {"minimum": of[1], "maximum": of[2]}
    if origin is typing.Literal:
        return {"enum": [*of]}
    if origin is list:
        return {"type": "array", "items": schema_of(of[0])}
    name = _JSON_TYPES.get(origin or kind)
    return {"type": name} if name else {}
