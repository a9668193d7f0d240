"""Dynamic NTK: the base grows with the current length, so short inputs use the pretrained frequencies."""

from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.ntk import ntk_theta
from ropecli.scaling.registry import scaling_method


@scaling_method(
    "dynamic",
    source="emozilla 2023, 'Dynamically Scaled RoPE'; YaRN, appendix B.3",
    training="no",
    h="(b·(s·max(1, l/L) - s + 1)^(|D|/(|D|-2)))^(-2d/|D|)",
    rope_type="dynamic",
    other_names=("dynamic-ntk",),
)
def dynamic(rope: RopeGeometry, s: float, length: int) -> Frequencies:
    """Dynamic NTK: NTK-aware scaling by (s·l/L) - (s - 1), where l is the current length, at least L.

    L is the pretraining length. A KV cache that grows past L is inexact: its keys were rotated for a shorter length.
    """
    original_length = rope.original_max_position_embeddings
    stretch = s * max(length, original_length) / original_length - (s - 1)
    # rope_theta stays the pretrained one: readers compute the base from it again at every length
    return Frequencies(rope.inv_freq(ntk_theta(rope, stretch)))
