"""True distances within a window of near tokens, other distances beyond it: ReRoPE, Self-Extend, Jet-Long, STRING.

Sources: Su 2023, "Transformer Upgrade Path 12: ReRoPE", https://kexue.fm/archives/9708: ReRoPE, a constant distance
beyond the window, and Leaky ReRoPE, a smaller slope. Jin et al. 2024 (arXiv:2401.01325), section 3: Self-Extend, far
tokens share positions in groups. Tang et al. 2026 (arXiv:2607.07740), equations 1 and 2, and
https://github.com/jet-ai-projects/Jet-Long: Jet-Long, in groups that grow with the length. An et al. 2024
(arXiv:2410.18745), section 4, and https://github.com/HKUNLP/STRING: STRING, far keys move closer, to distances that
pretraining has shown more often.
"""

import math
from itertools import count

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Branch, PositionMap, Remapping
from ropecli.scaling.registry import remapping_method

_REROPE = "Su 2023, https://kexue.fm/archives/9708"
_LOCAL_WINDOW = 128
"""As in the code of STRING's authors."""
_BASE_WINDOW = 2048
"""As in the code of Jet-Long's authors."""


def near_and_far(window: int, query: PositionMap, key: PositionMap | None) -> tuple[Branch, Branch]:
    """Keys less than `window` tokens back at their true distance; all earlier keys at query(n) - key(m)."""
    near = Branch(lambda n: np.maximum(n - window + 1, 0), lambda n: n + 1)
    far = Branch(np.zeros_like, lambda n: np.maximum(n - window + 1, 0), query, key)
    return near, far


def check_window(method: str, name: str, window: int, pretrained: int) -> int:
    """Return `window`, tokens. Raises MethodError if it exceeds the pretraining length."""
    if window > pretrained:
        raise MethodError(
            f"{method}: {name} is {window}; expected at most {pretrained}, the trained context length. The model has "
            "not seen larger distances."
        )
    return window


@remapping_method("rerope", source=_REROPE, training="no")
def rerope(pretrained: int, target: int, *, window: int | None = None) -> Remapping:
    """ReRoPE: ρ = min(n - m, window), so the model sees only known distances at any length.

    window: tokens. Default: half of the pretraining length. The factor only sets the context length.
    """
    window = check_window("rerope", "window", window or max(1, pretrained // 2), pretrained)
    far = near_and_far(window, lambda n: np.full_like(n, window), np.zeros_like)
    return Remapping(far, {"window": window})


@remapping_method("leaky-rerope", source=_REROPE, training="no")
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


@remapping_method("self-extend", source="Jin et al. 2024, arXiv:2401.01325, section 3", training="no")  # fmt: skip
def self_extend(pretrained: int, target: int, *, window: int | None = None, group: int | None = None) -> Remapping:
    """Self-Extend: ρ = ⌊n/group⌋ - ⌊m/group⌋ + window - ⌊window/group⌋ beyond the neighbour window.

    window: w_n in the paper, tokens at their true distance. Default: a quarter of the pretraining length. group: G_s in
    the paper, tokens per group. Default: the smallest group with window + (target - window) / group < pretrained / 2,
    the paper's rule of thumb, because the shorter half of the distances is trained best. If the window is too large for
    that: the smallest group that reaches the target. For targets within the pretraining length: 1, no change. Raises
    MethodError if the window, or any distance at the target length, exceeds the pretraining length.
    """
    window = check_window("self-extend", "window", window or max(1, pretrained // 4), pretrained)
    if group is None and target > pretrained > 2 * window:
        group = 2 * (target - window) // (pretrained - 2 * window) + 1
    elif group is None:
        group = _smallest_group(window, pretrained, target)
    elif (largest := _largest_distance(window, group, target)) > pretrained:
        raise MethodError(
            f"self-extend: group is {group}; expected at least {_smallest_group(window, pretrained, target)} with "
            f"window {window}. Distances at {target} tokens reach {largest}, beyond the trained context length, "
            f"{pretrained}."
        )
    shift = window - window // group
    far = near_and_far(window, lambda n: n // group + shift, lambda m: m // group)
    return Remapping(far, {"window": window, "group": group})


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


@remapping_method("jet-long", source="Tang et al. 2026, arXiv:2607.07740, equations 1 and 2", training="no")
def jet_long(pretrained: int, target: int, *, window: int | None = None) -> Remapping:
    """Jet-Long: group far positions, the more the longer the text is so far. No certain gain: self-extend reads better.

    ρ = ⌊n/G⌋ - ⌊m/G⌋ beyond the window, with G = ⌈(n + 1) / pretraining length⌉, so that nothing changes within the
    pretraining length. window: w_0 in the paper; keys up to this many tokens back are at their true distance. Default:
    2048, as in the paper, at most a quarter of the pretraining length. The factor only sets the context length; beyond
    it, G stays the same. The authors' code takes G from the longest sequence of the batch, for all its tokens. Here it
    follows from the position of each query, so that a KV cache, a chunk or another row of the batch changes nothing;
    the last token has the authors' G. Raises MethodError if the window exceeds the pretraining length.
    """
    window = check_window("jet-long", "window", window or max(1, min(_BASE_WINDOW, pretrained // 4)), pretrained)
    near = Branch(lambda n: np.where(n < pretrained, 0, np.maximum(n - window, 0)), lambda n: n + 1)
    groups = range(2, math.ceil(target / pretrained) + 1)
    return Remapping((near, *(_of_group(group, window, pretrained, groups) for group in groups)), {"window": window})


def _of_group(group: int, window: int, pretrained: int, groups: range) -> Branch:
    """Keys more than `window` tokens back, for queries whose G is `group`, the last of `groups` or more."""
    begin = (group - 1) * pretrained
    end = np.iinfo(np.int64).max if group == groups[-1] else begin + pretrained

    def position(n: np.ndarray) -> np.ndarray:
        return n // group

    def stop(n: np.ndarray) -> np.ndarray:
        return np.where(n < begin, 0, np.minimum(n, end) - window)

    return Branch(lambda n: np.where(n < end, 0, end - window), stop, position, position)


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
