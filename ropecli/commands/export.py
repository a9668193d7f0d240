"""`ropecli export`: what a serving engine must be told of a checkpoint's positions."""

from typing import TYPE_CHECKING, Annotated

from annotated_doc import Doc

from ropecli.commands.options import Checkpoint, Flag, Revision

if TYPE_CHECKING:
    from ropecli.engines.engine_export import Export


def export(
    checkpoint: Checkpoint,
    *,
    engine: Annotated[str, Flag("--engine", "-e"), Doc("vllm, sglang or llama.cpp.")],
    revision: Revision = None,
) -> "Export":
    """Print the command by which an engine serves a checkpoint at its context length, and what it cannot express."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.engines.engine_export import export_checkpoint

    return export_checkpoint(open_checkpoint(checkpoint, revision=revision), engine)
