"""Stock transformers' config object and model without weights for a config.json."""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ropecli.atomic import naming
from ropecli.checkpoint.files import CONFIG
from ropecli.errors import CheckpointError, OutputError, PatchError, reason_of


def read_stock_config(folder: Path, name: str = "") -> Any:
    """Reads folder/config.json with transformers. name: of the checkpoint, for the message. Raises CheckpointError."""
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # config classes raise what they like
        of = f"{name}: " if name else ""
        raise CheckpointError(f"{of}transformers does not read this config: {reason_of(error)}") from error


def stock_config_of(config: dict[str, Any], name: str = "") -> Any:
    """The same for a config.json that is not on disk yet. Raises OutputError where no temporary file can be written."""
    try:
        with TemporaryDirectory() as folder, naming({Path(folder): name or "this folder"}):
            (Path(folder) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
            return read_stock_config(Path(folder), name)
    except OSError as error:
        raise OutputError(f"A temporary folder could not be written: {error.strerror or error}") from error


def build_without_weights(folder: Path):
    """The causal LM that stock transformers makes from folder/config.json: parameters on the meta device.

    Its rotary modules are real: each is made again from its config, as from_pretrained does once the weights are in
    place. Raises CheckpointError, and PatchError where it has no rotary table.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ropecli.live.rotary import remake_rotary_modules

    try:
        with quiet_transformers(), torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        remake_rotary_modules(model)
    except PatchError:
        raise
    except Exception as error:  # config classes raise what they like
        raise CheckpointError(f"transformers does not build a model from this config: {reason_of(error)}") from error
    return model


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings and no progress bars from transformers and accelerate."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    accelerate_logger = logging.getLogger("accelerate")
    level = accelerate_logger.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    accelerate_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the older dialect, which is written on purpose
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        accelerate_logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
