"""The `ropecli` command: its subcommands and its error handling.

Loads neither torch nor transformers; a command imports them when it runs.
"""

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from ropecli import commands
from ropecli.cli import render
from ropecli.cli.terminal import fail, shown_progress
from ropecli.cli.typer_command import AliasedCommand, as_command
from ropecli.errors import RopecliError
from ropecli.ranks import read_ranks

app = typer.Typer(
    name="ropecli",
    help="Extend the context window of Hugging Face checkpoints with rotary position embeddings.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[str, list[tuple[Callable[..., Any], Callable[[Any], None]]]] = {
    "Look": [
        (commands.inspect, render.show_inspection),
        (commands.methods, render.show_methods),
        (commands.theory, render.show_theory),
        (commands.plan, render.show_plan),
    ],
    "Change": [
        (commands.extend, render.show_extended),
        (commands.patch, render.show_patch),
        (commands.revert, render.show_reverted),
        (commands.merge, render.show_merged),
        (commands.export, render.show_export),
        (commands.push, render.show_pushed),
    ],
    "Measure": [
        (commands.eval_ppl, render.show_measured),
        (commands.compare, render.show_measured),
        (commands.passkey, render.show_measured),
        (commands.needle, render.show_measured),
        (commands.ruler, render.show_measured),
        (commands.check_served, render.show_served),
    ],
    "Train": [
        (commands.recipe, render.show_recipes),
        (commands.finetune, render.show_finetuned),
        (commands.tune, render.show_tuned),
    ],
    "Show": [(commands.plot, render.show_file), (commands.report, render.show_file)],
}
for panel, members in _COMMANDS.items():
    for function, show in members:
        name = function.__name__.replace("_", "-")
        app.command(name, cls=AliasedCommand, rich_help_panel=panel)(as_command(function, show))


def _print_version(given: bool) -> None:
    if given:
        from ropecli.version import VERSION

        typer.echo(f"ropecli {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Run the command line. Exit status: 2, the user can fix it; 129, 130, 143, interrupted; 1, a bug.

    A closed pipe, as in `| head -1`, ends it with 1 too, quietly. check-served adds 3 and 4.
    """
    # Spinning OpenMP threads slow down other jobs on the machine several times. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # signs that the terminal's encoding does not have
    try:
        with shown_progress(("ropecli", *sys.argv[1:])):
            app()
    except SystemExit as stop:
        if stop.code == 130:
            fail("interrupted")
        _end_among_others(stop.code)
        raise
    except (RopecliError, OSError) as error:
        fail(str(error))
        _end_among_others(2)
        sys.exit(2)


def _end_among_others(status: int | str | None) -> None:
    """End one of several processes at once: torch's process group can abort during an orderly exit."""
    if read_ranks().count > 1 and not isinstance(status, str):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)
