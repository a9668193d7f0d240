"""Turns the methods, factors and parameters of a command into ScalingSpecs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropecli.atomic import as_path
from ropecli.checkpoint.files import read_file
from ropecli.config.settings import read_settings
from ropecli.errors import MethodError
from ropecli.names import AS_IS, LENGTH_ONLY
from ropecli.scaling.registry import find_method
from ropecli.scaling.spec import ScalingSpec, make_spec

_LISTS = {"longrope": ("long_factor",), "custom": ("factors", "inv_freq")}
"""The parameters that are lists. A list in a factors file sets the first."""


def method_specs(
    methods: Sequence[str],
    factors: Sequence[float],
    settings: Mapping[str, Any] | None,
    factors_file: str | Path | None = None,
) -> list[ScalingSpec | None]:
    """Return a spec for every method at every factor, after None for `as-is`. Raises MethodError.

    factors: may be empty for `as-is` and `none`. settings: keyed by parameter for one method, by METHOD.KEY for
    several. factors_file: for methods that take a list of numbers.
    """
    if not methods:
        raise MethodError("The list of methods is empty; `ropecli methods` lists them.")
    names = list(dict.fromkeys(find_method(name).name for name in methods if name != AS_IS))
    params = _sorted_by_method(names, settings or {})
    if not names and factors_file is not None:
        raise MethodError(f"--factors-file needs a method; {AS_IS} has no parameters.")
    for name in [name for name in names if name in _LISTS] or names[:1]:  # the first one may refuse the file
        params[name] = {**read_factors(name, factors_file), **params[name]}
    if not factors and (needy := [name for name in names if name not in LENGTH_ONLY]):
        raise MethodError(f"{needy[0]} needs --factor, such as --factor 4.")
    specs: list[ScalingSpec | None] = [None] if AS_IS in methods else []
    return specs + [make_spec(name, factor, params[name]) for name in names for factor in factors or [1.0]]


def _sorted_by_method(names: list[str], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort the settings by method. Raises MethodError for a method that was not asked for."""
    params: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in settings.items():
        method, dot, parameter = key.partition(".")
        if not dot and len(names) == 1:
            method, dot, parameter = names[0], ".", key
        if not dot or method not in params:
            known = ", ".join(names) or f"the methods; {AS_IS} has no parameters"
            raise MethodError(f"--set {key}=...: expected METHOD.KEY=VALUE with one of {known}.")
        params[method][parameter] = value
    return params


def read_factors(method: str, path: str | Path | None) -> dict[str, Any]:
    """The parameters of --factors-file: a JSON object with them, or a list of factors. Raises MethodError."""
    if path is None:
        return {}
    if method not in _LISTS:
        raise MethodError(f"--factors-file is for {' and '.join(_LISTS)}; {method} takes no list.")
    value = read_file(as_path(path), json.loads, MethodError)
    if isinstance(value, list):
        value = {_LISTS[method][0]: value}
    keys_of_config = {"rope_parameters", "rope_scaling", "text_config"}
    if isinstance(value, dict) and method == "longrope" and keys_of_config & value.keys():
        ropes = read_settings(value).ropes
        value = next((dict(rope.spec.params) for rope in ropes if rope.spec.method.name == "longrope"), value)
    if not isinstance(value, dict) or not any(key in value for key in _LISTS[method]):
        raise MethodError(f"{path} must hold a list of factors, or an object with {' or '.join(_LISTS[method])}.")
    return value
