"""`ropecli export`: prints the command with which an engine serves a checkpoint."""

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
    """Print the command with which an engine serves a checkpoint at its context length."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.engines.engine_export import export_checkpoint

    return export_checkpoint(open_checkpoint(checkpoint, revision=revision), engine)
