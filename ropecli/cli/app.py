"""The `ropecli` command: its subcommands and its error handling.

A subcommand's module is imported when it runs; its functions import model libraries.
"""

import errno
import io
import os
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ropecli.cli import terminal
from ropecli.cli.terminal import shown_progress
from ropecli.cli.typer_command import as_command, take_words
from ropecli.commands import find_command, summary_of
from ropecli.errors import RopecliError, did_you_mean
from ropecli.ranks import read_ranks

_COMMANDS: dict[str, dict[str, tuple[str, ...]]] = {
    "Look": {
        "inspect": ("show_inspection", "demo", "demo -v"),
        "methods": ("show_methods", "", "yarn"),
        "theory": ("show_theory", "demo", "demo --methods yarn,ntk --factor 8 --plot ropes.png"),
        "plan": ("show_plan", "demo --length 1k", "demo --length 64k --gpus 8 --gpu-memory 80GB"),
    },
    "Change": {
        "extend": ("show_extended", "demo --length 1k --output demo-1k", "demo --length 1k --serve vllm --dry-run"),
        "patch": (
            "show_patch",
            "demo --method yarn --factor 4 --output yarn-x4",
            "demo --method ntk --factor 2 --dry-run",
        ),
        "revert": ("show_reverted", "yarn-x4 --output original", "yarn-x4 --dry-run"),
        "merge": ("show_merged", "adapter --output merged", "adapter --base demo --output merged"),
        "export": ("show_export", "demo --engine vllm", "yarn-x4 --engine trl --output trl.yaml"),
        "push": ("show_pushed", "yarn-x4 --repo owner/name --dry-run", "yarn-x4 --repo owner/name --public"),
    },
    "Measure": {
        "eval-ppl": ("show_measured", "demo --data demo --max-documents 4", "demo -d demo --methods yarn --factors 4"),
        "compare": ("show_measured", "demo -d demo --methods yarn,ntk", "demo yarn-x4 -d demo --methods as-is"),
        "needle": ("show_measured", "demo --samples 2", "demo --style passkey --methods yarn --factors 4"),
        "ruler": ("show_measured", "demo --lengths 512 --mode rank --samples 5", "demo --tasks vt,fwe --lengths 512"),
        "check-served": ("show_served", "http://localhost:8000 -c demo", "http://localhost:8000 -c yarn-x4 --json"),
    },
    "Train": {
        "recipe": ("show_recipes", "", "yarn-128k"),
        "finetune": ("show_finetuned", "demo -d demo-train -o tuned", "demo --recipe demo -o tuned --dry-run"),
    },
    "Show": {
        "report": ("show_page", "yarn.json", "yarn.json ntk.json --output both.html"),
        "env": ("show_environment", "", "--json"),
    },
}
"""By group of the help and name: the function of `render` that prints the result, and examples."""
_UsageError: Any = typer.BadParameter.__base__
_PANELS = {name: panel for panel, members in _COMMANDS.items() for name in members}


class _Commands(TyperGroup):
    """The subcommands, each made when it is needed."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """With the subcommands' summaries alone, which needs no import of their modules."""
        made = self.commands
        self.commands = {
            name: TyperCommand(name, help=summary_of(name), rich_help_panel=panel) for name, panel in _PANELS.items()
        }
        super().format_help(ctx, formatter)
        self.commands = made

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_PANELS)

    def get_params(self, ctx: Any) -> list[Any]:
        return list(map(take_words, super().get_params(ctx)))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _PANELS and not cmd_name.startswith("-"):
            raise RopecliError(f"No command {cmd_name!r}.{did_you_mean(cmd_name, _PANELS)} See `ropecli --help`.")
        if cmd_name not in self.commands and cmd_name in _PANELS:
            panel = _PANELS[cmd_name]
            show, *examples = _COMMANDS[panel][cmd_name]
            self.commands[cmd_name] = as_command(find_command(cmd_name), show, panel, examples)
        return self.commands.get(cmd_name)


app = typer.Typer(
    name="ropecli",
    cls=_Commands,
    help="Extend the context window of Hugging Face checkpoints with rotary position embeddings.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(given: bool) -> None:
    if given:
        from ropecli.version import VERSION

        typer.echo(f"ropecli {VERSION}")
        raise typer.Exit


_GUIDE = """
Exit status: 0 done; 2 something to fix, one message on standard error says what; 1 a bug; 129, 130, 143 interrupted.
extend: 3 no choice is good enough. check-served: 3 the server does not apply the scaling, 4 it cannot be told.
Every command is also a Python function, ropecli.NAME, with the same options; --json prints its result.

1. Never edit the RoPE fields of config.json by hand: patch writes and proves them. A factor is relative to the
   pretraining length, which config.json may not say rightly; inspect tells it. Check the server with check-served,
   and the model in a trainer with ropecli.check_loaded(model).
2. A low perplexity does not say that far text is read: measure with --protocol recall. Most methods need headroom, a
   factor of 1.5 to 2 times what the length needs, with --target-length for the length itself.
3. No output is overwritten without --overwrite. To continue an interrupted run, repeat the command with --resume.
"""


def _print_guide(given: bool) -> None:
    if given:
        for commands in _COMMANDS.values():
            for name, (_, example, _) in commands.items():
                typer.echo(f"{summary_of(name)}\n  {f'ropecli {name} {example}'.rstrip()}")
        typer.echo(_GUIDE.rstrip())
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
    guide: bool = typer.Option(
        False, "--guide", callback=_print_guide, is_eager=True, help="Print all commands and three traps on one page."
    ),
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
    with shown_progress(("ropecli", *sys.argv[1:])):
        status = _run(sys.argv[1:] or ["--help"])
    _end_among_others(status)
    sys.exit(status)


def _run(words: list[str]) -> int:
    """Run a command. Returns the exit status."""
    terminal.set_verbosity(as_json="--json" in words)
    try:
        return int(app(words, prog_name="ropecli", standalone_mode=False) or 0)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except (RopecliError, OSError) as error:
        terminal.fail(_of_full_disk(error) or str(error))
    except _UsageError as error:
        of = f"{error.ctx.command_path} --help" if error.ctx else "ropecli --help"
        terminal.fail(f"{error.format_message()} See `{of}`.")
    return 2


def _of_full_disk(error: Exception) -> str:
    """The message for a file that had no room; empty for other errors."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    name = (error.filename2 or error.filename) if isinstance(error, OSError) and full else None
    if not name:
        return ""
    shown = Path(*(part for part in Path(name).parts if not part.endswith(".partial")))  # without temporary folders
    return f"No space left for {shown}. Free some space and run the command again, with --resume if it has that."


def _end_among_others(status: int) -> None:
    """End one of several processes at once: torch's process group can abort during an orderly exit."""
    if read_ranks().count > 1:
        terminal.out.file.flush()
        terminal.err.file.flush()
        os._exit(status)
