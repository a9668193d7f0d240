"""The config of a checkpoint as transformers reads it."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ropecli.checkpoint.files import CONFIG
from ropecli.checkpoint.plan import PatchPlan
from ropecli.checkpoint.quiet import quiet_transformers
from ropecli.checkpoint.reading import Checkpoint
from ropecli.checkpoint.writing import write_json
from ropecli.errors import CheckpointError, reason_of


def read_config(checkpoint: Checkpoint, plan: PatchPlan | None = None) -> Any:
    """plan: a patch in effect that is not on disk yet. Raises CheckpointError."""
    if plan is None:
        return _read(checkpoint.folder, checkpoint.name)
    with TemporaryDirectory() as folder:
        write_json(Path(folder) / CONFIG, plan.config)
        return _read(Path(folder), checkpoint.name)


def _read(folder: Path, name: str) -> Any:
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # config classes raise what they like
        raise CheckpointError(f"{name}: transformers does not read this config: {reason_of(error)}") from error
