"""Read a config.json with stock transformers, and build its model without weights."""

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
    """Read folder/config.json with transformers. name: the checkpoint, for messages. Raises CheckpointError."""
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # config classes raise many kinds of errors
        of = f"{name}: " if name else ""
        raise CheckpointError(f"{of}transformers cannot read this config: {reason_of_stock(error)}") from error


def stock_config_of(config: dict[str, Any], name: str = "") -> Any:
    """Read a config.json that is not on disk yet. Raises OutputError if no temporary file can be written."""
    try:
        with TemporaryDirectory() as folder, naming({Path(folder): name or "this folder"}):
            (Path(folder) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
            return read_stock_config(Path(folder), name)
    except OSError as error:
        raise OutputError(f"Cannot write a temporary folder: {error.strerror or error}") from error


def build_without_weights(folder: Path):
    """Build the causal LM of folder/config.json with stock transformers, parameters on the meta device.

    Its rotary modules are on the CPU, recreated from the config as from_pretrained does after loading the weights.
    Raises CheckpointError, and PatchError if it has no rotary table.
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
    except Exception as error:  # config classes raise many kinds of errors
        raise CheckpointError(
            f"transformers cannot build a model from this config: {reason_of_stock(error)}"
        ) from error
    return model


def reason_of_stock(error: Exception) -> str:
    """Like reason_of. Names the release that reads YaRN by layer type; older ones raise a KeyError."""
    import transformers

    if isinstance(error, KeyError) and error.args == ("original_max_position_embeddings",):
        return f"YaRN by layer type needs transformers 5.9 or newer; {transformers.__version__} is installed."
    return reason_of(error)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers and accelerate."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    accelerate_logger = logging.getLogger("accelerate")
    level = accelerate_logger.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    accelerate_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # about the legacy rope_scaling dialect, which is written on purpose
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        accelerate_logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
