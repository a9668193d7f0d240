"""ropecli export: what a serving engine must be told of a checkpoint's positions."""

from typing import Annotated

import typer

from ropecli.cli import options


def command(
    checkpoint: options.Checkpoint,
    engine: Annotated[str, typer.Option("--engine", "-e", help="vllm, sglang or llama.cpp.")],
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the command by which an engine serves a checkpoint at its context length, and what it cannot express."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.cli.terminal import err, out, print_json, warn
    from ropecli.engines.engine_export import export_checkpoint

    export = export_checkpoint(open_checkpoint(checkpoint, revision=revision), engine)
    if as_json:
        print_json(vars(export))
        return
    out.print(export.command, markup=False, soft_wrap=True)
    for sentence in export.cannot:
        warn(sentence)
    for sentence in export.notes:
        err.print(f"note: {sentence}", markup=False, soft_wrap=True)
