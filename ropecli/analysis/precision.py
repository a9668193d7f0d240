"""What float32 leaves of an angle: transformers keeps inv_freq in float32 and multiplies it by the position there."""

import numpy as np

from ropecli.analysis.wavelengths import power_law
from ropecli.scaling.spec import ScaledRope


def float32_angle_error(rope: ScaledRope, position: int) -> np.ndarray:
    """How far each pair's angle at `position` (tokens) is from the exact one, radians, shape (rotary_dim/2,).

    In float32: the powers of the base, as in transformers, what the method makes of them, and the product with the
    position. Where transformers takes more steps (yarn), its error may be a few times as large or as small.
    """
    law = power_law(rope)
    base = law[0] if law else rope.rope_theta  # dynamic has another base than rope_theta at this length
    width, one = np.float32(rope.geometry.rotary_dim), np.float32(1)
    with np.errstate(over="ignore"):  # a pair that hardly rotates: 1 / inf
        powers = np.float32(base) ** (np.arange(0, width, 2, dtype=np.float32) / width)
    scaling = (rope.inv_freq / rope.geometry.powers(base)).astype(np.float32)
    angles = one / powers * scaling * np.float32(position)
    return np.abs(angles.astype(np.float64) - rope.inv_freq * position)
