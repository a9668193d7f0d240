"""NoPE made out of a RoPE model: no pair turns any more, and a short recalibration lets the model do without."""

import numpy as np

from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


@scaling_method(
    "nope",
    source="DroPE, Gelberg et al. 2025, arXiv:2512.12167; Kazemnejad et al. 2023, arXiv:2305.19466",
    training="needed",
    h="0",
    other_names=("drope",),
)
def nope(rope: RopeGeometry, s: float) -> Frequencies:
    """DroPE: set all frequencies to zero; the causal mask alone tells the order.

    The model must be recalibrated by fine-tuning at its pretraining length before it reads anything sensibly.
    The factor sets the context length alone.
    """
    return Frequencies(np.zeros(rope.pairs))
