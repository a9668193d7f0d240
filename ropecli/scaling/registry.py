"""Finds the methods: each is a function in a file of its own, registered by its decorator.

A frequency method is a function `(rope, s, *, parameters) -> Frequencies`; one that depends on the current sequence
length takes it third: `(rope, s, length, *, parameters)`. A distance method is a function `(pretrained, target, *,
parameters) -> Remapping` of two lengths. Its keyword-only parameters are its schema.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache

from ropecli.errors import MethodError, did_you_mean
from ropecli.rope import Frequencies, Remapping
from ropecli.scaling.method import AS_IT_IS, UNCHANGED, ScalingMethod

_PACKAGES = (__package__, "ropecli.remapping")
"""Where methods are: one that is not imported is not registered."""
_METHODS: dict[str, ScalingMethod] = {}


def scaling_method(
    name: str,
    *,
    source: str,
    training: str,
    g: str = AS_IT_IS,
    h: str = UNCHANGED,
    targeted: bool = False,
    rope_type: str | None = None,
    other_names: tuple[str, ...] = (),
) -> Callable[[Callable[..., Frequencies]], Callable[..., Frequencies]]:
    """Registers the decorated function as a frequency method."""

    def register(function: Callable[..., Frequencies]) -> Callable[..., Frequencies]:
        depends_on_length = "length" in inspect.signature(function).parameters
        _METHODS[name] = ScalingMethod(
            name, function, source, training, rope_type, depends_on_length, other_names, g=g, h=h, targeted=targeted
        )
        return function

    return register


def remapping_method(
    name: str, *, source: str, training: str, other_names: tuple[str, ...] = ()
) -> Callable[[Callable[..., Remapping]], Callable[..., Remapping]]:
    """Registers the decorated function as a distance method."""

    def register(function: Callable[..., Remapping]) -> Callable[..., Remapping]:
        _METHODS[name] = ScalingMethod(name, function, source, training, None, False, other_names, remaps=True)
        return function

    return register


@cache
def scaling_methods() -> dict[str, ScalingMethod]:
    """All methods by name: the frequency methods first, then the distance methods."""
    for package in _PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")
    return {method.name: method for method in sorted(_METHODS.values(), key=lambda one: (one.remaps, one.name))}


def find_method(name: str) -> ScalingMethod:
    """The method of this name, in any case, or one of its other names. Raises MethodError for an unknown name."""
    methods, asked = scaling_methods(), name.lower().replace("_", "-")
    for method in methods.values():
        if asked == method.name or asked in method.other_names:
            return method
    raise MethodError(f"Unknown method {name!r}. Known: {', '.join(methods)}.{did_you_mean(asked, methods)}")
