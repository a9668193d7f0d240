"""LongRoPE: a factor for each pair, found by a search outside of this file."""

import math
from collections.abc import Sequence

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


def longrope_attention_factor(s: float, original_length: int) -> float:
    """√(1 + ln s / ln L) for a pretraining length L, tokens; 1 where s is no more than that, NaN where ln L is zero."""
    if s <= 1:
        return 1.0
    return math.sqrt(1 + math.log(s) / math.log(original_length)) if original_length > 1 else math.nan


def check_length(name: str, numbers: Sequence[float], rope: RopeGeometry) -> None:
    """Raises MethodError unless there is one number for each pair."""
    if len(numbers) != rope.pairs:
        raise MethodError(f"{name} has {len(numbers)} entries; this model has {rope.pairs} rotary pairs.")


@scaling_method(
    "longrope",
    source="Ding et al. 2024, arXiv:2402.13753, section 3; Phi-3",
    training="by the factors",
    h="θ_d/long_factor_d, or θ_d/short_factor_d up to L",
    rope_type="longrope",
    other_names=("su",),
)
def longrope(
    rope: RopeGeometry,
    s: float,
    length: int,
    *,
    long_factor: Sequence[float],
    short_factor: Sequence[float] | None = None,
    attention_factor: float | None = None,
) -> Frequencies:
    """LongRoPE: divide each pair's frequency by its own factor.

    long_factor, short_factor: rotary_dim/2 numbers each, for sequences above and up to the pretraining
    window L; one list alone serves both, and then the frequencies never switch. attention_factor:
    √(1 + ln s / ln L) unless given.
    """
    short_factor = long_factor if short_factor is None else short_factor
    for name, factors in (("long_factor", long_factor), ("short_factor", short_factor)):
        check_length(name, factors, rope)
        if min(factors) <= 0:
            raise MethodError(f"{name} holds {min(factors):g}; every factor must be positive.")
    params: dict[str, object] = {"long_factor": list(long_factor), "short_factor": list(short_factor)}
    original_length = rope.original_max_position_embeddings
    if attention_factor is not None:
        params["attention_factor"] = attention_factor
    else:
        if original_length < 2:
            raise MethodError(
                f"A pretraining length of {original_length} gives no attention factor: its logarithm is zero."
            )
        attention_factor = longrope_attention_factor(s, original_length)
    chosen = np.array(long_factor if length > original_length else short_factor, dtype=np.float64)
    with np.errstate(over="ignore"):  # the registry refuses what is not finite
        inv_freq = rope.inv_freq() / chosen
    return Frequencies(inv_freq, attention_factor, params=params)
