"""The registry of scaling methods, and their combinations. Each method is a decorated function.

A frequency method is a function `(rope, s, *, parameters) -> Frequencies`, or `(rope, s, length, *, parameters)` if
it depends on the current sequence length. A distance method is a function `(pretrained, target, *, parameters) ->
Remapping` of two lengths. The keyword-only parameters are the method's schema. Names joined by + are a combination.
"""

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ropecli.errors import MethodError
from ropecli.names import METHODS, method_name
from ropecli.rope import Frequencies, Remapping, RopeGeometry
from ropecli.scaling.method import AS_IT_IS, UNCHANGED, ScalingMethod
from ropecli.scaling.temperature import with_temperatures

_PACKAGES = (__package__, "ropecli.remapping")
"""Packages with methods. All their modules are imported, which registers the methods."""
_METHODS: dict[str, ScalingMethod] = {}
FREQUENCY_FACTOR = "frequency_factor"
_ABOUT_FREQUENCY_FACTOR = (
    f"{FREQUENCY_FACTOR}: the factor of the frequency methods. The distance method then extends from the pretraining "
    "length × this factor to the target length. Set it to the factor that the model was fine-tuned with. Default: the "
    "square root of the factor; 1 if no frequency method divides by the factor; for string, which does not extend, the "
    "whole factor."
)
_TRAINING = ("no", "a little", "advised", "needed")
"""From the least to the most demanding."""


def scaling_method(
    name: str, *, g: str = AS_IT_IS, h: str = UNCHANGED, **fields: Any
) -> Callable[[Callable[..., Frequencies]], Callable[..., Frequencies]]:
    """Register the decorated function as a frequency method. fields: further fields of ScalingMethod."""

    def register(function: Callable[..., Frequencies]) -> Callable[..., Frequencies]:
        fields["depends_on_length"] = "length" in inspect.signature(function).parameters
        _METHODS[name] = ScalingMethod(name, function, g=g, h=h, other_names=METHODS[name], **fields)
        return function

    return register


def remapping_method(name: str, **fields: Any) -> Callable[[Callable[..., Remapping]], Callable[..., Remapping]]:
    """Register the decorated function as a distance method, and add the temperatures to its options."""

    def register(function: Callable[..., Remapping]) -> Callable[..., Remapping]:
        method = with_temperatures(function)
        _METHODS[name] = ScalingMethod(name, method, remaps=True, other_names=METHODS[name], **fields)
        return function

    return register


@cache
def scaling_methods() -> dict[str, ScalingMethod]:
    """All methods by name: frequency methods first, then distance methods."""
    for package in _PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")
    return {name: _METHODS[name] for name in METHODS}


def find_method(name: str) -> ScalingMethod:
    """Look up a method by name or alias, ignoring case, or combine several: yarn+resonance.

    Raises MethodError for an unknown name and for methods that cannot be combined.
    """
    if "+" in name:
        return _combined(tuple(find_method(part) for part in name.split("+")))
    return scaling_methods()[method_name(name)]


@cache
def _combined(parts: tuple[ScalingMethod, ...]) -> ScalingMethod:
    """Frequency methods act one after the other, h₂(h₁(θ_d)), and their attention factors multiply.

    A distance method comes last and uses the frequencies of the others: f'(x, ρ(n, m), h(θ_d)).
    """
    _check(parts)
    if not parts[-1].remaps:
        return _chain(parts)
    *frequencies, distance = parts
    first = frequencies[0] if len(frequencies) == 1 else _chain(frequencies)

    def remapping(pretrained: int, target: int, **params: Any) -> Remapping:
        return distance.function(pretrained, target, **own_params(distance, params))

    option = inspect.Parameter(FREQUENCY_FACTOR, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=float | None)
    _describe(remapping, (first, distance), {FREQUENCY_FACTOR: option}, _ABOUT_FREQUENCY_FACTOR)
    combined = _joined((first, distance), remapping)
    return replace(combined, remaps=True, g=first.g, h=first.h, frequency=first, distance=distance)


def own_params(method: ScalingMethod, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that belong to `method`."""
    return {key: value for key, value in params.items() if key in method.signature}


def _check(parts: Sequence[ScalingMethod]) -> None:
    kinds = [2 if part.remaps else int(part.rope_type != "default") for part in parts]
    fits = (
        all(part.combines for part in parts)
        and len(set(parts)) == len(parts)
        and kinds == sorted(kinds)
        and kinds.count(2) <= 1
        and sum(part.uses_factor and not part.remaps for part in parts) <= 1
    )
    if not fits:
        of_frequency = [method for method in scaling_methods().values() if method.combines and not method.remaps]
        dividing = [method.name for method in of_frequency if method.uses_factor]
        blind = [method.name for method in of_frequency if not method.uses_factor]
        raise MethodError(
            f"Cannot combine {'+'.join(part.name for part in parts)}. Expected at most one of {', '.join(dividing)}; "
            f"any of {', '.join(blind)}; and at most one distance method, at the end. abf and ntk come first."
        )


def _chain(parts: Sequence[ScalingMethod]) -> ScalingMethod:
    *earlier, last = parts
    # a base change can be written together with the rope_type of the next method
    rope_type = last.rope_type if all(part.rope_type == "default" for part in earlier) else None

    def chained(rope: RopeGeometry, s: float, **params: Any) -> Frequencies:
        attention_factor = 1.0
        resolved: dict[str, object] = {}
        for part in parts:
            scaled = part.function(rope, s, **own_params(part, params))
            attention_factor *= scaled.attention_factor
            resolved |= scaled.params
            if math.isnan(scaled.rope_theta):
                rope = replace(rope, scaled_inv_freq=tuple(scaled.inv_freq.tolist()))
            else:
                rope = replace(rope, rope_theta=scaled.rope_theta)
        theta = math.nan if rope_type is None else rope.rope_theta
        return Frequencies(scaled.inv_freq, attention_factor, theta, resolved)

    _describe(chained, parts)
    return replace(_joined(parts, chained), rope_type=rope_type)


def _joined(parts: Sequence[ScalingMethod], function: Callable[..., Any]) -> ScalingMethod:
    return ScalingMethod(
        "+".join(part.name for part in parts),
        function,
        source="; ".join(part.source for part in parts),
        training=max((part.training for part in parts), key=_TRAINING.index),
        g=next((part.g for part in parts if part.g != AS_IT_IS), AS_IT_IS),
        h="; then ".join(part.h for part in parts if part.h != UNCHANGED) or UNCHANGED,
        targeted=any(part.targeted for part in parts),
        uses_factor=any(part.uses_factor for part in parts),
    )


def _describe(
    function: Callable[..., Any],
    parts: Sequence[ScalingMethod],
    options: Mapping[str, inspect.Parameter] | None = None,
    ending: str = "",
) -> None:
    """Give the function the parameters and the docstrings of its parts."""
    parameters = {name: option for part in parts for name, option in part.signature.items()} | dict(options or {})
    details = [part.description.partition("\n\n")[2] for part in parts]
    paragraphs = [" Then ".join(part.summary for part in parts), *details, ending]
    function.__doc__ = "\n\n".join(filter(None, paragraphs))
    function.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
