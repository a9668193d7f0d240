"""Temperatures that follow the length: options of every distance method, because attention over more keys is flatter.

Sources: log_n: Su 2021, https://kexue.fm/archives/8823; Chiang and Cholak 2022 (arXiv:2202.12172), section 5.3.
yarn_temperature: Qwen2.5-1M (arXiv:2501.15383). The report has YaRN's √(1/t), whose square multiplies the
scores; vLLM's implementation, which is followed here, multiplies them by it once. llama4_temperature: transformers'
get_llama_4_attn_scale with Ministral 3's llama_4_scaling_beta, 0.1, after Nakanishi 2025 (arXiv:2501.19399).
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

_FORMS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "log_n": lambda n, trained: np.log(n) / math.log(trained),
    "yarn_temperature": lambda n, trained: 0.1 * np.log(n / trained) + 1,
    "llama4_temperature": lambda n, trained: 0.1 * np.log1p(np.floor((n - 1) / trained)) + 1,
}
TEMPERATURES = tuple(_FORMS)
_ABOUT = (
    "log_n: multiply the scores of the n-th token's query by max(1, ln n / ln L), for a trained context length L. "
    "yarn_temperature: multiply them by max(1, 0.1·ln(n/L) + 1) instead, like Qwen2.5-1M. "
    "llama4_temperature: multiply them by 0.1·ln(⌊(n-1)/L⌋ + 1) + 1 instead, like Ministral 3."
)


def with_temperatures(function: Callable[..., Remapping]) -> Callable[..., Remapping]:
    """Add the options to a distance method."""

    @functools.wraps(function)
    def method(pretrained: int, target: int, **params: Any) -> Remapping:
        chosen = [name for name in TEMPERATURES if params.pop(name, False)]
        remapping = function(pretrained, target, **params)
        if not chosen:
            return remapping
        if len(chosen) > 1:
            raise MethodError(f"{' and '.join(chosen)} both set the temperature. Set only one of them.")
        form, unchanged = _FORMS[chosen[0]], remapping.score_factor

        def score_factor(n: np.ndarray) -> np.ndarray:
            grown = np.maximum(1.0, form(n + 1.0, pretrained))
            return grown if unchanged is None else grown * unchanged(n)

        return replace(remapping, score_factor=score_factor, params={**remapping.params, chosen[0]: True})

    kind = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter(name, kind, default=False, annotation=bool) for name in TEMPERATURES]
    signature = inspect.signature(function)
    method.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *options])  # type: ignore[attr-defined]
    method.__doc__ = f"{inspect.getdoc(function)}\n\n{_ABOUT}"
    return method
