"""Parses recipes and `--set` values as YAML 1.2, and token counts such as 32k.

PyYAML parses YAML 1.1, where 1:30 is 90 and 0100 is 64. Files may come from strangers: a few lines with merge keys or
aliases can stand for billions of values.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from ropecli.errors import shown

_DEEPEST = 64
_LARGEST = 2**23
"""Maximum letters of all values, aliases repeated; a value counts as 16 at least."""


class BoundedLoader(yaml.SafeLoader):
    """SafeLoader without merge keys."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise ValueError("merge keys (<<) are not supported")


class _Loader(BoundedLoader):
    """Values of the YAML 1.2 core schema. A repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set()
        for key in (key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key in keys:
                raise ValueError(f"key {shown(key)} is given twice")
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_Loader.yaml_implicit_resolvers = {}  # drop those of YAML 1.1
for _kind, _pattern in {
    "null": r"|~|null|Null|NULL",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(rf"(?:{_pattern})\Z"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole_number)


def read_yaml(text: str, loader: type[BoundedLoader] = _Loader) -> Any:
    """Parse a document. Raises ValueError for invalid YAML, a merge key, a repeated key, or too many or deep values."""
    try:
        document = yaml.load(text, loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    except (KeyError, AttributeError) as error:  # PyYAML, for a value that does not fit its tag: !!bool x
        raise ValueError(f"a value does not fit its tag ({error})") from error
    letters = 0
    for value in values(document):
        letters += max(16, len(value) if isinstance(value, str) else 0)
        if letters > _LARGEST:
            raise ValueError("it has too many values; aliases (*name) count each time")
    return document


def values(value: Any) -> Iterator[Any]:
    """Iterate over all nested values, including lists and objects. Raises ValueError if nested too deep."""
    open_values = [iter([value])]
    while open_values:
        for inner in open_values[-1]:
            yield inner
            if isinstance(inner, dict | list | tuple):
                open_values.append(iter(inner.values() if isinstance(inner, dict) else inner))
                break
        else:
            open_values.pop()
        if len(open_values) > _DEEPEST + 1:
            raise ValueError(f"nested more than {_DEEPEST} levels deep")


_UNITS = {"": 1, "k": 2**10, "m": 2**20}


def token_count(value: Any) -> Any:
    """Parse a token count: 4k is 4,096, 1M is 1,048,576. Other values are returned unchanged."""
    number = re.fullmatch(r"\s*([0-9]+)([kKmM]?)\s*", value) if isinstance(value, str) else None
    return int(number[1]) * _UNITS[number[2].lower()] if number else value
