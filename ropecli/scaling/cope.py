"""CoPE: the slowest pairs fade out, because pretraining has not shown the model a whole rotation of them."""

import math

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


@scaling_method("cope", source="Li et al. 2026, arXiv:2602.05258, and https://github.com/hrlics/CoPE",
                training="advised",
                h="θ_d·(1 + cos φ_d)/2, φ_d from 0 to π over the slowest n pairs, 0 for the others",
                targeted=True, uses_factor=False, other_names=("clipped-rope",))  # fmt: skip
def cope(rope: RopeGeometry, s: float, *, clipped_pairs: int | None = None) -> Frequencies:
    """CoPE (clipped RoPE): slow down the slowest n pairs by a cosine, the last one to a standstill.

    clipped_pairs: n. Default: the pairs whose wavelength 2π·b^(2d/|D|) exceeds the pretraining length, which are 29 of
    Llama 3's 64 pairs. The authors' code always takes 20. The first of the n pairs keeps its frequency. The authors
    train with abf: --method abf+cope. The factor only sets the context length.
    """
    inv_freq = rope.inv_freq()
    if clipped_pairs is None:
        clipped_pairs = int((rope.powers() * rope.original_max_position_embeddings < 2 * math.pi).sum())
    elif clipped_pairs > rope.pairs:
        raise MethodError(f"cope: clipped_pairs is {clipped_pairs}; this model has {rope.pairs} rotary pairs.")
    fade = (1 + np.cos(np.linspace(0, math.pi, clipped_pairs))) / 2
    inv_freq[rope.pairs - clipped_pairs :] *= fade
    return Frequencies(inv_freq, params={"clipped_pairs": clipped_pairs})
