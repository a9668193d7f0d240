"""What float32 leaves of an angle: transformers keeps inv_freq in float32 and multiplies it by the position there."""

import numpy as np

from ropecli.rope import ScaledRope


def float32_angle_error(rope: ScaledRope, position: int) -> np.ndarray:
    """How far each pair's angle at `position` (tokens) is from the exact one, radians, shape (rotary_dim/2,).

    The arithmetic is that of transformers' modeling_rope_utils: powers of the base, then the scaling, then the
    position, each rounded to float32.
    """
    dimension = np.float32(rope.geometry.rotary_dim)
    exponents = np.arange(0, rope.geometry.rotary_dim, 2).astype(np.float32) / dimension
    base = np.float32(1) / np.float32(rope.rope_theta) ** exponents
    with np.errstate(divide="ignore"):
        divisors = (rope.geometry.powers(rope.rope_theta) / rope.inv_freq).astype(np.float32)
    angles = (base / divisors) * np.float32(position)
    return np.abs(angles.astype(np.float64) - rope.inv_freq * position)
