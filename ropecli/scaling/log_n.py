"""Log-n temperature: an option of every distance method, because attention over more keys gets flatter.

Source: Su 2021, https://kexue.fm/archives/8823; Chiang and Cholak 2022 (arXiv:2202.12172), section 5.3.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Remapping

LOG_N = "log_n"
_ABOUT = (
    f"{LOG_N}: multiply the scores of the n-th token's query by max(1, ln n / ln L), where L is the trained context "
    "length."
)


def with_log_n(function: Callable[..., Remapping]) -> Callable[..., Remapping]:
    """Add the option log_n to a distance method."""

    @functools.wraps(function)
    def method(pretrained: int, target: int, *, log_n: bool = False, **params: Any) -> Remapping:
        remapping = function(pretrained, target, **params)
        if not log_n:
            return remapping
        if pretrained < 2:
            raise MethodError(f"log_n is true; expected false with a trained context length of {pretrained}.")
        own = remapping.score_factor

        def score_factor(n: np.ndarray) -> np.ndarray:
            grown = np.maximum(1.0, np.log(n + 1.0) / math.log(pretrained))
            return grown if own is None else grown * own(n)

        return replace(remapping, score_factor=score_factor, params={**remapping.params, LOG_N: True})

    option = inspect.Parameter(LOG_N, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    own = inspect.signature(function)
    method.__signature__ = own.replace(parameters=[*own.parameters.values(), option])  # type: ignore[attr-defined]
    method.__doc__ = f"{inspect.getdoc(function)}\n\n{_ABOUT}"
    return method
