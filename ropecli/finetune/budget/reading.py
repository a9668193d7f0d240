"""The config of a checkpoint as transformers reads it."""

from typing import Any

from ropecli.checkpoint.quiet import quiet_transformers
from ropecli.checkpoint.reading import Checkpoint
from ropecli.errors import CheckpointError, reason_of


def read_config(checkpoint: Checkpoint) -> Any:
    """Raises CheckpointError."""
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    except Exception as error:  # config classes raise what they like
        raise CheckpointError(
            f"{checkpoint.name}: transformers does not read this config: {reason_of(error)}"
        ) from error
