"""Turns a command function into a Typer command: its signature gives the options, its docstring the help."""

import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from annotated_doc import Doc
from annotated_types import Ge
from typer.core import TyperCommand, TyperOption

from ropecli.cli import terminal
from ropecli.cli.terminal import print_json
from ropecli.errors import MethodError, shown
from ropecli.evaluation.request import OUTPUT
from ropecli.signature import Flag, InTokens, Only, Panel, option_name
from ropecli.yaml12 import read_yaml, token_count

ALIASES = {
    "--attn": ("--attn-implementation",),
    "--batch-size": ("--per-device-train-batch-size",),
    "--gradient-accumulation": ("--gradient-accumulation-steps",),
    "--factors": ("--factor",),
    "--length": ("--max-length",),
    "--max-documents": ("--limit", "-L"),
    "--methods": ("--method",),
    "--output DIR": ("--output-dir",),
    "--recipe": ("--config",),
    "--steps": ("--max-steps",),
    "--target-length": ("--max-model-len",),
    "--tracker": ("--report-to",),
}
"""Names that transformers, lm-eval, vLLM and TRL use: accepted where a command has the option, hidden."""

_SHARED = {"eval_ppl", "compare", "passkey", "needle", "ruler", "finetune"}
"""Commands whose work several processes share."""


def _switch(name: str, short: str | None, text: str) -> Any:
    return Annotated[bool, typer.Option(*filter(None, (name, short)), help=text, rich_help_panel=OUTPUT.title)]


_SWITCHES = {
    "as_json": _switch(
        "--json", None, "Print the result as JSON on standard output, and an error as JSON on standard error."
    ),
    "quiet": _switch("--quiet", "-q", "Print only the result and errors."),
    "verbose": _switch("--verbose", "-v", "Print all columns of the result."),
}


class AliasedCommand(TyperCommand):
    """A command that also accepts the names in ALIASES."""

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        for option in (parameter for parameter in self.params if isinstance(parameter, TyperOption)):
            name = option.opts[0]
            for alias in (*ALIASES.get(name, ()), *ALIASES.get(f"{name} {option.metavar}", ())):
                parser.add_option(obj=option, opts=[alias], dest=option.name, action="store", nargs=option.nargs)
        return parser


def as_command(function: Callable[..., Any], render: Callable[[Any], None]) -> Callable[..., None]:
    """A Typer command that calls `function` and prints its result with `render`, or as JSON with --json.

    Parameters before the * are arguments, those after it options.
    """
    converted = {name: _convert(parameter) for name, parameter in inspect.signature(function).parameters.items()}

    def command(*, as_json: bool, quiet: bool, verbose: bool, **values: Any) -> None:
        shared = function.__name__ in _SHARED
        terminal.set_verbosity(quiet=quiet, verbose=verbose, as_json=as_json, shared=shared)
        result = function(**{name: converted[name][1](value) for name, value in values.items()})
        try:
            if as_json:
                print_json(result.as_json())
            else:
                render(result)
            terminal.out.file.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest at its end
            raise
        if status := getattr(result, "exit_status", 0):
            raise typer.Exit(status)

    parameters = [parameter for parameter, _ in converted.values()]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in _SWITCHES.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = function.__doc__
    return command


def _convert(parameter: inspect.Parameter) -> tuple[inspect.Parameter, Callable[[Any], Any]]:
    """The parameter for Typer, and a function that converts the parsed value."""
    kind, *notes = typing.get_args(parameter.annotation)
    by_type = {type(note): note for note in notes}
    flag = by_type.get(Flag, Flag(option_name(parameter.name, notes)))
    text = by_type[Doc].documentation
    if Only in by_type:
        only = by_type[Only]
        text = f"{', '.join(only.values) or f'With {option_name(only.other, ())}'}: {text[0].lower()}{text[1:]}"
    options: dict[str, Any] = {"help": text, "metavar": flag.metavar}
    if Panel in by_type:
        options["rich_help_panel"] = by_type[Panel].title
    default, is_argument = parameter.default, parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    typed, parse = _typed(kind, flag.name, several=is_argument)
    if InTokens in by_type:
        typed = str | None if type(None) in typing.get_args(kind) else str
        parse = lambda value: None if value is None else parse_tokens(str(value), flag.name)  # noqa: E731
        options["metavar"] = flag.metavar or "TOKENS"
    elif Ge in by_type:
        options["metavar"] = f"N [x>={by_type[Ge].ge}]"
    if is_argument:
        options["metavar"] = flag.metavar or parameter.name.upper()
        note: Any = typer.Argument(**options)
    else:
        note = typer.Option(*filter(None, (flag.name, flag.short)), **options)
    if isinstance(default, tuple):
        default = ",".join(f"{number:g}" if isinstance(number, float) else str(number) for number in default)
    return parameter.replace(kind=parameter.KEYWORD_ONLY, default=default, annotation=Annotated[typed, note]), parse


def _typed(kind: Any, name: str, *, several: bool) -> tuple[Any, Callable[[Any], Any]]:
    """The type that Typer parses, and a function that converts its value.

    several: an argument that may be repeated. Options with several files are repeated, too.
    """
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    kinds = typing.get_args(kind) if is_union else (kind,)
    inner = Path if Path in kinds else kinds[0]
    parse: Callable[[Any], Any] = lambda value: value  # noqa: E731
    if typing.get_origin(inner) is Mapping:
        return list[str] | None, lambda value: parse_settings(value) if value else None
    if typing.get_origin(inner) is Sequence:
        (item,) = typing.get_args(inner)
        named = Path in (item, *typing.get_args(item))
        if several or named:
            return list[Path if named else item], parse  # type: ignore[misc]
        item = typing.get_args(item)[0] if typing.get_origin(item) is Annotated else item
        inner, parse = str, lambda value: None if value is None else parse_list(value, name, item)
    return (inner | None if type(None) in kinds else inner), parse


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """Parse `--set KEY=VALUE` options, with values in YAML 1.2. Raises MethodError."""
    params = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not (equals and key.strip()):
            raise MethodError(f"--set {setting!r} is not KEY=VALUE.")
        if key.strip() in params:
            raise MethodError(f"--set {key.strip()} was given twice.")
        try:
            params[key.strip()] = read_yaml(value)
        except ValueError:
            params[key.strip()] = value
    return params


def parse_list(text: str, option: str, kind: type) -> list[Any]:
    """Parse `256,4k,1M` as token counts, `0,0.5` as floats, names as strings. Raises MethodError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return [kind(token_count(part) if kind is int else part) for part in parts]
    except ValueError:
        example = "256,4k" if kind is int else "1,2.5"
        raise MethodError(f"{option} is {shown(text)}; expected numbers separated by commas: {example}.") from None


def parse_tokens(text: str, option: str) -> int:
    """Parse `512`, `4k` or `1M`. Raises MethodError."""
    count = token_count(text)
    if not isinstance(count, int):
        raise MethodError(f"{option} is {shown(text)}; expected a number of tokens, such as 512, 4k or 1M.")
    return count
