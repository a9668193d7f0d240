"""Options of a command: what a signature says about them, and the decorator that checks it.

A group of options is a TypedDict (total=False) whose fields are `Annotated[type, Default(value), Doc("help"), ...]`, or
`Required[Annotated[type, Doc("help"), ...]]`. A command takes it by `**shared: Unpack[Group]`. The default of a field
is None, or False for a bool, unless there is a Default.
"""

import functools
import inspect
import math
import numbers
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Required, TypeVar, cast

from annotated_types import Interval, MinLen

from ropecli.errors import MethodError, did_you_mean, shown


@dataclass(eq=False)
class Flag:
    """An option's name on the command line: Flag("--set", "-s"). metavar: the placeholder for its value in help."""

    name: str
    short: str | None = None
    metavar: str | None = None


@dataclass(eq=False)
class Panel:
    """The group of options in which help lists an option."""

    title: str


@dataclass(eq=False)
class InTokens:
    """Marks a number of tokens, which the command line reads with suffixes: 4k is 4,096, 1M is 1,048,576."""


@dataclass(eq=False)
class Only:
    """Marks an option that has an effect only with another one: set to one of these values, or without them, set."""

    other: str
    values: tuple[str, ...] = ()


@dataclass(eq=False)
class OneOf:
    """The values of an option."""

    values: tuple[str, ...]


@dataclass(eq=False)
class Check:
    """Marks names that are looked up before the command runs. test: raises RopecliError for a wrong one; fast.

    values: the names that a shell completes.
    """

    test: Callable[[str], None]
    values: Iterable[str] = field(default=(), repr=False)


@dataclass(eq=False)
class Default:
    """The default of a group's field."""

    value: Any


_BOUNDS = {
    "gt": (operator.gt, "above"),
    "ge": (operator.ge, "of at least"),
    "le": (operator.le, "of at most"),
}
"""The bounds of an Interval, which hold for every number of a list."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def command(function: _Function) -> _Function:
    """Give a function the flat signature of its groups, and check every call against it.

    A call raises TypeError for an unknown name or a wrong type, and MethodError for a value out of range or without
    effect. A Path stands for a string, and one string, Path or number for a list of one.
    """
    signature = _flat_signature(function)
    name = function.__name__

    @functools.wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        for key, value in bound.arguments.items():
            annotation = signature.parameters[key].annotation
            try:
                bound.arguments[key] = _fitted(value, annotation, option_name(key, _parts(annotation)[1]))
            except _WrongTypeError:
                raise TypeError(f"{name}(): {key} is {shown(value)}; expected {_described(annotation)}.") from None
        bound.apply_defaults()
        _refuse_without_effect(bound.arguments, signature.parameters)
        for key, parameter in signature.parameters.items():
            for note in _parts(parameter.annotation)[1]:
                if isinstance(note, Check) and (value := bound.arguments[key]) is not None:
                    for item in [value] if isinstance(value, str | os.PathLike) else value:
                        note.test(os.fspath(item))
        return function(*bound.args, **bound.kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return cast(_Function, checked)


def _refuse_without_effect(values: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> None:
    """Raise MethodError for an option that is set although another one takes its effect away."""
    notes = {key: _parts(parameter.annotation)[1] for key, parameter in parameters.items()}
    given = [key for key, parameter in parameters.items() if values[key] not in (parameter.default, None)]
    for message in without_effect(given, values, notes, lambda key: option_name(key, notes[key])).values():
        raise MethodError(message)


def without_effect(
    given: Iterable[str],
    values: Mapping[str, Any],
    notes: Mapping[str, Sequence[Any]],
    name_of: Callable[[str], str] = str,
) -> dict[str, str]:
    """A message for each of the keys `given` that has no effect with these values.

    values: of all keys, also those not given. notes: of the annotation of each key. name_of: a key in a message.
    """
    messages = {}
    for key in given:
        for note in notes[key]:
            if not isinstance(note, Only) or note.other not in values:
                continue
            value, other = values[note.other], " ".join([name_of(note.other), ", ".join(note.values)]).rstrip()
            if not value:
                messages[key] = f"{name_of(key)} has no effect without {other}. Add it, or remove {name_of(key)}."
            elif note.values and value not in note.values:
                messages[key] = f"{name_of(key)} applies only to {other}, not to {shown(value)}."
    return messages


def option_name(name: str, notes: Sequence[Any]) -> str:
    """A parameter's name on the command line."""
    return next((note.name for note in notes if isinstance(note, Flag)), "--" + name.replace("_", "-"))


def _flat_signature(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter)
            continue
        (group,) = typing.get_args(parameter.annotation)
        for name, annotation in group.__annotations__.items():
            default: Any = parameter.empty
            if typing.get_origin(annotation) is Required:
                (annotation,) = typing.get_args(annotation)
            else:
                kind, notes = _parts(annotation)
                without = False if kind is bool else None
                default = next((note.value for note in notes if isinstance(note, Default)), without)
            parameters.append(inspect.Parameter(name, parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return signature.replace(parameters=parameters)


def _parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type and the notes of an annotation."""
    if typing.get_origin(annotation) is not Annotated:
        return annotation, ()
    kind, *notes = typing.get_args(annotation)
    return kind, tuple(notes)


class _WrongTypeError(Exception): ...


def _fitted(value: Any, annotation: Any, option: str, verb: str = "is") -> Any:
    """Return the value as the annotation's type. Raises _WrongTypeError, and MethodError for a value out of range."""
    kind, notes = _parts(annotation)
    value = _typed(value, kind, option, verb)
    if value is None:
        return None
    limits = [
        (words, limit)
        for note in notes
        if isinstance(note, Interval)
        for key, words in _BOUNDS.items()
        if (limit := getattr(note, key)) is not None
    ]
    finite = not isinstance(value, float) or math.isfinite(value)
    if not finite or not all(holds(value, limit) for (holds, _), limit in limits):
        ends = " and ".join(f"{words} {limit}" for (_, words), limit in limits)
        number = f"{value:.15g}" if isinstance(value, float) else shown(value)
        expected = f"a {'' if finite else 'finite '}number {ends}".rstrip()
        raise MethodError(f"{option} {verb} {number}; expected {expected}.")
    for note in notes:
        if isinstance(note, OneOf) and value not in note.values:
            expected = f"expected one of {', '.join(note.values)}.{did_you_mean(value, note.values)}"
            raise MethodError(f"{option} {verb} {shown(value)}; {expected}")
        if isinstance(note, MinLen) and len(value) < note.min_length:
            raise MethodError(f"{option} has {len(value)} values; expected at least {note.min_length}.")
    return value


def _typed(value: Any, kind: Any, option: str, verb: str) -> Any:
    """Numbers of numpy become Python's."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        for part in parts:
            try:
                return _fitted(value, part, option, verb)
            except _WrongTypeError:
                continue
    elif origin is Sequence:
        if isinstance(value, str | os.PathLike | numbers.Real):
            value = [value]
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [_fitted(item, parts[0], option, "has") for item in value]
    elif kind in (int, float):
        if isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool):
            return kind(value)
    elif kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    elif isinstance(value, origin or kind):
        return value
    raise _WrongTypeError


def _described(annotation: Any) -> str:
    kind, _ = _parts(annotation)
    origin, parts = typing.get_origin(kind), [_described(part) for part in typing.get_args(kind)]
    if origin in (types.UnionType, typing.Union):
        return " | ".join(parts)
    if kind is types.NoneType:
        return "None"
    name = getattr(origin or kind, "__name__", str(kind))
    return f"{name}[{', '.join(parts)}]" if parts else name


_UNITS = {"": 1, "k": 2**10, "m": 2**20}


def token_count(value: Any) -> Any:
    """Parse a token count: 4k is 4,096, 1M is 1,048,576. Other values are returned unchanged."""
    number = re.fullmatch(r"\s*([0-9]+)([kKmM]?)\s*", value) if isinstance(value, str) else None
    return int(number[1]) * _UNITS[number[2].lower()] if number else value
