"""NTK-aware scaling: the base grows until the slowest pair turns exactly s times slower."""

import math

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


def ntk_theta(rope: RopeGeometry, s: float) -> float:
    """b·s^(d/2k), where k is the index of the slowest pair that turns: d/(d-2) where all do.

    Raises MethodError where fewer than two pairs turn, or where the base overflows.
    """
    slowest = rope.pairs - rope.still_pairs - 1
    if slowest < 1:
        raise MethodError(
            f"NTK-aware scaling needs at least two rotary pairs that turn; this model has {slowest + 1}. Use linear."
        )
    try:
        theta = rope.rope_theta * s ** (rope.rotary_dim / (2 * slowest))
    except OverflowError:
        theta = math.inf
    if not math.isfinite(theta):
        raise MethodError(f"A factor of {s:g} makes the base overflow; use a smaller one.")
    return theta


@scaling_method(
    "ntk",
    source="bloc97 2023, 'NTK-aware scaled RoPE'; YaRN, arXiv:2309.00071, eq. 16",
    training="no",
    h="(b·s^(|D|/(|D|-2)))^(-2d/|D|)",
    rope_type="default",
    other_names=("ntk-aware",),
)
def ntk(rope: RopeGeometry, s: float) -> Frequencies:
    """NTK-aware scaling: the base becomes b·s^(d/(d-2)), so fast pairs barely change.

    The pairs between reach their full stretch only at the slowest one, so the usable length stays below
    s times the original: take a larger factor than the target alone asks for.
    """
    theta = ntk_theta(rope, s)
    return Frequencies(rope.inv_freq(theta), rope_theta=theta)
