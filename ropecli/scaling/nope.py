"""Pairs that stop rotating: all of them (DroPE, for a recalibration without positions) or the slowest (p-RoPE)."""

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


@scaling_method("nope",
                source="DroPE, Gelberg et al. 2025, arXiv:2512.12167; Kazemnejad et al. 2023, arXiv:2305.19466",
                training="needed", uses_factor=False, h="0", other_names=("drope",))  # fmt: skip
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
    if p > 1:
        raise MethodError(f"p is {p:g}; expected a share of the pairs, above 0 and at most 1.")
    inv_freq = rope.inv_freq()
    inv_freq[int(p * rope.rotary_dim // 2) :] = 0.0  # rounded down, like transformers' `proportional`
    return Frequencies(inv_freq, params={"p": p})
