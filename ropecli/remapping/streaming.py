"""StreamingLLM: attention to the last tokens and the attention sinks, at their positions in the cache.

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
    """StreamingLLM: attend to the last tokens and the first few (attention sinks), at distances within the cache.

    For the sinks, ρ = min(n, sinks + window - 1) - m. Everything in between is masked. window: number of last tokens,
    including the query's own. Default: the pretraining length minus sinks. sinks: number of first tokens to keep.
    The factor only sets the context length. Raises MethodError if sinks + window exceeds the pretraining length.
    """
    if sinks >= pretrained:
        raise MethodError(f"streaming: sinks is {sinks}; expected less than {pretrained}, the trained context length.")
    window = pretrained - sinks if window is None else window
    if sinks + window > pretrained:
        raise MethodError(
            f"streaming: window is {window}; expected at most {pretrained - sinks} with {sinks} sinks, because the "
            f"trained context length is {pretrained}."
        )
    last = sinks + window - 1
    return Remapping(near_and_first(window, sinks, lambda n: np.minimum(n, last)), {"window": window, "sinks": sinks})
