"""ropecli merge: an adapter and its base as one whole checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from ropecli.cli import options


def command(
    adapter: Annotated[
        Path, typer.Argument(help="The folder of an adapter, as finetune with save: adapter writes it.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    base: Annotated[
        str | None, typer.Option(help="The checkpoint to add it to; by default the one that the adapter names.")
    ] = None,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a whole checkpoint: the base's weights with the adapter added, and the adapter's RoPE patch."""
    from ropecli.cli.terminal import out, print_json, warn
    from ropecli.training.finished_weights import merge_to

    done = merge_to(adapter, output, base=base, revision=revision, say=warn)
    if as_json:
        print_json({"output": str(output), "base": done.base.origin(), "matrices": done.matrices})
    else:
        out.print(f"{adapter} + {done.base.name} → {output}: {done.matrices} matrices", markup=False, soft_wrap=True)
