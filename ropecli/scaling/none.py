"""No scaling: the pretrained frequencies, read beyond the pretraining length as they are."""

from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


@scaling_method("none", source="Su et al. 2021, arXiv:2104.09864, section 3.2.2", training="no", rope_type="default")
def none(rope: RopeGeometry, s: float) -> Frequencies:
    """Leave the frequencies as they were pretrained."""
    return Frequencies(rope.inv_freq())
