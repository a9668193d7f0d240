"""No new scaling: the frequencies stay as they are, or become the pretrained ones again."""

from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


@scaling_method("none", source="Su et al. 2021, arXiv:2104.09864, section 3.2.2", training="no",
                rope_type="default", uses_factor=False)  # fmt: skip
def none(rope: RopeGeometry, s: float) -> Frequencies:
    """Raise the context length only: keep the frequencies, and the scaling that the checkpoint ships with."""
    return Frequencies(rope.inv_freq())


@scaling_method("unscaled", source="Su et al. 2021, arXiv:2104.09864, section 3.2.2", training="no",
                rope_type="default", uses_factor=False)  # fmt: skip
def unscaled(rope: RopeGeometry, s: float) -> Frequencies:
    """Remove the scaling that the checkpoint ships with: the frequencies of the base. Written and reported as none."""
    return Frequencies(rope.inv_freq())
