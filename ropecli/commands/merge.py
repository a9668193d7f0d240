"""`ropecli merge`: merges an adapter into its base."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc

from ropecli.atomic import as_path
from ropecli.messages import say_opening
from ropecli.options import IS_CHECKPOINT, OutputFolder, Revision
from ropecli.signature import command

if TYPE_CHECKING:
    from ropecli.checkpoint.opening import Checkpoint


@dataclass(frozen=True)
class MergeResult:
    """base: the checkpoint that the adapter was added to. matrices: how many changed."""

    adapter: Path
    base: "Checkpoint"
    output: Path
    matrices: int

    def as_json(self) -> dict[str, Any]:
        return {"output": str(self.output), "base": self.base.origin(), "matrices": self.matrices}


@command
def merge(
    adapter: Annotated[str | Path, Doc("Folder of an adapter, written by finetune with save: adapter."), IS_CHECKPOINT],
    *,
    output: OutputFolder,
    base: Annotated[str | None, Doc("Base checkpoint. Default: the one that the adapter names."), IS_CHECKPOINT] = None,
    revision: Revision = None,
) -> MergeResult:
    """Merge an adapter, with its RoPE patch, into its base."""
    say_opening(adapter)
    from ropecli.training.finished_weights import merge_to

    folder, written = as_path(adapter), as_path(output)
    source, matrices = merge_to(folder, written, base=base, revision=revision)
    return MergeResult(folder, source, written, matrices)
