"""Llama 3.1's scaling: three bands of wavelengths, with a smooth transition in the middle one."""

import math
from typing import Annotated

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.method import SearchRange
from ropecli.scaling.registry import scaling_method


@scaling_method("llama3", source="Meta 2024, Llama 3.1's apply_scaling in llama-models", training="a little",
                h="(1 - γ)·θ_d/s + γ·θ_d, γ from 0 at low_freq_factor rotations to 1 at high_freq_factor",
                targeted=True, rope_type="llama3")  # fmt: skip
def llama3(
    rope: RopeGeometry,
    s: float,
    *,
    low_freq_factor: Annotated[float, SearchRange(0.25, 2.0)] = 1.0,
    high_freq_factor: Annotated[float, SearchRange(2.5, 32.0)] = 4.0,
) -> Frequencies:
    """Llama 3.1: divide the frequencies of slow pairs by the factor, keep fast pairs, and interpolate in between.

    low_freq_factor, high_freq_factor: rotations within the pretraining length. Pairs with fewer than low_freq_factor
    are divided by the full factor, pairs with more than high_freq_factor are unchanged; in between, the change is
    linear in the number of rotations. Equal values, as in Llama 4, leave nothing in between.
    """
    if high_freq_factor < low_freq_factor:
        raise MethodError(
            f"high_freq_factor is {high_freq_factor:g}; expected at least low_freq_factor, {low_freq_factor:g}."
        )
    base = rope.inv_freq()
    rotations = rope.original_max_position_embeddings * base / (2 * math.pi)
    band = max(high_freq_factor - low_freq_factor, np.finfo(float).tiny)
    with np.errstate(over="ignore"):
        kept = np.clip((rotations - low_freq_factor) / band, 0, 1)
    params = {"low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor}
    return Frequencies(base * (kept + (1 - kept) / s), params=params)
