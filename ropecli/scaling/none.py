"""No scaling: the pretrained frequencies at every length."""

from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


@scaling_method(
    "none",
    source="Su et al. 2021, arXiv:2104.09864, section 3.2.2",
    training="no",
    rope_type="default",
    uses_factor=False,
)
def none(rope: RopeGeometry, s: float) -> Frequencies:
    """No scaling: keep the pretrained frequencies. The factor only sets the context length."""
    return Frequencies(rope.inv_freq())
