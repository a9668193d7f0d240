"""ReRoPE: true distances up to a window, a constant distance beyond it. Leaky ReRoPE: a smaller slope beyond it.

Source: Su 2023, "Transformer Upgrade Path 12: ReRoPE", https://kexue.fm/archives/9708.
"""

import math

import numpy as np

from ropecli.errors import MethodError
from ropecli.remapping.branches import check_window, near_and_far
from ropecli.rope import Remapping
from ropecli.scaling.registry import remapping_method

_SOURCE = "Su 2023, https://kexue.fm/archives/9708"


@remapping_method("rerope", source=_SOURCE, training="no")
def rerope(pretrained: int, target: int, *, window: int | None = None) -> Remapping:
    """ReRoPE: ρ = min(n - m, window), so the model sees only known distances at any length.

    window: tokens. Default: half of the pretraining length. The factor only sets the context length.
    """
    window = check_window("rerope", "window", window or max(1, pretrained // 2), pretrained)
    far = near_and_far(window, lambda n: np.full_like(n, window), np.zeros_like)
    return Remapping(far, {"window": window})


@remapping_method("leaky-rerope", source=_SOURCE, training="no")
def leaky_rerope(pretrained: int, target: int, *, window: int | None = None, slope: float | None = None) -> Remapping:
    """Leaky ReRoPE: ρ = window + (n - m - window) / slope beyond the window, so far keys keep their order.

    window: as in rerope. slope: k in the source. Default: maps the target's largest distance to the pretraining
    length. Raises MethodError for a slope below 1, if distances at the target length exceed the pretraining length, or
    if the window is the whole pretraining length.
    """
    window = check_window("leaky-rerope", "window", window or max(1, pretrained // 2), pretrained)
    room = pretrained - window
    least = max(1.0, (target - window) / room) if room else 1.0
    slope = least if slope is None else slope
    if slope < 1 or slope * room < target - 1 - window:
        least = math.ceil(least * 1000) / 1000
        raise MethodError(
            f"leaky-rerope: slope is {slope:g} and window {window}; expected "
            f"{f'a slope of at least {least:.12g}' if room else 'a smaller window'}, so that distances at {target} "
            f"tokens stay within the trained context length, {pretrained}."
        )
    far = near_and_far(window, lambda n: window + (n - window) / slope, lambda m: m / slope)
    return Remapping(far, {"window": window, "slope": slope})
