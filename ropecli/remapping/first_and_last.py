"""Attention to the last tokens and the first few: LM-Infinite and StreamingLLM.

Sources: Han et al. 2023 (arXiv:2308.16137), Λ-shaped mask and distance limit; Xiao et al. 2023 (arXiv:2309.17453),
section 3.2: attention sinks, at their positions in the cache.
"""

from dataclasses import replace

import numpy as np

from ropecli.errors import MethodError
from ropecli.remapping.near_and_far import check_window, near_and_far
from ropecli.rope import Branch, PositionMap, Remapping
from ropecli.scaling.registry import remapping_method

_GLOBAL_TOKENS = 10
"""The authors use 10 to 100. Fewer tokens stay closer to the number of keys seen in pretraining."""


def sliding(window: int) -> Remapping:
    """Standard attention over the last `window` tokens, including the query's own."""
    return Remapping((Branch(lambda n: np.maximum(n - window + 1, 0), lambda n: n + 1),))


def _near_and_first(
    window: int, first: int, query: PositionMap, key: PositionMap | None = None
) -> tuple[Branch, Branch]:
    """The last `window` tokens at their true distance, and the first `first` tokens at query(n) - key(m)."""
    near, far = near_and_far(window, query, key)
    return near, replace(far, stop=lambda n: np.minimum(far.stop(n), first))


@remapping_method("lm-infinite", source="Han et al. 2023, arXiv:2308.16137", training="no")  # fmt: skip
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
    branches = _near_and_first(window, first, lambda n: np.full_like(n, window), np.zeros_like)
    return Remapping(branches, {"window": window, "global_tokens": first})


@remapping_method("streaming", source="Xiao et al. 2023, arXiv:2309.17453, section 3.2", training="no")  # fmt: skip
def streaming(pretrained: int, target: int, *, window: int | None = None, sinks: int = 4) -> Remapping:
    """StreamingLLM: attend to the last tokens and the first few (attention sinks), at distances within the cache.

    For the sinks, ρ = min(n, sinks + window - 1) - m. Everything in between is masked. window: number of last tokens,
    including the query's own. Default: the pretraining length minus sinks. sinks: number of first tokens to keep.
    The factor only sets the context length. Raises MethodError if sinks + window exceeds the pretraining length.
    """
    window = pretrained - sinks if window is None else window
    if window < 1 or sinks + window > pretrained:
        raise MethodError(
            f"streaming: window is {window}; expected at most {pretrained - sinks} with {sinks} sinks, because the "
            f"trained context length is {pretrained}."
        )
    last = sinks + window - 1
    return Remapping(_near_and_first(window, sinks, lambda n: np.minimum(n, last)), {"window": window, "sinks": sinks})
