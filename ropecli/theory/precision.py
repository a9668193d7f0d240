"""What float32 leaves of an angle: transformers keeps inv_freq in float32 and multiplies it by the position there."""

import numpy as np

from ropecli.rope import ScaledRope


def float32_angle_error(rope: ScaledRope, position: int) -> np.ndarray:
    """How far each pair's angle at `position` (tokens) is from the exact one, radians, shape (rotary_dim/2,).

    The arithmetic is that of transformers' modeling_rope_utils, every step of it rounded to float32.
    """
    angles = _float32_inv_freq(rope) * np.float32(position)
    return np.abs(angles.astype(np.float64) - rope.inv_freq * position)


def _float32_inv_freq(rope: ScaledRope) -> np.ndarray:
    """The table as transformers works it out, radians per token, float32, shape (rotary_dim/2,)."""
    method, one = rope.spec.method, np.float32(1)
    exponents = np.arange(0, rope.geometry.rotary_dim, 2).astype(np.float32) / np.float32(rope.geometry.rotary_dim)
    if method == "dynamic" and rope.geometry.pairs > 1:
        theta = rope.inv_freq[1] ** (-rope.geometry.rotary_dim / 2)  # the base at this length
        return one / np.float32(theta) ** exponents
    powers = np.float32(rope.rope_theta) ** exponents
    if method in ("yarn", "ntk-by-parts"):
        kept, factor = _share_that_is_kept(rope), np.float32(rope.spec.factor)
        return one / (factor * powers) * (one - kept) + one / powers * kept
    with np.errstate(divide="ignore", over="ignore"):
        divisors = (rope.geometry.powers(rope.rope_theta) / rope.inv_freq).astype(np.float32)
    return one / powers / divisors


def _share_that_is_kept(rope: ScaledRope) -> np.ndarray:
    """YaRN's ramp: of each pair 1 where it turns as pretrained, 0 where it is slowed down by the whole factor."""
    if rope.spec.factor == 1:
        return np.ones(rope.geometry.pairs, dtype=np.float32)
    relative = rope.inv_freq / rope.geometry.powers()
    return ((relative - 1 / rope.spec.factor) / (1 - 1 / rope.spec.factor)).astype(np.float32)
