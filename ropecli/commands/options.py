"""Options of outputs and training that several commands share, and the reader of a measurement."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc

from ropecli.atomic import as_path as as_path
from ropecli.atomic import optional_path as optional_path
from ropecli.atomic import refuse_existing
from ropecli.errors import MethodError, OutputError
from ropecli.evaluation.loading_options import endpoint_of, loading_of
from ropecli.evaluation.request import OUTPUT, MeasuringOptions
from ropecli.messages import say
from ropecli.signature import Check, Flag, OneOf

if TYPE_CHECKING:
    from ropecli.evaluation.subject import ReaderFactory

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


def begin_measuring(checkpoints: Sequence[str], options: Mapping[str, Any]) -> None:
    """Refuse what is wrong with methods and outputs before torch is imported. Raises MethodError, OutputError."""
    names = ("output", "plot")
    if options["methods"] is not None or any(options.get(name) for name in names):
        from ropecli.checkpoint.scalings import method_specs
        from ropecli.reporting.outputs import Outputs

        if options["methods"] is not None:
            method_specs(options["methods"], options["factors"] or (), options["settings"], options["factors_file"])
        outputs = Outputs(*(optional_path(options.get(name)) for name in names))
        outputs.refuse_overwriting(resume=options["resume"], overwrite=options["overwrite"])
    say_opening(*checkpoints)


def say_opening(*names: object) -> None:
    """Call it before torch is imported, which takes seconds."""
    say(f"Opening {', '.join(map(str, names))} ...")


def reader_factory_of(options: MeasuringOptions, batch_size: int = 1) -> "ReaderFactory":
    """A model in this process, or a server.

    Raises MethodError for options that exclude each other, EndpointError for a server that cannot be used.
    """
    loading, url, engine = loading_of(options), options["endpoint"], options["engine"]
    if engine and url:
        raise MethodError("--engine and --endpoint exclude each other. Remove one.")
    if url is None and engine is None:
        from ropecli.evaluation.subject import LiveReaderFactory

        return LiveReaderFactory(loading, chunk=options["chunk"], batch_size=batch_size)
    arguments = dict(options["engine_arg"] or {})
    if engine and (dtype := loading.pop("dtype")) != "auto":
        arguments["dtype"] = dtype
    if (
        any(value not in ("auto", None) for value in (*loading.values(), options["chunk"], options["baseline"]))
        or batch_size > 1
    ):
        raise MethodError(
            f"With {'--engine' if engine else '--endpoint'} ropecli loads no model. Remove the options for loading, "
            "--chunk, --batch-size and --baseline."
        )
    if url is None:
        from ropecli.engines.engine_export import vllm_overrides
        from ropecli.evaluation.readers.vllm import VllmReaderFactory

        return VllmReaderFactory(arguments, vllm_overrides)
    endpoint = endpoint_of(url, options)

    from ropecli.evaluation.readers.endpoint import EndpointReaderFactory

    return EndpointReaderFactory(endpoint, in_flight=options["requests"] or 16)


def folder_to_write(output: str | Path | None, *, dry_run: bool) -> Path | None:
    """The new folder, None for a dry run. Raises OutputError without an output, and for one that exists."""
    if dry_run:
        return None
    if output is None:
        raise OutputError("Set --output DIR, the folder to write, or --dry-run.")
    refuse_existing(folder := as_path(output))
    return folder
