"""Turns a command function into a Typer command: its signature gives the options, its docstring the help.

Typer parses words only. Values are converted here and checked by the function, for Python callers too; this keeps
pydantic, with which Typer would convert them, out of a command that is refused.
"""

import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from annotated_doc import Doc
from typer.core import TyperArgument, TyperCommand, TyperOption

from ropecli.cli import terminal
from ropecli.errors import MethodError, shown
from ropecli.signature import Check, Flag, InTokens, OneOf, Only, Panel, option_name, token_count

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

_SHARED = {"eval_ppl", "compare", "needle", "ruler", "finetune", "extend"}
"""Commands whose work several processes share."""
_PANELS = ("Required", "Settings", "Scaling", "Data", "Output", "Loading", "Server", "Engine")
"""Groups of options in the order of every help page. The last three are shown with --help-all only."""
_RARE = "Rare: "
"""Before the name of the group of an option that the short help skips."""


class Command(TyperCommand):
    """A command that also accepts the names in ALIASES, and has a short help and a whole one."""

    examples: Sequence[str]
    texts: dict[str | None, str]
    """Whole help texts, by name of the option."""
    shows_all = False

    def get_params(self, ctx: Any) -> list[Any]:
        """Arguments, then options by panel. Sets which ones help hides."""
        parameters = super().get_params(ctx)
        for parameter in parameters:
            take_words(parameter)
            if isinstance(parameter, TyperOption):
                panel = parameter.rich_help_panel or "Output"
                parameter.hidden = panel.startswith(_RARE) and not self.shows_all
                parameter.rich_help_panel = panel if parameter.hidden else panel.removeprefix(_RARE)
                parameter.help = self.texts.setdefault(parameter.name, parameter.help or "")
                if not self.shows_all:  # the first sentence and the default
                    sentences = re.split(r"(?<=\.) (?=[A-Za-z])", parameter.help)
                    parameter.help = " ".join(text for text in sentences if text is sentences[0] or "Default" in text)
        return sorted(parameters, key=lambda each: _PANELS.index((_panel(each) or _PANELS[0]).removeprefix(_RARE)))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        lines = [f"  ropecli {self.name} {example}".rstrip() for example in self.examples]
        typer.echo("\n".join([" Examples:", "", *lines, ""]))

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        for option in (parameter for parameter in self.params if isinstance(parameter, TyperOption)):
            name = option.opts[0]
            for alias in (*ALIASES.get(name, ()), *ALIASES.get(f"{name} {option.metavar}", ())):
                parser.add_option(obj=option, opts=[alias], dest=option.name, action="store", nargs=option.nargs)
        return parser


def _panel(parameter: Any) -> str | None:
    """Before Typer 0.26 --help has none."""
    return getattr(parameter, "rich_help_panel", None)


def take_words(parameter: Any) -> Any:
    """Make Typer leave the parameter's words as they are, without a type in help, and only refuse a missing one."""
    is_flag, is_argument = getattr(parameter, "is_flag", False), isinstance(parameter, TyperArgument)

    def process(context: Any, words: Any) -> Any:
        missing = parameter.required if is_argument else _panel(parameter) == _PANELS[0]
        if missing and parameter.value_is_missing(words) and not context.resilient_parsing:
            name = parameter.metavar if is_argument else parameter.opts[0]
            raise MethodError(f"{name} is missing{': ' + _lowered(parameter.help) if parameter.help else '.'}")
        return parameter.callback(context, parameter, words) if parameter.callback else words

    parameter.process_value = process
    parameter.metavar = "" if is_flag else parameter.metavar
    if is_argument:
        parameter.display_type_rich = lambda ctx: None
    return parameter


def _lowered(text: str) -> str:
    """The text within a sentence."""
    return text if text[1].isupper() else text[0].lower() + text[1:]


def _show_all_help(context: Any, parameter: Any, is_given: bool) -> None:
    if is_given:
        context.command.shows_all = True
        typer.echo(context.get_help(), nl=False)
        raise typer.Exit


def as_command(function: Callable[..., Any], show: str, panel: str, examples: Sequence[str]) -> Command:
    """A command that calls `function` and prints its result with `render.SHOW`, or as JSON with --json.

    Parameters before the * are arguments, those after it options.
    """
    given = inspect.signature(function).parameters
    converted = {name: _convert(parameter, given) for name, parameter in given.items()}
    name = function.__name__.replace("_", "-")

    def command(*, as_json: bool, quiet: bool, verbose: bool, help_all: bool = False, **values: Any) -> None:
        shared = function.__name__ in _SHARED
        terminal.set_verbosity(quiet=quiet, verbose=verbose, as_json=as_json, shared=shared)
        try:
            result = function(**{name: converted[name][1](value) for name, value in values.items()})
        except KeyboardInterrupt as stop:
            if not terminal.out.quiet:
                terminal.fail(str(stop) or "Interrupted.")
            raise typer.Exit(130) from None
        from ropecli.cli import render

        try:
            if as_json:
                terminal.print_json(result.as_json())
            else:
                getattr(render, show)(result)
            terminal.out.file.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest at its end
            raise
        if status := getattr(result, "exit_status", 0):
            raise typer.Exit(status)

    parameters = [
        *(parameter for parameter, _ in converted.values()),
        _switch("as_json", "Print the result as JSON, and an error as JSON on standard error.", "--json"),
        _switch("quiet", "Print only the result and errors.", "--quiet", "-q"),
        _switch("verbose", "Print more of the result.", "--verbose", "-v"),
    ]
    if any(_RARE in (each.annotation.__metadata__[0].rich_help_panel or "") for each in parameters):
        text = "Show help with all options, also for loading, servers and engines."
        parameters.append(_switch("help_all", text, "--help-all", callback=_show_all_help, is_eager=True))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)  # the terminal wraps them
    app.command(name, cls=Command, help=text, rich_help_panel=panel)(command)
    made = typing.cast(Command, typer.main.get_command(app))
    made.examples, made.texts = examples, {}
    return made


def _switch(name: str, text: str, *flags: str, **options: Any) -> inspect.Parameter:
    note = typer.Option(*flags, help=text, metavar="", rich_help_panel="Output", **options)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, note])


def _convert(parameter: inspect.Parameter, names: Collection[str]) -> tuple[inspect.Parameter, Callable[[Any], Any]]:
    """The parameter for Typer, and a function that converts the parsed words. names: of all parameters."""
    kind, *notes = typing.get_args(parameter.annotation)
    by_type = {type(note): note for note in notes}
    flag = by_type.get(Flag, Flag(option_name(parameter.name, notes)))
    text = by_type[Doc].documentation
    if Only in by_type and (only := by_type[Only]).other in names:
        text = f"{', '.join(only.values) or f'With {option_name(only.other, ())}'}: {_lowered(text)}"
    default, is_argument = parameter.default, parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    typed, metavar, parse = _type_to_parse(kind, flag.name, several=is_argument, in_tokens=InTokens in by_type)
    options: dict[str, Any] = {"help": text, "metavar": flag.metavar or metavar}
    if values := [name for note in _all_notes(kind, notes) if isinstance(note, OneOf | Check) for name in note.values]:
        options["autocompletion"] = _completion(values)
    if is_argument:
        options["metavar"] = flag.metavar or parameter.name.upper()
        note: Any = typer.Argument(**options)
    else:
        if options["metavar"] is None:
            options["metavar"] = parameter.name.rpartition("_")[2].upper()
        panel = by_type[Panel].title if Panel in by_type else "Settings"
        conditional = Only in by_type and (by_type[Only].values or parameter.name not in ("factor", "factors"))
        if panel in _PANELS[-3:] or conditional:
            panel = _RARE + panel
        if default is parameter.empty:
            panel, default = _PANELS[0], None
        options["rich_help_panel"] = panel
        note = typer.Option(*filter(None, (flag.name, flag.short)), **options)
    if isinstance(default, tuple):
        default = ",".join(f"{number:g}" if isinstance(number, float) else str(number) for number in default)
    elif isinstance(default, int | float) and not isinstance(default, bool):
        default = f"{default:g}" if isinstance(default, float) else str(default)
    typed = typed | None if default is None else typed
    converted = parameter.replace(kind=parameter.KEYWORD_ONLY, default=default, annotation=Annotated[typed, note])
    return converted, lambda value: None if value is None else parse(value)


def _all_notes(kind: Any, notes: Sequence[Any] = ()) -> list[Any]:
    """The notes of a type, with those of its parts, such as the items of a list."""
    parts = [note for part in typing.get_args(kind) for note in _all_notes(part)]
    return [*notes, *getattr(kind, "__metadata__", ()), *parts]


def _completion(values: Sequence[str]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")  # the last one of a list
        return [before + comma + value for value in values if value.startswith(last)]

    return complete


def _type_to_parse(
    kind: Any, option: str, *, several: bool, in_tokens: bool
) -> tuple[Any, str | None, Callable[[Any], Any]]:
    """What Typer parses: bool, str or a list of them; the placeholder in help; and a function that converts the words.

    several: an argument that may be repeated. Options with several files are repeated, too.
    """
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    kinds = typing.get_args(kind) if is_union else (kind,)
    inner = kinds[0]
    if typing.get_origin(inner) is Annotated:
        inner = typing.get_args(inner)[0]
    if inner is bool:
        return bool, "", bool
    if typing.get_origin(inner) is Mapping:
        return list[str], None, lambda words: parse_settings(words) if words else None
    if typing.get_origin(inner) is Sequence:
        (item,) = typing.get_args(inner)
        if several or Path in (item, *typing.get_args(item)):
            return list[str], None, lambda words: list(words) if words else None
        item = typing.get_args(item)[0] if typing.get_origin(item) is Annotated else item
        parse = str if item is str else partial(parse_number, option=option, kind=item, in_tokens=item is int)
        return str, None, lambda words: [parse(word.strip()) for word in words.split(",") if word.strip()]
    if inner in (int, float):
        metavar = "TOKENS" if in_tokens else "N" if inner is int else "X"
        return str, metavar, partial(parse_number, option=option, kind=inner, in_tokens=in_tokens)
    return str, None, str


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse `--set KEY=VALUE` options, with values in YAML 1.2. Raises MethodError."""
    from ropecli.yaml12 import read_yaml

    params = {}
    for setting in settings:
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


def parse_number(word: str, option: str, kind: type, *, in_tokens: bool) -> Any:
    """Parse a number, or a number of tokens: `512`, `4k` or `1M`. Raises MethodError."""
    try:
        return kind(token_count(word) if in_tokens else word)
    except ValueError:
        expected = "number of tokens, such as 512, 4k or 1M" if in_tokens else f"{'whole ' * (kind is int)}number"
        raise MethodError(f"{option} is {shown(word)}; expected a {expected}.") from None
