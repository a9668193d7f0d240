"""LM-Infinite: the last tokens and the first few, as far away as a model has seen them and no farther.

Source: Han et al. 2023 (arXiv:2308.16137), the Λ-shaped mask and the limit of the distances.
"""

import numpy as np

from ropecli.remapping.branches import check_window, near_and_first
from ropecli.rope import Remapping
from ropecli.scaling.registry import remapping_method

_GLOBAL_TOKENS = 10
"""The authors take 10 to 100; the fewest add least to the number of tokens that a model is used to attend to."""


@remapping_method("lm-infinite", source="Han et al. 2023, arXiv:2308.16137", training="no",
                  other_names=("lm_infinite", "lminfinite"))  # fmt: skip
def lm_infinite(
    pretrained: int, target: int, *, window: int | None = None, global_tokens: int | None = None
) -> Remapping:
    """LM-Infinite: a query sees the last tokens and the first few, ρ = min(n - m, window). All between is masked.

    window: the authors' L_pretrain, tokens; the whole pretraining length unless given. global_tokens: the authors'
    n_global, how many of the first tokens every query sees; 10 unless given (the paper takes 10 to 100), or as many as
    the pretraining length has. The factor sets the context length alone. Raises MethodError where either is
    above the pretraining length.
    """
    window = check_window("lm-infinite", "window", window or pretrained, pretrained)
    first = check_window("lm-infinite", "global_tokens", global_tokens or min(_GLOBAL_TOKENS, pretrained), pretrained)
    branches = near_and_first(window, first, lambda n: np.full_like(n, window), np.zeros_like)
    return Remapping(branches, {"window": window, "global_tokens": first})
