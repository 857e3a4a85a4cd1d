"""Reads YAML files that may be broken or hostile: what they hold is plain and bounded, or refused by line or key.

Plain: mappings with string or number keys, none given twice; sequences, strings, 64-bit integers, floats, booleans,
null. Anchors and `<<` work; tags and recursion are refused. Dates stay strings.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ringtile.errors import ConfigError, shown

MAX_BYTES = 2**20
MAX_VALUES = 100_000  # after aliases are expanded: a file of 1 kB can name 2^60
MAX_DEPTH = 50
_PREFIX = "tag:yaml.org,2002:"
_TAGS = {_PREFIX + name for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_OCTAL = re.compile("[-+]?0[0-7_]+")
_UNSAFE_TEXT = re.compile("[\0\ud800-\udfff]")


def read_yaml(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML file. ConfigError: unreadable, not YAML, too large, no mapping, or a value is not plain."""
    try:
        # Without waiting for the writer of a FIFO, who may never come.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError("is no regular file; expected a readable YAML file")
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{getattr(error, 'strerror', error)}; expected a readable YAML file") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"holds more than {MAX_BYTES} bytes; expected a configuration, not data")
    try:
        values = _load(content.decode())
    except RecursionError:
        raise ConfigError(f"not YAML: nested too deeply; expected at most {MAX_DEPTH} levels") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"not YAML: {line}{', '.join(filter(None, (error.context, error.problem)))}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"holds {type(values).__name__}; expected a mapping of keys to values")
    _check_values(values, "")
    return values


class _Loader(yaml.SafeLoader):
    """SafeLoader for the plain types; every value that cannot be read is an error with a line."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = node.tag.removeprefix(_PREFIX)
        if node.tag not in _TAGS:
            raise _error(f"the tag {shown(node.tag)}; expected a plain value", node)
        self._check_number(node, kind)
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise _error(f"{shown(node.value)} is no {kind}; expected a plain value", node) from error

    def _check_number(self, node: yaml.Node, kind: str) -> None:
        """Refuse what YAML 1.1 takes for a number, and its reader for another one or for text."""
        if kind == "int" and _OCTAL.fullmatch(node.value):
            raise _error(
                f"{node.value} is octal in YAML 1.1; expected a number without a leading 0, or text in quotes", node
            )
        if kind in ("int", "float") and ":" in node.value:
            raise _error(
                f"{node.value} is a number to the base of 60 in YAML 1.1; expected a decimal one, or text in quotes",
                node,
            )


_Loader.yaml_implicit_resolvers = {  # a date is a string
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _load(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, {}, 0)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_size(node: yaml.Node, sizes: dict[yaml.Node, int], depth: int) -> int:
    """The number of values that a node stands for, aliases expanded. Refuses repeated keys, recursion and bombs."""
    if node in sizes:
        if not sizes[node]:
            raise _error("an alias of a value within itself", node)
        return sizes[node]
    if depth > MAX_DEPTH:
        raise _error(f"nested too deeply; expected at most {MAX_DEPTH} levels", node)
    sizes[node] = 0  # under way
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            children += (key, value)
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _error(f"the key {shown(key.value)} is given twice; expected it once", key)
                seen.add((key.tag, key.value))
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    size = 1 + sum(_check_size(child, sizes, depth + 1) for child in children)
    if size > MAX_VALUES:
        raise _error(f"{size} values once aliases are expanded; expected at most {MAX_VALUES}", node)
    sizes[node] = size
    return size


def _error(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _check_values(value: Any, key: str) -> None:
    """Raises ConfigError for what no key takes: NaN, integers over 64 bits, text that no file name can hold."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            _check_values(name, f"the key {shown(name)}")
            _check_values(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _check_values(each, f"{key}.{index}")
    elif isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{key} is NaN; expected a number")
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{key} is an integer of {value.bit_length()} bits; expected at most 64")
    elif isinstance(value, str) and _UNSAFE_TEXT.search(value):
        raise ConfigError(f"{key} is {shown(value)}; expected text without NUL and lone surrogates")
