"""The registry of scaling methods. Each method is a decorated function.

A frequency method is a function `(rope, s, *, parameters) -> Frequencies`, or `(rope, s, length, *, parameters)` if
it depends on the current sequence length. A distance method is a function `(pretrained, target, *, parameters) ->
Remapping` of two lengths. The keyword-only parameters are the method's schema. Names joined by + are a combination, see
composition.py.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

from ropecli.errors import MethodError, did_you_mean
from ropecli.rope import Frequencies, Remapping
from ropecli.scaling.composition import combine
from ropecli.scaling.method import AS_IT_IS, UNCHANGED, ScalingMethod
from ropecli.scaling.temperature import with_temperatures

_PACKAGES = (__package__, "ropecli.remapping")
"""Packages with methods. All their modules are imported, which registers the methods."""
_METHODS: dict[str, ScalingMethod] = {}


def scaling_method(
    name: str, *, g: str = AS_IT_IS, h: str = UNCHANGED, **fields: Any
) -> Callable[[Callable[..., Frequencies]], Callable[..., Frequencies]]:
    """Register the decorated function as a frequency method. fields: further fields of ScalingMethod."""

    def register(function: Callable[..., Frequencies]) -> Callable[..., Frequencies]:
        by_length = "length" in inspect.signature(function).parameters
        _METHODS[name] = ScalingMethod(name, function, g=g, h=h, depends_on_length=by_length, **fields)
        return function

    return register


def remapping_method(name: str, **fields: Any) -> Callable[[Callable[..., Remapping]], Callable[..., Remapping]]:
    """Register the decorated function as a distance method, and add the temperatures to its options."""

    def register(function: Callable[..., Remapping]) -> Callable[..., Remapping]:
        _METHODS[name] = ScalingMethod(name, with_temperatures(function), remaps=True, **fields)
        return function

    return register


@cache
def scaling_methods() -> dict[str, ScalingMethod]:
    """All methods by name: frequency methods first, then distance methods."""
    for package in _PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")
    return {
        method.name: method for method in sorted(_METHODS.values(), key=lambda method: (method.remaps, method.name))
    }


@cache
def _combined(parts: tuple[ScalingMethod, ...]) -> ScalingMethod:
    return combine(parts, scaling_methods().values())


def find_method(name: str) -> ScalingMethod:
    """Look up a method by name or alias, ignoring case, or combine several: yarn+resonance.

    Raises MethodError for an unknown name and for methods that cannot be combined.
    """
    if "+" in name:
        return _combined(tuple(find_method(part) for part in name.split("+")))
    methods, normalized = scaling_methods(), name.lower().replace("_", "-")
    for method in methods.values():
        if normalized == method.name or normalized in method.other_names:
            return method
    raise MethodError(f"Unknown method {name!r}. Known: {', '.join(methods)}.{did_you_mean(normalized, methods)}")
