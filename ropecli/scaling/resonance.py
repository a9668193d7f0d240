"""Resonance RoPE: wavelengths of whole tokens, so that a pair repeats the same angles in every rotation."""

import math

import numpy as np

from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


@scaling_method("resonance", source="Wang et al. 2024, arXiv:2403.00071, section 4", training="no",
                h="2π/round(2π/θ_d)", uses_factor=False)  # fmt: skip
def resonance(rope: RopeGeometry, s: float) -> Frequencies:
    """Resonance RoPE: round every wavelength to a whole number of tokens.

    At positions beyond the pretraining length, the fast pairs then have only angles that the model has seen. Made to
    be combined: --method yarn+resonance. Alone it does not extend the context: the factor only sets the context length.
    """
    inv_freq = rope.inv_freq()
    rotating = inv_freq > 0
    inv_freq[rotating] = 2 * math.pi / np.round(2 * math.pi / inv_freq[rotating])
    return Frequencies(inv_freq)
