"""Position Interpolation: every pair rotates s times slower."""

from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


@scaling_method("linear", source="Chen et al. 2023, arXiv:2306.15595, eq. 4; kaiokendev 2023", training="needed",
                g="m/s", rope_type="linear", other_names=("pi", "position-interpolation"))  # fmt: skip
def linear(rope: RopeGeometry, s: float) -> Frequencies:
    """Position Interpolation (PI): divide every position by the factor, f'(x, m) = f(x, m/s)."""
    return Frequencies(rope.inv_freq() / s)
