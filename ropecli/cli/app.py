"""The `ropecli` command: its subcommands, and what becomes of their errors.

Loads neither torch nor transformers; a command imports them when it runs.
"""

import os
import sys
from typing import NoReturn

import typer

from ropecli.cli import (
    compare,
    eval_ppl,
    export,
    finetune,
    inspect,
    merge,
    methods,
    needle,
    passkey,
    patch,
    plan,
    plot,
    report,
    theory,
    tune,
)
from ropecli.cli.options import expand_home
from ropecli.cli.streams import safe_streams
from ropecli.cli.terminal import fail
from ropecli.errors import RopecliError, reason_of
from ropecli.version import VERSION

app = typer.Typer(
    name="ropecli",
    help="Extend the context window of Hugging Face checkpoints with rotary position embeddings.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("inspect")(expand_home(inspect.command))
app.command("methods")(expand_home(methods.command))
app.command("patch")(expand_home(patch.command))
app.command("eval-ppl")(expand_home(eval_ppl.command))
app.command("compare")(expand_home(compare.command))
app.command("passkey")(expand_home(passkey.command))
app.command("needle")(expand_home(needle.command))
app.command("plot")(expand_home(plot.command))
app.command("theory")(expand_home(theory.command))
app.command("report")(expand_home(report.command))
app.command("plan")(expand_home(plan.command))
app.command("finetune")(expand_home(finetune.command))
app.command("tune")(expand_home(tune.command))
app.command("merge")(expand_home(merge.command))
app.command("export")(expand_home(export.command))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ropecli {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Runs the command line. Exit status 2: the user can fix it; 129, 130 and 143: interrupted; 1: a fault of ours."""
    # Idle OpenMP threads that spin make two jobs on one machine several times slower; read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with safe_streams():
            app()
    except SystemExit as stop:
        if stop.code == 130:
            fail("interrupted")
        _end_among_others(stop.code)
        raise
    except RopecliError as error:
        _refuse(str(error))
    except OverflowError as error:
        _refuse(f"A number that was given is too large: {reason_of(error)}.")


def _refuse(message: str) -> NoReturn:
    fail(message)
    _end_among_others(2)
    sys.exit(2)


def _end_among_others(status: int | str | None) -> None:
    """One of several processes ends at once: threads of torch's process group abort some that tidy up first."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not isinstance(status, str):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)
