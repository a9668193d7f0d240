"""DroPE: removes the rotary embeddings of a pretrained model, which is then recalibrated without positions (NoPE)."""

import numpy as np

from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


@scaling_method(
    "nope",
    source="DroPE, Gelberg et al. 2025, arXiv:2512.12167; Kazemnejad et al. 2023, arXiv:2305.19466",
    training="needed",
    uses_factor=False,
    h="0",
    other_names=("drope",),
)
def nope(rope: RopeGeometry, s: float) -> Frequencies:
    """DroPE: set all frequencies to zero; only the causal mask encodes the order.

    Fine-tune the model at its pretraining length before use; without this recalibration its output is useless.
    The factor only sets the context length.
    """
    return Frequencies(np.zeros(rope.pairs))
