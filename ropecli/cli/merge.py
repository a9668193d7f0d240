"""Renders `ropecli merge`."""

from typing import TYPE_CHECKING

from ropecli.cli.terminal import tell

if TYPE_CHECKING:
    from ropecli.commands.merge import MergeResult


def render(result: "MergeResult") -> None:
    tell(f"{result.adapter} + {result.base.name} → {result.output}: {result.matrices} matrices")
