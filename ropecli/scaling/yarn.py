"""YaRN and its parts: NTK-by-parts interpolation, and the logits' temperature on top.

Source: Peng et al. 2023, arXiv:2309.00071, sections 3.2 and 3.4.
"""

import math
from typing import Annotated

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.method import SearchRange
from ropecli.scaling.registry import scaling_method

BetaFast = Annotated[float, SearchRange(4.0, 64.0)]
BetaSlow = Annotated[float, SearchRange(0.25, 2.0)]


def yarn_attention_factor(s: float, mscale: float = 1.0) -> float:
    """√(1/t) = 0.1·ln s + 1 (eq. 22); the logarithm times mscale in DeepSeek's."""
    return 0.1 * mscale * math.log(s) + 1.0


def by_parts(rope: RopeGeometry, s: float, beta_fast: float, beta_slow: float, truncate: bool) -> np.ndarray:
    """Frequencies between base and base/s (eq. 19), shape (rotary_dim/2,).

    The ramp is linear in the pair's index, as in the reference implementation and transformers, where the
    paper's γ (eq. 18) is linear in the number of turns. Raises MethodError unless beta_fast > beta_slow, and
    where the ramp lies wholly outside of the pairs.
    """
    if beta_fast <= beta_slow:
        raise MethodError(f"beta_fast is {beta_fast:g} and beta_slow {beta_slow:g}; beta_fast must be the larger.")
    if rope.rope_theta <= 1:
        raise MethodError(f"rope_theta is {rope.rope_theta:g}; a ramp over the pairs needs a base above 1.")

    def pair_with(turns: float) -> float:
        """Index of the pair that makes so many turns in the pretraining length."""
        original_length = rope.original_max_position_embeddings
        return rope.rotary_dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    # a pair far outside of those there are is as good as one endlessly far away, which cannot be rounded
    low, high = (max(-rope.rotary_dim, min(pair_with(turns), rope.rotary_dim)) for turns in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low > high:
        # the reference goes on here with a ramp turned round, which divides all pairs that it should leave, or none
        turns, instead = ("fewer than beta_slow", "linear") if high < 0 else ("more than beta_fast", "none")
        raise MethodError(
            f"Every pair turns {turns} times in the pretraining length of {rope.original_max_position_embeddings} "
            f"tokens, so that nothing lies between (beta_fast {beta_fast:g}, beta_slow {beta_slow:g}). "
            f"Use {instead}, or give other betas."
        )
    if low == high:
        high += 0.001  # as the reference does, where both ends fall on one pair
    interpolated = np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0, 1)
    return rope.inv_freq() * (interpolated / s + (1 - interpolated))


@scaling_method(
    "ntk-by-parts",
    source="YaRN, arXiv:2309.00071, section 3.2, eq. 17-19",
    training="a little",
    h="(1 - γ)·θ_d/s + γ·θ_d, γ from 0 at beta_slow turns to 1 at beta_fast",
    targeted=True,
    rope_type="yarn",
)
def ntk_by_parts(
    rope: RopeGeometry, s: float, *, beta_fast: BetaFast = 32.0, beta_slow: BetaSlow = 1.0, truncate: bool = True
) -> Frequencies:
    """NTK-by-parts: interpolate slow pairs, leave fast ones, and ramp between. YaRN without temperature.

    beta_fast: turns in the pretraining length from which on a pair is left alone. beta_slow: turns below
    which it is fully interpolated. truncate: round the ramp's ends to whole pairs.
    """
    params = {"beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": truncate}
    inv_freq = by_parts(rope, s, beta_fast, beta_slow, truncate)
    return Frequencies(inv_freq, params=params)


@scaling_method(
    "yarn",
    source="Peng et al. 2023, arXiv:2309.00071, section 3.4, eq. 21-22",
    training="a little",
    h="(1 - γ)·θ_d/s + γ·θ_d, γ from 0 at beta_slow turns to 1 at beta_fast",
    targeted=True,
    rope_type="yarn",
)
def yarn(
    rope: RopeGeometry,
    s: float,
    *,
    beta_fast: BetaFast = 32.0,
    beta_slow: BetaSlow = 1.0,
    truncate: bool = True,
    attention_factor: Annotated[float | None, SearchRange(1.0, 1.5)] = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
) -> Frequencies:
    """YaRN: NTK-by-parts and an attention temperature.

    beta_fast, beta_slow, truncate: as in ntk-by-parts. attention_factor: multiplies cos and sin;
    0.1·ln s + 1 unless given. mscale, mscale_all_dim: DeepSeek's pair, both or none. Such a model multiplies
    its softmax scale by (0.1·mscale_all_dim·ln s + 1)², so that cos and sin get
    (0.1·mscale·ln s + 1) / (0.1·mscale_all_dim·ln s + 1) alone.
    """
    params: dict[str, object] = {"beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": truncate}
    if (mscale is None) != (mscale_all_dim is None):
        raise MethodError("mscale and mscale_all_dim go together: the one divides the other. Give both, or none.")
    if attention_factor is not None:
        if mscale is not None:
            raise MethodError("attention_factor and mscale both set the temperature; it would count twice. Give one.")
        params["attention_factor"] = attention_factor
    elif mscale is not None and mscale_all_dim is not None:
        params |= {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
        attention_factor = yarn_attention_factor(s, mscale) / yarn_attention_factor(s, mscale_all_dim)
    else:
        attention_factor = yarn_attention_factor(s)
    inv_freq = by_parts(rope, s, beta_fast, beta_slow, truncate)
    return Frequencies(inv_freq, attention_factor, params=params)
