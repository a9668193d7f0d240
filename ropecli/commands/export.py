"""`ropecli export`: what a serving engine must be told of a checkpoint's positions."""

from typing import Annotated

from annotated_doc import Doc

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.commands.options import Checkpoint, Flag, Revision
from ropecli.engines.engine_export import Export, export_checkpoint


def export(
    checkpoint: Checkpoint,
    *,
    engine: Annotated[str, Flag("--engine", "-e"), Doc("vllm, sglang or llama.cpp.")],
    revision: Revision = None,
) -> Export:
    """Print the command by which an engine serves a checkpoint at its context length, and what it cannot express."""
    return export_checkpoint(open_checkpoint(checkpoint, revision=revision), engine)
