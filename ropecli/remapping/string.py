"""STRING: far keys move closer, to distances that pretraining has shown more often.

Source: An et al. 2024 (arXiv:2410.18745), section 4, and https://github.com/HKUNLP/STRING.
"""

import math

import numpy as np

from ropecli.errors import MethodError
from ropecli.remapping.branches import check_window, near_and_far
from ropecli.rope import Remapping
from ropecli.scaling.registry import remapping_method

_LOCAL_WINDOW = 128
"""As in the authors' code."""


@remapping_method("string", source="An et al. 2024, arXiv:2410.18745, section 4", training="no", uses_factor=False)
def string(
    pretrained: int,
    target: int,
    *,
    shift: int | None = None,
    local_window: int | None = None,
    score_factor: float = (0.1 * math.log(2) + 1) ** 2,
) -> Remapping:
    """STRING: ρ = n - m below shift, and n - m - shift + local_window beyond it.

    Does not extend the context: the largest distances, which are rare in pretraining, are not used. shift: S in the
    paper, tokens. Default: a third of the trained context length. local_window: W in the paper, tokens. Default: 128,
    at most half of shift. score_factor: multiplies all scores. Default: that of the authors' code, which multiplies cos
    and sin by 0.1·ln 2 + 1; the paper does not mention it. Raises MethodError if local_window exceeds shift, or if
    distances at the target length exceed the trained context length.
    """
    shift = check_window("string", "shift", shift or max(1, pretrained // 3), pretrained)
    local_window = local_window or min(_LOCAL_WINDOW, max(1, shift // 2))
    if local_window > shift:
        raise MethodError(f"string: local_window is {local_window}; expected at most shift, {shift}.")
    largest = target - 1 - shift + local_window
    if target > shift and largest > pretrained:
        raise MethodError(
            f"string: shift is {shift} and local_window is {local_window}, so distances at {target} tokens reach "
            f"{largest}, beyond the trained context length, {pretrained}. Extend the context by a frequency method: "
            "--method yarn+string."
        )
    far = near_and_far(shift, lambda n: n - shift + local_window, lambda m: m)
    params = {"shift": shift, "local_window": local_window, "score_factor": score_factor}
    factor = None if score_factor == 1 else lambda n: np.full(n.shape, score_factor)
    return Remapping(far, params, score_factor=factor)
