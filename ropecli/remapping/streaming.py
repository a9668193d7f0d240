"""StreamingLLM: the last tokens and the attention sinks, at their places in a cache of that size.

Source: Xiao et al. 2023 (arXiv:2309.17453), section 3.2.
"""

import numpy as np

from ropecli.errors import MethodError
from ropecli.remapping.branches import near_and_first
from ropecli.rope import Remapping
from ropecli.scaling.registry import remapping_method


@remapping_method("streaming", source="Xiao et al. 2023, arXiv:2309.17453, section 3.2", training="no",
                  other_names=("streamingllm", "streaming-llm", "attention-sinks"))  # fmt: skip
def streaming(pretrained: int, target: int, *, window: int | None = None, sinks: int = 4) -> Remapping:
    """StreamingLLM: a query sees the last tokens and the first few, the sinks, as far as in a cache of them alone.

    ρ = min(n, sinks + window - 1) - m for the sinks; all between is masked. window: how many of the last tokens, the
    query's own among them; what the sinks leave of the pretraining length unless given. sinks: how many of the first
    tokens stay in the cache. The factor sets the context length alone. Raises MethodError for a cache above the
    pretraining length.
    """
    if sinks >= pretrained:
        raise MethodError(
            f"streaming: sinks is {sinks}; it must be less than {pretrained}, the window that the model was trained to "
            "read: the last tokens need room in it too."
        )
    window = pretrained - sinks if window is None else window
    if sinks + window > pretrained:
        raise MethodError(
            f"streaming: window is {window}; with {sinks} sinks it must be at most {pretrained - sinks}: the model was "
            f"trained to read {pretrained} tokens."
        )
    last = sinks + window - 1
    return Remapping(near_and_first(window, sinks, lambda n: np.minimum(n, last)), {"window": window, "sinks": sinks})
