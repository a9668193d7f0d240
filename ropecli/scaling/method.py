"""ScalingMethod: a method's function, source, and parameters with their allowed values."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ropecli.errors import MethodError, did_you_mean, shown

_LARGEST = 1e30
"""The longrope factor that represents a frequency of zero."""
_LARGEST_COUNT = 10**12
"""Tokens; far above any context length."""
AS_IT_IS, UNCHANGED = "m", "θ_d"
"""g and h without scaling."""
LIST = "a list of non-negative numbers"
"""The kind of a parameter with one number per pair; a method may restrict it further."""


class Parameter(NamedTuple):
    """A method's parameter, for display.

    kind: description of the allowed values. default: None if the method computes it.
    """

    name: str
    kind: str
    default: object
    required: bool


@dataclass(frozen=True, repr=False)
class ScalingMethod:
    """A registered scaling method.

    source: paper and section. training: whether the model must be fine-tuned to use it. rope_type: the rope_type in
    transformers, if there is one. depends_on_length: the frequencies change with the current sequence length.
    remaps: a distance method; the frequencies stay unchanged. other_names: aliases. g, h: the functions of the
    position m and of a pair's frequency θ_d in YaRN's general form (eq. 12), with the current length l and |D|/2
    rotating pairs; empty for distance methods. targeted: h depends on a pair's wavelength relative to the pretraining
    length; YaRN calls the others blind. uses_factor: the method extends the context by the factor; otherwise the factor
    only sets the context length. frequency, distance: the two parts of a combination that ends with a distance method.
    """

    name: str
    function: Callable[..., Any]
    source: str
    training: str
    rope_type: str | None = None
    depends_on_length: bool = False
    other_names: tuple[str, ...] = ()
    remaps: bool = False
    g: str = ""
    h: str = ""
    targeted: bool = False
    uses_factor: bool = True
    frequency: "ScalingMethod | None" = None
    distance: "ScalingMethod | None" = None

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        """The name only, so that specs are recorded as the user gave them."""
        return repr(self.name)

    @property
    def description(self) -> str:
        """The function's docstring."""
        return inspect.getdoc(self.function) or ""

    @property
    def summary(self) -> str:
        """The docstring's first paragraph."""
        return self.description.split("\n\n")[0].replace("\n", " ")

    @property
    def interpolation(self) -> str:
        """YaRN's class of the method: none, blind, targeted, or as given."""
        if not self.h or (self.g, self.h) == (AS_IT_IS, UNCHANGED):
            return "none"
        if any(parameter.kind == LIST for parameter in self.parameters):
            return "as given"
        return "targeted" if self.targeted else "blind"

    @property
    def combines(self) -> bool:
        """Whether the method can be part of a combination."""
        changes = self.interpolation in ("blind", "targeted") and self.h != "0"
        return self.remaps or (changes and not self.depends_on_length)

    @cached_property
    def signature(self) -> dict[str, inspect.Parameter]:
        """The function's keyword-only parameters, by name."""
        parameters = inspect.signature(self.function).parameters.items()
        return {name: parameter for name, parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters, for display."""
        described = []
        for name, parameter in self.signature.items():
            required = parameter.default is parameter.empty
            default = None if required else parameter.default
            described.append(Parameter(name, _describe(parameter.annotation), default, required))
        return tuple(described)

    def check(self, params: Mapping[str, object]) -> None:
        """Raise MethodError for an unknown parameter, an invalid value, or a missing required parameter."""
        known = self.signature
        for key, value in params.items():
            if key not in known:
                names, hint = ", ".join(known) or "none", did_you_mean(key, known)
                raise MethodError(f"Method {self.name} has no parameter {key!r}. Its parameters: {names}.{hint}")
            if not _fits(value, annotation := known[key].annotation):
                raise MethodError(f"{self.name}: {key} is {shown(value)}; expected {_describe(annotation)}.")
        for key, parameter in known.items():
            if parameter.default is parameter.empty and key not in params:
                raise MethodError(f"Method {self.name} requires {key}. Set it with --set or --factors-file.")


def _fits(value: object, annotation: object) -> bool:
    if isinstance(annotation, types.UnionType):
        return any(_fits(value, kind) for kind in typing.get_args(annotation))
    if annotation is types.NoneType:
        return value is None
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST_COUNT
    if typing.get_origin(annotation) is Sequence:
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(_fits(item, float) or (item == 0 and not isinstance(item, bool)) for item in value)
        )
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _describe(annotation: object) -> str:
    if isinstance(annotation, types.UnionType):
        return " or ".join(_describe(kind) for kind in typing.get_args(annotation) if kind is not types.NoneType)
    if annotation is bool:
        return "true or false"
    if annotation is int:
        return "a positive integer"
    if typing.get_origin(annotation) is Sequence:
        return LIST
    return f"a positive number of at most {_LARGEST:g}"
