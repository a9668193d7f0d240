"""Finds the methods and calls them with checked parameters.

A frequency method is a function `(rope, s, *, parameters) -> ScaledRope`; one that depends on the current sequence
length takes it third: `(rope, s, length, *, parameters)`. A relative-position method is a function `(pretrained,
target, *, parameters) -> Remapping` of two windows. Its keyword-only parameters are its schema.
"""

import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ropecli.errors import MethodError, did_you_mean, shown
from ropecli.rope import Remapping, RopeGeometry, ScaledRope, ScalingSpec


class Range(NamedTuple):
    """Of a parameter's values, those worth trying: from low to high, both above 0, evenly in the logarithm."""

    low: float
    high: float


class Knob(NamedTuple):
    """A parameter of a method as a user sees it.

    kind: what it must be, in words. default: None where the method has a rule of its own for one left out.
    """

    name: str
    kind: str
    default: object
    required: bool


@dataclass(frozen=True)
class ScalingMethod:
    """name: ours. source: paper and section. training: whether the model must be fine-tuned to use it.

    rope_type: the native encoding in transformers; None where it has none. depends_on_length: the frequencies
    change with the current sequence length. remaps: it changes the distances that attention sees, and no frequency.
    other_names: what else it is called. g, h: what becomes of a position m and of a pair's frequency θ_d, in YaRN's
    general form (eq. 12), where l is the current length and all |D|/2 pairs turn; empty for those that remap.
    targeted: h goes by a pair's wavelength against the window; YaRN calls the others blind.
    """

    name: str
    function: Callable[..., Any]
    source: str
    training: str
    rope_type: str | None
    depends_on_length: bool
    other_names: tuple[str, ...]
    remaps: bool = False
    g: str = ""
    h: str = ""
    targeted: bool = False

    @property
    def summary(self) -> str:
        """The first sentence or two of the method's own words."""
        return self.description.split("\n\n")[0].replace("\n", " ")

    @property
    def interpolation(self) -> str:
        """In a word or two."""
        if self.remaps or (self.g, self.h) == (_AS_IT_IS, _UNCHANGED):
            return "none"
        if any(knob.kind == LIST for knob in self.knobs):
            return "as given"
        return "targeted" if self.targeted else "blind"

    @property
    def description(self) -> str:
        return inspect.getdoc(self.function) or ""

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        found = inspect.signature(self.function).parameters.items()
        return {name: parameter for name, parameter in found if parameter.kind is parameter.KEYWORD_ONLY}

    @property
    def ranges(self) -> dict[str, Range]:
        """Of the parameters that say which values are worth trying."""
        found = {}
        for name, parameter in self.parameters.items():
            for note in getattr(parameter.annotation, "__metadata__", ()):
                if isinstance(note, Range):
                    found[name] = note
        return found

    @property
    def knobs(self) -> tuple[Knob, ...]:
        knobs = []
        for name, parameter in self.parameters.items():
            required = parameter.default is parameter.empty
            default = None if required else parameter.default
            knobs.append(Knob(name, _describe(parameter.annotation), default, required))
        return tuple(knobs)


_LARGEST = 1e30
"""longrope factors that stand for a frequency of zero come up to this."""

_LARGEST_FACTOR = 10**6
_LARGEST_COUNT = 10**12
"""Tokens: no window comes near it."""

_AS_IT_IS, _UNCHANGED = "m", "θ_d"
"""g and h of plain rotary embeddings."""

LIST = "a list of numbers from 0 on"
"""What a knob is that has a number for each pair; a method may ask for more of them."""

_PACKAGES = (__package__, "ropecli.remapping")
"""Where methods are: one that is not imported is not registered."""

_METHODS: dict[str, ScalingMethod] = {}


def scaling_method(
    name: str,
    *,
    source: str,
    training: str,
    g: str = _AS_IT_IS,
    h: str = _UNCHANGED,
    targeted: bool = False,
    rope_type: str | None = None,
    other_names: tuple[str, ...] = (),
) -> Callable:
    """Registers the decorated function as a scaling method."""

    def register(function: Callable[..., ScaledRope]) -> Callable[..., ScaledRope]:
        depends_on_length = "length" in inspect.signature(function).parameters
        _METHODS[name] = ScalingMethod(
            name, function, source, training, rope_type, depends_on_length, other_names, g=g, h=h, targeted=targeted
        )
        return function

    return register


def remapping_method(
    name: str, *, source: str, training: str, other_names: tuple[str, ...] = ()
) -> Callable[[Callable[..., Remapping]], Callable[..., Remapping]]:
    """Registers the decorated function as a relative-position method."""

    def register(function: Callable[..., Remapping]) -> Callable[..., Remapping]:
        _METHODS[name] = ScalingMethod(name, function, source, training, None, False, other_names, remaps=True)
        return function

    return register


@cache
def scaling_methods() -> dict[str, ScalingMethod]:
    """All methods by name: those of frequencies first, then those of relative positions."""
    for package in _PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")
    return {method.name: method for method in sorted(_METHODS.values(), key=lambda one: (one.remaps, one.name))}


def get_method(name: str) -> ScalingMethod:
    """Raises MethodError for a name that is not registered."""
    methods = scaling_methods()
    if name in methods:
        return methods[name]
    also = next((method.name for method in methods.values() if name.lower() in method.other_names), None)
    hint = f" Here it is called {also!r}." if also else did_you_mean(name, methods)
    raise MethodError(f"Unknown method {name!r}. Known: {', '.join(methods)}.{hint}")


def label_of(method: str, factor: float, params: Mapping[str, object]) -> str:
    """A scaling in a line: method, factor, and the numbers that are not the method's own defaults."""
    registered = scaling_methods().get(method)
    known = registered.parameters if registered else {}
    numbers = {key: value for key, value in params.items() if key in known and isinstance(value, int | float)}
    own = [f"{key} {value:g}" for key, value in numbers.items() if value != known[key].default]
    return f"{method} ×{factor:g}" + (f" ({', '.join(own)})" if own else "")


def scale(geometry: RopeGeometry, spec: ScalingSpec, length: int | None = None) -> ScaledRope:
    """The frequencies that `spec` gives for `geometry`.

    length: the current sequence length, tokens; by default the target window. Methods that do not depend on
    it ignore it. Raises MethodError for an unknown method or parameter, a value of the wrong kind, or a
    factor that is not a number from 1 to 1000000.
    """
    method = get_method(spec.method)
    check_factor(spec.factor)
    params = _checked_parameters(method, spec.params)
    window = geometry.original_max_position_embeddings
    if method.remaps:
        return remap(ScaledRope(geometry, spec, geometry.inv_freq()), spec, window, round(window * spec.factor))
    if method.depends_on_length:
        scaled = method.function(geometry, spec.factor, length or round(window * spec.factor), **params)
    else:
        scaled = method.function(geometry, spec.factor, **params)
    if not (np.isfinite(scaled.inv_freq).all() and (scaled.inv_freq >= 0).all()):
        raise MethodError(f"{spec.method} with factor {spec.factor:g} gives frequencies that are not finite.")
    return scaled


def remapping_of(spec: ScalingSpec, pretrained: int, target: int) -> Remapping:
    """The distances that `spec`, of a relative-position method, gives.

    pretrained: the window that the model was trained to read, target: the one to read, tokens. Raises MethodError.
    """
    method = get_method(spec.method)
    remapping = method.function(pretrained, target, **_checked_parameters(method, spec.params))
    return replace(remapping, pretrained=pretrained, target=target)


def remap(rope: ScaledRope, spec: ScalingSpec, pretrained: int, target: int) -> ScaledRope:
    """`rope` with the distances that `spec` gives (see remapping_of); its frequencies stay. Raises MethodError."""
    return replace(rope, spec=spec, remapping=remapping_of(spec, pretrained, target))


def check_factor(factor: float) -> None:
    """Raises MethodError unless it is from 1 to 1000000."""
    if not 1 <= factor <= _LARGEST_FACTOR:
        raise MethodError(f"The factor is {factor:g}; it must be a number from 1 to {_LARGEST_FACTOR}.")


def check_length(name: str, numbers: Sequence[float], rope: RopeGeometry) -> None:
    """Raises MethodError unless there is one number for each pair."""
    if len(numbers) != rope.pairs:
        raise MethodError(f"{name} has {len(numbers)} entries; this model has {rope.pairs} rotary pairs.")


def varies_with_length(geometry: RopeGeometry, spec: ScalingSpec) -> bool:
    """Whether the frequencies really change inside the target window (longrope with one list does not)."""
    if not get_method(spec.method).depends_on_length:
        return False
    short, long = scale(geometry, spec, length=1), scale(geometry, spec)
    return not np.array_equal(short.inv_freq, long.inv_freq)


def _checked_parameters(method: ScalingMethod, params: Mapping[str, object]) -> dict[str, object]:
    known = method.parameters
    for key, value in params.items():
        if key not in known:
            names = ", ".join(known) or "none"
            hint = did_you_mean(key, known)
            raise MethodError(f"Method {method.name} has no parameter {key!r}. Its parameters: {names}.{hint}")
        if not _fits(value, known[key].annotation):
            expected = _describe(known[key].annotation)
            raise MethodError(f"{method.name}: {key} is {shown(value)}; it must be {expected}.")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in params:
            raise MethodError(
                f"Method {method.name} needs {key}: give it with --set, or by --factors-file where the command has it."
            )
    return dict(params)


def _fits(value: object, annotation: object) -> bool:
    annotation = _plain(annotation)
    if isinstance(annotation, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(annotation))
    if annotation is types.NoneType:
        return value is None
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST_COUNT
    if typing.get_origin(annotation) is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_fits_in_a_list, value))
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _fits_in_a_list(value: object) -> bool:
    return _fits(value, float) or (value == 0 and not isinstance(value, bool))


def _plain(annotation: object) -> object:
    """Without what is noted beside the type."""
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _describe(annotation: object) -> str:
    annotation = _plain(annotation)
    if isinstance(annotation, types.UnionType):
        return " or ".join(_describe(one) for one in typing.get_args(annotation) if one is not types.NoneType)
    if annotation is bool:
        return "true or false"
    if annotation is int:
        return "a whole number from 1 on"
    if typing.get_origin(annotation) is Sequence:
        return LIST
    return f"a positive number of at most {_LARGEST:g}"
