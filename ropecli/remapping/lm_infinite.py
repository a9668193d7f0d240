"""LM-Infinite: attention to the last tokens and the first few, with limited distances.

Source: Han et al. 2023 (arXiv:2308.16137): Λ-shaped mask and distance limit.
"""

import numpy as np

from ropecli.remapping.branches import check_window, near_and_first
from ropecli.rope import Remapping
from ropecli.scaling.registry import remapping_method

_GLOBAL_TOKENS = 10
"""The authors use 10 to 100. Fewer tokens stay closer to the number of keys seen in pretraining."""


@remapping_method("lm-infinite", source="Han et al. 2023, arXiv:2308.16137", training="no",
                  other_names=("lm_infinite", "lminfinite"))  # fmt: skip
def lm_infinite(
    pretrained: int, target: int, *, window: int | None = None, global_tokens: int | None = None
) -> Remapping:
    """LM-Infinite: attend to the last tokens and the first few, ρ = min(n - m, window). Mask everything in between.

    window: L_pretrain in the paper, tokens. Default: the pretraining length. global_tokens: n_global in the paper, the
    number of first tokens that every query sees. Default: 10 (the paper uses 10 to 100), at most the pretraining
    length. The factor only sets the context length. Raises MethodError if either exceeds the pretraining length.
    """
    window = check_window("lm-infinite", "window", window or pretrained, pretrained)
    first = check_window("lm-infinite", "global_tokens", global_tokens or min(_GLOBAL_TOKENS, pretrained), pretrained)
    branches = near_and_first(window, first, lambda n: np.full_like(n, window), np.zeros_like)
    return Remapping(branches, {"window": window, "global_tokens": first})
