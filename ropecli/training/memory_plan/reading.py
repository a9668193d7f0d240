"""The config of a checkpoint as transformers reads it."""

from typing import Any

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.live.stock import read_folder, read_values


def read_config(checkpoint: Checkpoint, plan: PatchPlan | None = None) -> Any:
    """plan: a patch in effect that is not on disk yet. Raises CheckpointError, OutputError."""
    if plan is None:
        return read_folder(checkpoint.folder, checkpoint.name)
    return read_values(plan.config, checkpoint.name)
