"""What a scaling method is: its function, its source, and its parameters with the values that each may have."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ropecli.errors import MethodError, did_you_mean, shown

_LARGEST = 1e30
"""longrope factors that stand for a frequency of zero come up to this."""
_LARGEST_COUNT = 10**12
"""Tokens: no context length comes near it."""
AS_IT_IS, UNCHANGED = "m", "θ_d"
"""g and h of plain rotary embeddings."""
LIST = "a list of numbers from 0 on"
"""The kind of a parameter that has a number for each pair; a method may ask for more of them."""


class SearchRange(NamedTuple):
    """The values of a parameter that are worth trying: from low to high, both above 0, evenly in the logarithm."""

    low: float
    high: float


class Parameter(NamedTuple):
    """A parameter of a method as a user sees it.

    kind: what it must be, in words. default: None where the method has a rule of its own for one left out.
    """

    name: str
    kind: str
    default: object
    required: bool


@dataclass(frozen=True, repr=False)
class ScalingMethod:
    """name: ours. source: paper and section. training: whether the model must be fine-tuned to use it.

    rope_type: the native encoding in transformers; None where it has none. depends_on_length: the frequencies
    change with the current sequence length. remaps: it changes the distances that attention sees, and no frequency.
    other_names: what else it is called. g, h: what becomes of a position m and of a pair's frequency θ_d, in YaRN's
    general form (eq. 12), where l is the current length and all |D|/2 pairs rotate; empty for those that remap.
    targeted: h goes by a pair's wavelength against the pretraining length; YaRN calls the others blind.
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

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        """The name alone, so that a spec reads, and is recorded, as the user gave it."""
        return repr(self.name)

    @property
    def description(self) -> str:
        """The function's docstring."""
        return inspect.getdoc(self.function) or ""

    @property
    def summary(self) -> str:
        """Its first paragraph."""
        return self.description.split("\n\n")[0].replace("\n", " ")

    @property
    def interpolation(self) -> str:
        """In a word or two."""
        if self.remaps or (self.g, self.h) == (AS_IT_IS, UNCHANGED):
            return "none"
        if any(parameter.kind == LIST for parameter in self.parameters):
            return "as given"
        return "targeted" if self.targeted else "blind"

    @cached_property
    def signature(self) -> dict[str, inspect.Parameter]:
        """The function's keyword-only parameters, by name."""
        found = inspect.signature(self.function).parameters.items()
        return {name: parameter for name, parameter in found if parameter.kind is parameter.KEYWORD_ONLY}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The same as a user sees them."""
        found = []
        for name, parameter in self.signature.items():
            required = parameter.default is parameter.empty
            default = None if required else parameter.default
            found.append(Parameter(name, _describe(parameter.annotation), default, required))
        return tuple(found)

    @property
    def search_ranges(self) -> dict[str, SearchRange]:
        """Of the parameters that say which values are worth trying."""
        found = {}
        for name, parameter in self.signature.items():
            for note in getattr(parameter.annotation, "__metadata__", ()):
                if isinstance(note, SearchRange):
                    found[name] = note
        return found

    def check(self, params: Mapping[str, object]) -> None:
        """Raises MethodError for an unknown parameter, a value of the wrong kind, and a required one left out."""
        known = self.signature
        for key, value in params.items():
            if key not in known:
                names = ", ".join(known) or "none"
                hint = did_you_mean(key, known)
                raise MethodError(f"Method {self.name} has no parameter {key!r}. Its parameters: {names}.{hint}")
            if not _fits(value, known[key].annotation):
                expected = _describe(known[key].annotation)
                raise MethodError(f"{self.name}: {key} is {shown(value)}; it must be {expected}.")
        for key, parameter in known.items():
            if parameter.default is parameter.empty and key not in params:
                raise MethodError(
                    f"Method {self.name} needs {key}: give it with --set, or by --factors-file where the command has "
                    "it."
                )


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
