"""Interpolation of slow pairs, with a transition to fast ones: YaRN, its variants, and Llama 3.1's scaling.

YaRN is NTK-by-parts plus an attention factor; also without the factor, or by the current length. Source: Peng et al.
2023, arXiv:2309.00071, sections 3.2 and 3.4.
"""

import math

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


def yarn_attention_factor(s: float, mscale: float = 1.0) -> float:
    """√(1/t) = 0.1·ln s + 1 (eq. 22); DeepSeek multiplies the logarithm by mscale."""
    return 0.1 * mscale * math.log(s) + 1.0


def by_parts(rope: RopeGeometry, s: float, beta_fast: float, beta_slow: float, truncate: bool) -> np.ndarray:
    """NTK-by-parts frequencies (eq. 19), shape (rotary_dim/2,).

    The ramp is linear in the pair's index, as in the reference implementation and transformers. In the paper, γ
    (eq. 18) is linear in the number of rotations. Kimi K2 ships beta_fast = beta_slow: a step. Raises MethodError if
    beta_fast < beta_slow, and if no pair lies on the ramp.
    """

    def pair_with(rotations: float) -> float:
        """Fractional index of the pair that rotates this many times within the pretraining length."""
        original_length = rope.original_max_position_embeddings
        return rope.rotary_dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    # clamped far outside of the existing pairs: infinity cannot be rounded
    low, high = (max(-rope.rotary_dim, min(pair_with(beta), rope.rotary_dim)) for beta in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low > high or beta_fast < beta_slow:
        # the reference continues with an inverted ramp, which divides pairs it should keep and keeps the others
        raise MethodError(
            f"No pair rotates between beta_slow, {beta_slow:g}, and beta_fast, {beta_fast:g}, times within the "
            f"pretraining length of {rope.original_max_position_embeddings} tokens. Use --method "
            f"{'linear' if high < 0 else 'none'}, or other values of beta_fast and beta_slow."
        )
    if low == high:
        high += 0.001  # as in the reference, to avoid a division by zero
    interpolated = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0, 1)
    return rope.inv_freq() * (interpolated / s + (1 - interpolated))


@scaling_method("ntk-by-parts", source="YaRN, arXiv:2309.00071, section 3.2, eq. 17-19", training="a little",
                h="(1 - γ)·θ_d/s + γ·θ_d, γ from 0 at beta_slow rotations to 1 at beta_fast", targeted=True,
                rope_type="yarn")  # fmt: skip
def ntk_by_parts(
    rope: RopeGeometry, s: float, *, beta_fast: float = 32.0, beta_slow: float = 1.0, truncate: bool = True
) -> Frequencies:
    """NTK-by-parts: interpolate slow pairs, keep fast pairs, and ramp in between. YaRN without its attention factor.

    beta_fast: pairs that rotate more often than this within the pretraining length are unchanged. beta_slow: pairs that
    rotate less often are fully interpolated. truncate: round the ends of the ramp to whole pairs.
    """
    params = {"beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": truncate}
    inv_freq = by_parts(rope, s, beta_fast, beta_slow, truncate)
    return Frequencies(inv_freq, params=params)


@scaling_method("yarn", source="Peng et al. 2023, arXiv:2309.00071, section 3.4, eq. 21-22",
                training="a little",
                h="(1 - γ)·θ_d/s + γ·θ_d, γ from 0 at beta_slow rotations to 1 at beta_fast", targeted=True,
                rope_type="yarn")  # fmt: skip
def yarn(
    rope: RopeGeometry,
    s: float,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> Frequencies:
    """YaRN: NTK-by-parts plus an attention factor.

    beta_fast, beta_slow, truncate: as in ntk-by-parts. attention_factor: multiplies cos and sin. Default:
    0.1·ln s + 1. mscale, mscale_all_dim: for DeepSeek models, always together. These models multiply the softmax
    scale by (0.1·mscale_all_dim·ln s + 1)², and cos and sin by
    (0.1·mscale·ln s + 1) / (0.1·mscale_all_dim·ln s + 1).
    """
    params: dict[str, object] = {"beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": truncate}
    if (mscale is None) != (mscale_all_dim is None) or (attention_factor is not None and mscale is not None):
        raise MethodError("Set mscale and mscale_all_dim together and without attention_factor, or neither of the two.")
    if attention_factor is not None:
        params["attention_factor"] = attention_factor
    elif mscale is not None and mscale_all_dim is not None:
        params |= {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
        attention_factor = yarn_attention_factor(s, mscale) / yarn_attention_factor(s, mscale_all_dim)
    else:
        attention_factor = yarn_attention_factor(s)
    inv_freq = by_parts(rope, s, beta_fast, beta_slow, truncate)
    return Frequencies(inv_freq, attention_factor, params=params)


@scaling_method("dynamic-yarn",
                source="Peng et al. 2023, arXiv:2309.00071, 'Dynamic Scaling', with YaRN instead of NTK",
                training="no", uses_factor=False,
                h="(1 - γ)·θ_d/max(1, l/L) + γ·θ_d, γ from 0 at beta_slow rotations to 1 at beta_fast",
                targeted=True)  # fmt: skip
def dynamic_yarn(
    rope: RopeGeometry, s: float, length: int, *, beta_fast: float = 32.0, beta_slow: float = 1.0, truncate: bool = True
) -> Frequencies:
    """Dynamic YaRN: YaRN with factor max(1, l/L), where l is the current length and L the pretraining length.

    beta_fast, beta_slow, truncate: as in yarn. The factor only sets the context length. A KV cache that grows past L
    is inexact: its keys were rotated for a shorter length.
    """
    now = max(1.0, length / rope.original_max_position_embeddings)
    params = {"beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": truncate}
    inv_freq = by_parts(rope, now, beta_fast, beta_slow, truncate)
    return Frequencies(inv_freq, yarn_attention_factor(now), params=params)


@scaling_method("llama3", source="Meta 2024, Llama 3.1's apply_scaling in llama-models", training="a little",
                h="(1 - γ)·θ_d/s + γ·θ_d, γ from 0 at low_freq_factor rotations to 1 at high_freq_factor",
                targeted=True, rope_type="llama3")  # fmt: skip
def llama3(rope: RopeGeometry, s: float, *, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0) -> Frequencies:
    """Llama 3.1: divide the frequencies of slow pairs by the factor, keep fast pairs, and interpolate in between.

    low_freq_factor, high_freq_factor: rotations within the pretraining length. Pairs with fewer than low_freq_factor
    are divided by the full factor, pairs with more than high_freq_factor are unchanged; in between, the change is
    linear in the number of rotations. Equal values, as in Llama 4, leave nothing in between.
    """
    if high_freq_factor < low_freq_factor:
        least = f"expected at least low_freq_factor, {low_freq_factor:g}"
        raise MethodError(f"high_freq_factor is {high_freq_factor:g}; {least}.")
    base = rope.inv_freq()
    rotations = rope.original_max_position_embeddings * base / (2 * math.pi)
    band = max(high_freq_factor - low_freq_factor, np.finfo(float).tiny)
    with np.errstate(over="ignore"):
        kept = np.clip((rotations - low_freq_factor) / band, 0, 1)
    params = {"low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor}
    return Frequencies(base * (kept + (1 - kept) / s), params=params)
