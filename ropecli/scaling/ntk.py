"""NTK-aware scaling: the base grows until the slowest pair turns exactly s times slower."""

import math

from ropecli.errors import MethodError
from ropecli.rope import RopeGeometry, ScaledRope, ScalingSpec
from ropecli.scaling.registry import scaling_method


def ntk_theta(rope: RopeGeometry, s: float) -> float:
    """b·s^(d/(d-2)). Raises MethodError where d = 2 leaves one pair, or where the base overflows."""
    if rope.rotary_dim <= 2:
        raise MethodError("NTK-aware scaling needs at least two rotary pairs; this model has one. Use linear.")
    try:
        theta = rope.rope_theta * s ** (rope.rotary_dim / (rope.rotary_dim - 2))
    except OverflowError:
        theta = math.inf
    if not math.isfinite(theta):
        raise MethodError(f"A factor of {s:g} makes the base overflow; use a smaller one.")
    return theta


@scaling_method(
    "ntk", source="bloc97 2023, 'NTK-aware scaled RoPE'; YaRN, arXiv:2309.00071, eq. 16", rope_type="default"
)
def ntk(rope: RopeGeometry, s: float) -> ScaledRope:
    """NTK-aware scaling: the base becomes b·s^(d/(d-2)), so fast pairs barely change.

    The pairs between reach their full stretch only at the slowest one, so the usable window stays below
    s times the original: take a larger factor than the target alone asks for.
    """
    theta = ntk_theta(rope, s)
    return ScaledRope(rope, ScalingSpec("ntk", s), rope.inv_freq(theta), rope_theta=theta)
