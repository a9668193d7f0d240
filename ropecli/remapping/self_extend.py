"""Self-Extend: near distances as they are, far ones in groups of tokens that share a position.

Source: Jin et al. 2024 (arXiv:2401.01325), section 3.
"""

from itertools import count

from ropecli.errors import MethodError
from ropecli.remapping.branches import check_window, near_and_far
from ropecli.rope import Remapping
from ropecli.scaling.registry import remapping_method


@remapping_method("self-extend", source="Jin et al. 2024, arXiv:2401.01325, section 3", training="no",
                  other_names=("selfextend", "self_extend", "longlm"))  # fmt: skip
def self_extend(pretrained: int, target: int, *, window: int | None = None, group: int | None = None) -> Remapping:
    """Self-Extend: ρ = ⌊n/group⌋ - ⌊m/group⌋ + window - ⌊window/group⌋ from the neighbour window on.

    window: the authors' w_n, tokens that are seen at their own distance; a quarter of the pretraining length unless
    given. group: the authors' G_s, tokens; unless given, the smallest by their rule of thumb, that the positions stay
    in the half of the pretraining length that has been trained best: window + (target - window) / group below
    pretrained / 2. Where the window leaves no room for that, the smallest that reaches the target; 1, which changes
    nothing, where the target is not above the pretraining length. Raises MethodError for a window above the
    pretraining length, and for a group with which distances inside the target come out above it.
    """
    window = check_window("self-extend", "window", window or max(1, pretrained // 4), pretrained)
    if group is None:
        group = _choose_group(window, pretrained, target)
    elif (largest := _largest_distance(window, group, target)) > pretrained:
        raise MethodError(
            f"self-extend: group is {group}; with window {window} that makes distances of up to {largest} at {target} "
            f"tokens, and the model was trained to read {pretrained}. The smallest group that reaches the target is "
            f"{_smallest_group(window, pretrained, target)}."
        )
    shift = window - window // group
    far = near_and_far(window, lambda n: n // group + shift, lambda m: m // group)
    return Remapping(far, {"window": window, "group": group})


def _choose_group(window: int, pretrained: int, target: int) -> int:
    if target > pretrained > 2 * window:
        return 2 * (target - window) // (pretrained - 2 * window) + 1
    return _smallest_group(window, pretrained, target)


def _smallest_group(window: int, pretrained: int, target: int) -> int:
    """The first from a bound on that keeps all distances; ⌊a⌋ - ⌊b⌋ is at least ⌊a - b⌋, so that none below it does."""
    least = max(1, (target - window) // (pretrained - window + 1))
    return next(group for group in count(least) if _largest_distance(window, group, target) <= pretrained)


def _largest_distance(window: int, group: int, target: int) -> int:
    """Of the first token from the last."""
    last = target - 1
    return last // group + window - window // group if last >= window else max(last, 0)
