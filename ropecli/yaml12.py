"""Reads recipes and the values of `--set` as YAML 1.2. PyYAML reads 1.1, in which 1:30 is 90 and 0100 is 64."""

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Plain values by YAML 1.2's core schema, and 1.1's merge keys (<<). A key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.YAMLError(f"the key {twice!r} is given twice")
        return super().construct_mapping(node, deep)

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_Loader.yaml_implicit_resolvers = {}  # without 1.1's
for _kind, _pattern in {
    "null": r"|~|null|Null|NULL",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole_number)


def read_yaml(text: str) -> Any:
    """The value of a document. Raises ValueError for what is no YAML, names a key twice or is nested too deep."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
