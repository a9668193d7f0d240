"""bitsandbytes, which need not be installed: frozen weights and the optimizer's state in fewer bits."""

import importlib.util
import logging
from typing import Any

from ropecli.errors import RecipeError, reason_of


def load_bitsandbytes(asked: str, instead: str) -> Any:
    """The library. asked, instead: keys of the recipe, as 'adapter: qlora'.

    Raises RecipeError where it is missing, or does not load.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(
            f"{asked} needs bitsandbytes, which is not installed. "
            f"Install it (pip install bitsandbytes), or take {instead}."
        )
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it would name, on a CPU, a package of faster code that it does without
    try:
        import bitsandbytes
    except Exception as error:  # a library that was built for another device fails in its own ways
        raise RecipeError(
            f"{asked} needs bitsandbytes, and the one here does not load: {reason_of(error)}. "
            f"Install one that fits, or take {instead}."
        ) from error
    finally:
        logger.setLevel(level)
    return bitsandbytes
