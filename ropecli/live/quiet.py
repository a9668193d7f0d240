"""Silence for the libraries below: what matters of their messages we say ourselves, in our own words."""

import contextlib
import logging
import warnings
from collections.abc import Iterator


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
