"""Options of outputs and training that several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_doc import Doc

from ropecli.atomic import as_path as as_path
from ropecli.atomic import optional_path as optional_path
from ropecli.atomic import refuse_existing
from ropecli.errors import OutputError
from ropecli.evaluation.request import OUTPUT
from ropecli.messages import say
from ropecli.signature import Check, Flag, OneOf

if TYPE_CHECKING:
    pass

Weights = Annotated[
    str,
    OneOf(("link", "copy")),
    Doc("How to copy unchanged weights: link (hard-link where possible) or copy (always copy)."),
    OUTPUT,
]
Overwrite = Annotated[bool, Doc("Replace an existing file."), OUTPUT]
Resume = Annotated[bool, Doc("Resume an interrupted run of the same --output."), OUTPUT]


def _check_recipe(name: str) -> None:
    from ropecli.training.recipe_files import recipe_path

    if path := recipe_path(as_path(name)):
        path.stat()


RecipeFile = Annotated[
    str | Path | None,
    Flag("--recipe", "-r", metavar="NAME|FILE"),
    Doc("A recipe that `ropecli recipe` lists, or a YAML file."),
    Check(_check_recipe),
]
OutputFolder = Annotated[str | Path, Flag("--output", "-o", metavar="DIR"), Doc("Folder to write."), OUTPUT]


def say_opening(*names: object) -> None:
    """Call it before torch is imported, which takes seconds."""
    say(f"Opening {', '.join(map(str, names))} ...")


def folder_to_write(output: str | Path | None, *, dry_run: bool) -> Path | None:
    """The new folder, None for a dry run. Raises OutputError without an output, and for one that exists."""
    if dry_run:
        return None
    if output is None:
        raise OutputError("Set --output DIR, the folder to write, or --dry-run.")
    refuse_existing(folder := as_path(output))
    return folder
