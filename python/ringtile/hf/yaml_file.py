"""Reads YAML files of settings: safe_load, but no key may be given twice, and numbers are those of YAML 1.2."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ringtile.errors import ConfigError

MAX_BYTES = 2**20
MAX_MERGED = 10_000  # keys that `<<` may copy in a file
MAX_DIGITS = 100  # of a number: YAML 1.1 reads 1:1:1:1 in a time that grows with their square
# YAML 1.1, which PyYAML reads, takes 1e-3 for text, 010 for 8, 1:30 for 90 and 2026-01-01 for a date.
_PATTERNS = {"timestamp": "(?!)", "int": "[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+"}
_PATTERNS["float"] = r"[-+]?((0|[1-9]\d*)(\.\d*|(?=[eE]))|\.\d+)([eE][-+]?\d+)?|[-+]?\.(?i:inf|nan)"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, re.compile(f"({_PATTERNS[tag[18:]]})$") if tag[18:] in _PATTERNS else own) for tag, own in found]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()  # the tags are tag:yaml.org,2002:int ...
    }

    num_merged = 0

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: a number of more than {MAX_DIGITS} digits")
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise yaml.YAMLError(f"line {node.start_mark.line + 1}: the key {key.value!r} is given twice")
                names.add(key.value)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace `<<` by the keys of its mappings. Mappings of mappings may double in size with each."""
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(each, yaml.MappingNode):
                        self.flatten_mapping(each)
                        self.num_merged += max(1, len(each.value))
                        if self.num_merged > MAX_MERGED:
                            line = node.start_mark.line + 1
                            raise yaml.YAMLError(f"line {line}: `<<` copies more than {MAX_MERGED} keys")
        super().flatten_mapping(node)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text, by the rules of `read_yaml`. yaml.YAMLError."""
    return yaml.load(text, _Loader)


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Return the mapping in a YAML file. ConfigError: unreadable, not YAML, over 1 MiB, no mapping, or a key twice."""
    try:
        if len(content := path.read_bytes()) > MAX_BYTES:
            raise OSError(0, f"holds more than {MAX_BYTES} bytes")
        if isinstance(values := yaml.load(content, _Loader), Mapping):
            return values
    except Exception as error:
        problem = getattr(error, "strerror", None) or f"not YAML: {' '.join(str(error).split())}"
        raise ConfigError(f"{problem}; expected a readable YAML file") from error
    raise ConfigError(f"holds {type(values).__name__}; expected a mapping of keys to values")
