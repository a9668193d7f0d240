"""ReRoPE: distances are as they are up to a window, and beyond it all the same (or, leaky, ever slower to grow).

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
    """ReRoPE: ρ = min(n - m, window), so that no distance is new to the model, at any length.

    window: tokens; half of the pretraining length unless given. The factor sets the context length alone.
    """
    window = check_window("rerope", "window", window or max(1, pretrained // 2), pretrained)
    far = near_and_far(window, lambda n: np.full_like(n, window), np.zeros_like)
    return Remapping(far, {"window": window})


@remapping_method("leaky-rerope", source=_SOURCE, training="no", other_names=("leaky_rerope",))
def leaky_rerope(pretrained: int, target: int, *, window: int | None = None, slope: float | None = None) -> Remapping:
    """Leaky ReRoPE: ρ = window + (n - m - window) / slope beyond the window, so that far keys keep their order.

    window: as in rerope. slope: Su's k; unless given, the one that maps the target's farthest distance to the end of
    the pretraining length. Raises MethodError for a slope below 1, for one that leaves distances inside the target
    above the pretraining length, and where the window leaves no room for any.
    """
    window = check_window("leaky-rerope", "window", window or max(1, pretrained // 2), pretrained)
    room = pretrained - window
    if room == 0 and target > pretrained:
        raise MethodError(
            f"leaky-rerope: window is {window}, the whole pretraining length, which leaves no room for distances that "
            "grow; give less, or take rerope."
        )
    least = max(1.0, (target - window) / room) if room else 1.0
    slope = least if slope is None else slope
    if slope < 1:
        raise MethodError(f"leaky-rerope: slope is {slope:g}; it must be at least 1.")
    if slope * room < target - 1 - window:
        raise MethodError(
            f"leaky-rerope: slope is {slope:g}; with window {window} it must be at least {_up(least)} for the "
            f"distances at {target} tokens to stay in the {pretrained} that the model was trained to read."
        )
    far = near_and_far(window, lambda n: window + (n - window) / slope, lambda m: m / slope)
    return Remapping(far, {"window": window, "slope": slope})


def _up(slope: float) -> str:
    """Rounded up, so that what a message asks for is enough."""
    return f"{math.ceil(slope * 1000) / 1000:.12g}"
