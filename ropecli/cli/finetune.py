"""Renders `ropecli finetune`."""

from typing import TYPE_CHECKING

from ropecli.cli.terminal import tell

if TYPE_CHECKING:
    from ropecli.commands.finetune import FinetuneResult


def render(result: "FinetuneResult") -> None:
    for sentence in result.stages:
        tell(sentence)
    if result.output:
        tell(f"{result.checkpoint} → {result.output}: {result.steps} step{'s'[: result.steps > 1]}")
