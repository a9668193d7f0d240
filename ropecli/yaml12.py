"""Parses recipes and `--set` values as YAML 1.2.

PyYAML parses YAML 1.1, where 1:30 is 90 and 0100 is 64.
"""

import re
from typing import Any

import yaml

from ropecli.errors import shown


class _Loader(yaml.SafeLoader):
    """Values of the YAML 1.2 core schema, numbers in decimal. A repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set()
        for key in (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key in keys:
                raise ValueError(f"key {shown(key)} is given twice")
            keys.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}  # drop those of YAML 1.1
for _kind, _pattern in {
    "null": r"|~|null|Null|NULL",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


def read_yaml(text: str, loader: type[yaml.SafeLoader] = _Loader) -> Any:
    """Parse a document. Raises ValueError for invalid YAML or a repeated key."""
    try:
        return yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def read_own_yaml(text: str) -> Any:
    """Parse what yaml.safe_dump wrote, which is YAML 1.1. Raises ValueError."""
    return read_yaml(text, yaml.SafeLoader)
