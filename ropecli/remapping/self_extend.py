"""Self-Extend: true distances for near tokens; far tokens share positions in groups.

Source: Jin et al. 2024 (arXiv:2401.01325), section 3.
"""

from itertools import count

from ropecli.errors import MethodError
from ropecli.remapping.branches import check_window, near_and_far
from ropecli.rope import Remapping
from ropecli.scaling.registry import remapping_method


@remapping_method("self-extend", source="Jin et al. 2024, arXiv:2401.01325, section 3", training="no",
                  other_names=("selfextend", "longlm"))  # fmt: skip
def self_extend(pretrained: int, target: int, *, window: int | None = None, group: int | None = None) -> Remapping:
    """Self-Extend: ρ = ⌊n/group⌋ - ⌊m/group⌋ + window - ⌊window/group⌋ beyond the neighbour window.

    window: w_n in the paper, tokens at their true distance. Default: a quarter of the pretraining length. group: G_s in
    the paper, tokens per group. Default: the smallest group with window + (target - window) / group < pretrained / 2,
    the paper's rule of thumb, because the shorter half of the distances is trained best. If the window is too large for
    that: the smallest group that reaches the target. For targets within the pretraining length: 1, no change. Raises
    MethodError if the window, or any distance at the target length, exceeds the pretraining length.
    """
    window = check_window("self-extend", "window", window or max(1, pretrained // 4), pretrained)
    if group is None:
        group = _choose_group(window, pretrained, target)
    elif (largest := _largest_distance(window, group, target)) > pretrained:
        raise MethodError(
            f"self-extend: group is {group}; expected at least {_smallest_group(window, pretrained, target)} with "
            f"window {window}. Distances at {target} tokens reach {largest}, beyond the trained context length, "
            f"{pretrained}."
        )
    shift = window - window // group
    far = near_and_far(window, lambda n: n // group + shift, lambda m: m // group)
    return Remapping(far, {"window": window, "group": group})


def _choose_group(window: int, pretrained: int, target: int) -> int:
    if target > pretrained > 2 * window:
        return 2 * (target - window) // (pretrained - 2 * window) + 1
    return _smallest_group(window, pretrained, target)


def _smallest_group(window: int, pretrained: int, target: int) -> int:
    """The smallest group that keeps all distances within `pretrained`.

    The search starts at a lower bound: ⌊a⌋ - ⌊b⌋ >= ⌊a - b⌋, so no smaller group does.
    """
    least = max(1, (target - window) // (pretrained - window + 1))
    return next(group for group in count(least) if _largest_distance(window, group, target) <= pretrained)


def _largest_distance(window: int, group: int, target: int) -> int:
    """The distance of the first token from the last."""
    last = target - 1
    return last // group + window - window // group if last >= window else max(last, 0)
