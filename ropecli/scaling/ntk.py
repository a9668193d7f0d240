"""NTK-aware scaling: a larger base, with which the slowest pair rotates exactly s times slower.

Dynamic NTK: the base grows with the current length, so short inputs use the pretrained frequencies.
"""

import math

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


def ntk_theta(rope: RopeGeometry, s: float) -> float:
    """b·s^(d/2k), where k is the index of the slowest rotating pair; b·s^(d/(d-2)) if all pairs rotate.

    Raises MethodError if fewer than two pairs rotate, or if the base overflows.
    """
    slowest = rope.pairs - rope.still_pairs - 1
    if slowest < 1:
        raise MethodError(
            f"NTK-aware scaling requires at least two rotating pairs; this model has {slowest + 1}. Use linear."
        )
    try:
        theta = rope.rope_theta * s ** (rope.rotary_dim / (2 * slowest))
    except OverflowError:
        theta = math.inf
    if not math.isfinite(theta):
        raise MethodError(f"The base overflows with factor {s:g}. Use a smaller factor.")
    return theta


@scaling_method("ntk", source="bloc97 2023, 'NTK-aware scaled RoPE'; YaRN, arXiv:2309.00071, eq. 16",
                training="no", h="(b·s^(|D|/(|D|-2)))^(-2d/|D|)", rope_type="default",
                other_names=("ntk-aware",))  # fmt: skip
def ntk(rope: RopeGeometry, s: float) -> Frequencies:
    """NTK-aware scaling: change the base to b·s^(d/(d-2)), which barely changes fast pairs.

    Only the slowest pair is slowed down by the full factor s, so the usable length stays below s times the pretraining
    length. Choose a larger factor than target length / pretraining length.
    """
    theta = ntk_theta(rope, s)
    return Frequencies(rope.inv_freq(theta), rope_theta=theta)


@scaling_method("dynamic", source="emozilla 2023, 'Dynamically Scaled RoPE'; YaRN, appendix B.3",
                training="no", h="(b·(s·max(1, l/L) - s + 1)^(|D|/(|D|-2)))^(-2d/|D|)", rope_type="dynamic",
                other_names=("dynamic-ntk",))  # fmt: skip
def dynamic(rope: RopeGeometry, s: float, length: int) -> Frequencies:
    """Dynamic NTK: NTK-aware scaling by (s·l/L) - (s - 1), where l is the current length, at least L.

    L is the pretraining length. A KV cache that grows past L is inexact: its keys were rotated for a shorter length.
    """
    original_length = rope.original_max_position_embeddings
    stretch = s * max(length, original_length) / original_length - (s - 1)
    # rope_theta stays the pretrained one: readers compute the base from it again at every length
    return Frequencies(rope.inv_freq(ntk_theta(rope, stretch)))
