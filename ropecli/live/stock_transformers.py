"""Read a config.json with stock transformers."""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ropecli.atomic import naming
from ropecli.checkpoint.files import CONFIG, read_json
from ropecli.errors import CheckpointError, reason_of, shown


def read_stock_config(folder: Path, name: str = "") -> Any:
    """Read folder/config.json with transformers. name: the checkpoint, for messages. Raises CheckpointError."""
    from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, __version__

    of = f"{name}: " if name else ""
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = getattr(config, "text_config", None)
        if not isinstance(text, PreTrainedConfig | None):
            raise TypeError(f"text_config is {shown(text)}, which {type(config).__name__} does not have")
        return config
    except Exception as error:  # config classes raise many kinds of errors
        config = read_json(folder / CONFIG)
        model_type, writer = config.get("model_type"), config.get("transformers_version")
        if not isinstance(model_type, str) or model_type in CONFIG_MAPPING:
            reason = f"transformers cannot read this config of type {model_type}: {reason_of_stock(error)}"
        else:
            by = f" (config.json is by {writer})" if writer else ""
            reason = (
                f"transformers {__version__} does not know model_type {shown(model_type)}, and the checkpoint's own "
                f"code is not run. Install a release that does{by}. Without it, only patch --no-verify works."
            )
        raise CheckpointError(f"{of}{reason}") from error


def stock_config_of(config: dict[str, Any], name: str = "") -> Any:
    """Read a config.json that is not on disk yet."""
    with TemporaryDirectory() as folder, naming(Path(folder), name or "this folder"):
        (Path(folder) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        return read_stock_config(Path(folder), name)


def auto_class_of(config: Any) -> Any:
    """The auto class that builds every part of the model: multimodal LM, causal LM, or encoder (masked LM).

    config: as read by transformers. Raises CheckpointError if there is none.
    """
    for auto_class in auto_classes():
        if type(config) in auto_class._model_mapping:
            return auto_class
    raise CheckpointError(f"transformers has no language model for model_type {shown(config.model_type)}.")


def auto_classes() -> tuple[Any, ...]:
    """The auto classes of models that can be patched. The first one that knows a config builds it.

    Multimodal first: as a causal LM, transformers builds only the text part of Qwen3.5, Llama 4 and others.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForMultimodalLM

    return AutoModelForMultimodalLM, AutoModelForCausalLM, AutoModelForMaskedLM


def is_encoder(config: Any) -> bool:
    """Return whether tokens see later tokens too. config: see auto_class_of."""
    return auto_class_of(config) is auto_classes()[-1]


def refuse_encoder(config: Any, name: str) -> None:
    """Raise CheckpointError for an encoder. config: see auto_class_of. name: the checkpoint, for the message."""
    if is_encoder(config):
        raise CheckpointError(
            f"{name} is an encoder ({config.model_type}): it sees later tokens too, so it has no perplexity and cannot "
            "be trained on the next token. It can be inspected and patched."
        )


def reason_of_stock(error: Exception) -> str:
    """Like reason_of. Says which errors are faults in transformers' own code, and which release fixes a known one."""
    import transformers

    if isinstance(error, KeyError) and error.args == ("original_max_position_embeddings",):
        return f"YaRN by layer type needs transformers 5.9 or newer; {transformers.__version__} is installed."
    if isinstance(error, ArithmeticError | AssertionError | AttributeError | LookupError | TypeError):
        return (
            f"transformers {transformers.__version__} itself fails with {type(error).__name__} ({reason_of(error)}). "
            "Check the values in config.json, or use another method or another release of transformers."
        )
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
            # about the legacy rope_scaling dialect, which is written on purpose
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        accelerate_logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
