"""Turns a command function into a command of Typer: its signature says the options, its docstring the help."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from annotated_doc import Doc
from annotated_types import Ge

from ropecli.cli.terminal import parse_list, parse_settings, print_json, speak_from_first_process
from ropecli.commands.options import Flag

_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]


def as_command(function: Callable[..., Any], render: Callable[[Any], None]) -> Callable[..., None]:
    """A Typer command that calls `function` and prints what it returns, by `render` or, with --json, as JSON.

    Parameters before the * are arguments, those after it options.
    """
    converted = {name: _convert(parameter) for name, parameter in inspect.signature(function).parameters.items()}

    def command(**values: Any) -> None:
        speak_from_first_process()
        as_json = values.pop("as_json")
        result = function(**{name: converted[name][1](value) for name, value in values.items()})
        if as_json:
            print_json(result.as_json())
        else:
            render(result)

    flag = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_AsJson)
    parameters = [*(parameter for parameter, _ in converted.values()), flag]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = function.__doc__
    return command


def _convert(parameter: inspect.Parameter) -> tuple[inspect.Parameter, Callable[[Any], Any]]:
    """The parameter as Typer takes it, and what makes the function's value of what was typed."""
    kind, *notes = typing.get_args(parameter.annotation)
    found = {type(note): note for note in notes}
    flag = found.get(Flag, Flag("--" + parameter.name.replace("_", "-")))
    options: dict[str, Any] = {"help": found[Doc].documentation, "metavar": flag.metavar}
    if Ge in found:
        options["min"] = found[Ge].ge
    default, is_argument = parameter.default, parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    typed, parse = _typed(kind, flag.name, several=is_argument)
    if is_argument:
        note: Any = typer.Argument(**options)
    else:
        note = typer.Option(*filter(None, (flag.name, flag.short)), **options)
    if isinstance(default, tuple):
        default = ",".join(f"{one:g}" if isinstance(one, float) else str(one) for one in default)
    return parameter.replace(kind=parameter.KEYWORD_ONLY, default=default, annotation=Annotated[typed, note]), parse


def _typed(kind: Any, name: str, *, several: bool) -> tuple[Any, Callable[[Any], Any]]:
    """The type that Typer parses, and what is made of its value. several: of an argument, which may be repeated."""
    optional = type(None) in typing.get_args(kind)
    kinds = [one for one in typing.get_args(kind) if one is not type(None)] if _is_union(kind) else [kind]
    inner = kinds[0]
    if Path in kinds:
        inner, parse = Path, lambda value: value
    elif typing.get_origin(inner) is Mapping:
        return list[str] | None, lambda value: parse_settings(value) if value else None
    elif typing.get_origin(inner) is Sequence and several:
        (inner,) = typing.get_args(inner)
        return list[inner], lambda value: value  # type: ignore[valid-type]
    elif typing.get_origin(inner) is Sequence:
        (item,) = typing.get_args(inner)
        inner, parse = str, lambda value: None if value is None else parse_list(value, name, item)
    else:
        parse = lambda value: value  # noqa: E731
    return (inner | None if optional else inner), parse


def _is_union(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
