"""Options of outputs and training that several commands share, and the reader of a measurement."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc

from ropecli.atomic import as_path as as_path
from ropecli.atomic import optional_path as optional_path
from ropecli.atomic import refuse_existing
from ropecli.errors import MethodError, OutputError
from ropecli.evaluation.request import (
    OUTPUT,
    LoadingOptions,
    MeasuringOptions,
    ServerOptions,
)
from ropecli.signature import Flag, OneOf

if TYPE_CHECKING:
    from ropecli.evaluation.endpoint import Endpoint
    from ropecli.evaluation.subject import ReaderFactory

Weights = Annotated[
    str,
    OneOf(("link", "copy")),
    Doc("How to copy unchanged weights: link (hard-link where possible) or copy (always copy)."),
    OUTPUT,
]
Resume = Annotated[bool, Doc("Resume an interrupted run of the same --output."), OUTPUT]


# Training
RecipeFile = Annotated[
    str | Path | None,
    Flag("--recipe", "-r", metavar="NAME|FILE"),
    Doc("A recipe that `ropecli recipe` lists, or a YAML file."),
]
OutputFolder = Annotated[str | Path, Flag("--output", "-o", metavar="DIR"), Doc("Folder to write."), OUTPUT]


def reader_factory_of(options: MeasuringOptions, batch_size: int = 1, *model_options: object) -> "ReaderFactory":
    """A model in this process, or a server. model_options: further ones that need a model here; None if not set.

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
        any(
            value not in ("auto", None)
            for value in (*loading.values(), options["chunk"], options["baseline"], *model_options)
        )
        or batch_size > 1
    ):
        raise MethodError(
            f"With {'--engine' if engine else '--endpoint'} ropecli loads no model. Remove the options for loading, "
            "--chunk, --batch-size, --baseline and --evaluator."
        )
    if url is None:
        from ropecli.engines.engine_export import vllm_overrides
        from ropecli.evaluation.readers.vllm import VllmReaderFactory

        return VllmReaderFactory(arguments, vllm_overrides)
    endpoint = endpoint_of(url, options)

    from ropecli.evaluation.readers.endpoint import EndpointReaderFactory

    return EndpointReaderFactory(endpoint, in_flight=options["requests"] or 16)


def endpoint_of(url: str, options: ServerOptions) -> "Endpoint":
    """Raises EndpointError."""
    from ropecli.evaluation.endpoint import Endpoint

    names = {"served_name": options["served_name"], "key_variable": options["api_key_env"]}
    return Endpoint(url, **names, timeout=options["timeout"] or 600.0)


def loading_of(options: LoadingOptions) -> dict[str, Any]:
    """The arguments of load_model. Raises MethodError for options that exclude each other."""
    device, device_map, max_memory = options["device"], options["device_map"], options["max_memory"]
    load_in_8bit, load_in_4bit = options["load_in_8bit"], options["load_in_4bit"]
    for names, are_set in (
        ("--load-in-8bit and --load-in-4bit", load_in_8bit and load_in_4bit),
        ("--device and --device-map", device_map and device != "auto"),
    ):
        if are_set:
            raise MethodError(f"{names} exclude each other. Remove one.")
    loading: dict[str, Any] = {"dtype": options["dtype"], "device": device, "attn": options["attn"]}
    if device_map:
        loading |= {"device_map": device_map, "max_memory": None}
    if device_map and max_memory is not None:
        sizes = re.findall(r"(?:^|,)(\d+|cpu)=(\d+(?:\.\d+)?[KMG]i?B)(?=,|$)", max_memory)
        if len(sizes) != len(max_memory.split(",")):
            raise MethodError(
                f"--max-memory is {max_memory!r}; expected sizes by GPU number or cpu, such as 0=20GB,cpu=60GB."
            )
        loading["max_memory"] = {int(name) if name.isdigit() else name: size for name, size in sizes}
    return {**loading, "bits": 8 if load_in_8bit else 4} if load_in_8bit or load_in_4bit else loading


def folder_to_write(output: str | Path | None, *, dry_run: bool) -> Path | None:
    """The new folder, None for a dry run. Raises OutputError without an output, and for one that exists."""
    if dry_run:
        return None
    if output is None:
        raise OutputError("Set --output DIR, the folder to write, or --dry-run.")
    refuse_existing(folder := as_path(output))
    return folder
