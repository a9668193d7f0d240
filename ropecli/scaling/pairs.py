"""Methods with a rule for each pair: slower (linear), whole wavelengths (resonance), or still (cope, p-rope, nope)."""

import math

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


@scaling_method("linear", source="Chen et al. 2023, arXiv:2306.15595, eq. 4; kaiokendev 2023", training="needed",
                g="m/s", rope_type="linear")  # fmt: skip
def linear(rope: RopeGeometry, s: float) -> Frequencies:
    """Position Interpolation (PI): divide every position by the factor, f'(x, m) = f(x, m/s)."""
    return Frequencies(rope.inv_freq() / s)


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


@scaling_method("cope", source="Li et al. 2026, arXiv:2602.05258, and https://github.com/hrlics/CoPE",
                training="advised",
                h="θ_d·(1 + cos φ_d)/2, φ_d from 0 to π over the slowest n pairs, 0 for the others",
                targeted=True, uses_factor=False)  # fmt: skip
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


@scaling_method("nope",
                source="DroPE, Gelberg et al. 2025, arXiv:2512.12167; Kazemnejad et al. 2023, arXiv:2305.19466",
                training="needed", uses_factor=False, h="0")  # fmt: skip
def nope(rope: RopeGeometry, s: float) -> Frequencies:
    """DroPE: set all frequencies to zero; only the causal mask encodes the order.

    Fine-tune the model at its pretraining length before use; without this recalibration its output is useless.
    The factor only sets the context length.
    """
    return Frequencies(np.zeros(rope.pairs))


@scaling_method("p-rope", source="Barbero et al. 2024, arXiv:2410.06205, section 6", training="needed",
                uses_factor=False, h="θ_d of the fastest ⌊p·|D|/2⌋ pairs, 0 of the others")  # fmt: skip
def p_rope(rope: RopeGeometry, s: float, *, p: float = 0.75) -> Frequencies:
    """p-RoPE: keep the fastest share p of the pairs and set the frequencies of the others to zero.

    p: share of the pairs that keep rotating, in (0, 1]; 1 is RoPE, near 0 is NoPE. Beyond the pretraining length, slow
    pairs reach angles that the model has never seen; this removes them. The factor only sets the context length.
    """
    inv_freq = rope.inv_freq()
    inv_freq[int(p * rope.rotary_dim // 2) :] = 0.0  # rounded down, like transformers' `proportional`
    return Frequencies(inv_freq, params={"p": p})
