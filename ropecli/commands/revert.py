"""`ropecli revert`: undoes the patches of a checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc

from ropecli.atomic import folder_to_write
from ropecli.options import OUTPUT, CheckpointName, OptionalFolder, Revision, Weights
from ropecli.signature import command

if TYPE_CHECKING:
    from ropecli.checkpoint.writing import Reversal


@dataclass(frozen=True)
class RevertResult:
    """reversal: the undone patches. output: the written folder, None for a dry run."""

    reversal: "Reversal"
    output: Path | None

    def as_json(self) -> dict[str, Any]:
        return {
            "output": str(self.output) if self.output else None,
            "changes": [change._asdict() for change in self.reversal.changes],
            "tokenizer_changes": [change._asdict() for change in self.reversal.tokenizer_changes],
        }


@command
def revert(
    checkpoint: CheckpointName,
    *,
    output: OptionalFolder = None,
    weights: Weights = "link",
    dry_run: Annotated[bool, Doc("Print the changes of config.json and write nothing."), OUTPUT] = False,
    revision: Revision = None,
) -> RevertResult:
    """Undo all patches: write a copy of the original."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.writing import plan_reversal, revert_to

    folder = folder_to_write(output, dry_run=dry_run)
    reversal = plan_reversal(open_checkpoint(checkpoint, weights=folder is not None, revision=revision))
    if folder is not None:
        revert_to(reversal, folder, link=weights == "link")
    return RevertResult(reversal, folder)
