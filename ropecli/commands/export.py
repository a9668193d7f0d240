"""`ropecli export`: prints the command or the config file with which an engine serves or trains a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_doc import Doc

from ropecli.atomic import optional_path, refuse_unwritable
from ropecli.options import OUTPUT, CheckpointName, Overwrite, Revision
from ropecli.signature import Flag, OneOf, Only, command

if TYPE_CHECKING:
    from ropecli.engines.engine_export import Export


@command
def export(
    checkpoint: CheckpointName,
    *,
    engine: Annotated[
        str,
        Flag("--engine", "-e"),
        OneOf(
            (
                *("axolotl", "llama-factory", "llama.cpp", "lm-eval", "mlx", "ms-swift"),
                *("ollama", "sglang", "trl", "unsloth", "vllm"),
            )
        ),
        Doc(
            "To serve: vllm, sglang, llama.cpp, ollama or mlx. To fine-tune: axolotl, llama-factory, ms-swift, trl or "
            "unsloth. To evaluate: lm-eval."
        ),
    ],
    output: Annotated[
        str | Path | None,
        Flag("--output", "-o", metavar="FILE"),
        Doc("Trainers, ollama: write the config file here, and print the command that reads it."),
        OUTPUT,
    ] = None,
    overwrite: Annotated[Overwrite, Only("output")] = False,
    revision: Revision = None,
) -> "Export":
    """Print the command or config with which an engine runs it."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.engines.engine_export import export_checkpoint

    file = optional_path(output)
    refuse_unwritable(file, overwrite=overwrite)
    return export_checkpoint(open_checkpoint(checkpoint, revision=revision), engine, file)
