"""A factor of its own for each pair: LongRoPE, whose factors a search finds for each model, and custom values."""

import math
from collections.abc import Sequence

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


def longrope_attention_factor(s: float, original_length: int) -> float:
    """√(1 + ln s / ln L) for a pretraining length of L tokens; 1 for s <= 1, NaN for L <= 1."""
    if s <= 1:
        return 1.0
    return math.sqrt(1 + math.log(s) / math.log(original_length)) if original_length > 1 else math.nan


def check_list(name: str, numbers: Sequence[float], rope: RopeGeometry, *, zeros: bool = False) -> None:
    """Raise MethodError unless there is one positive number for each pair."""
    if len(numbers) != rope.pairs or (min(numbers) <= 0 and not zeros):
        raise MethodError(
            f"{name} has {len(numbers)} entries, the smallest {min(numbers, default=0):g}; this model has {rope.pairs} "
            "rotary pairs, and each needs a positive number."
        )


@scaling_method("longrope", source="Ding et al. 2024, arXiv:2402.13753, section 3; Phi-3",
                training="depends on the factors", uses_factor=False,
                h="θ_d/long_factor_d, or θ_d/short_factor_d up to L", rope_type="longrope")  # fmt: skip
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

    long_factor, short_factor: rotary_dim/2 numbers each, for sequences longer than the pretraining length L, and for
    sequences up to L. Default of short_factor: long_factor, so that the frequencies do not depend on the length.
    attention_factor: multiplies cos and sin. Default: √(1 + ln s / ln L).
    """
    short_factor = long_factor if short_factor is None else short_factor
    for name, factors in (("long_factor", long_factor), ("short_factor", short_factor)):
        check_list(name, factors, rope)
    params: dict[str, object] = {"long_factor": list(long_factor), "short_factor": list(short_factor)}
    original_length = rope.original_max_position_embeddings
    if attention_factor is not None:
        params["attention_factor"] = attention_factor
    else:
        attention_factor = longrope_attention_factor(s, original_length)
    divisors = np.array(long_factor if length > original_length else short_factor, dtype=np.float64)
    with np.errstate(over="ignore"):  # scale() refuses frequencies that are not finite
        inv_freq = rope.inv_freq() / divisors
    return Frequencies(inv_freq, attention_factor, params=params)


@scaling_method("custom", source="user-supplied values", training="depends on the values", uses_factor=False,
                h="inv_freq_d, or θ_d/factors_d")  # fmt: skip
def custom(
    rope: RopeGeometry,
    s: float,
    *,
    inv_freq: Sequence[float] | None = None,
    factors: Sequence[float] | None = None,
    attention_factor: float = 1.0,
) -> Frequencies:
    """Custom: use the given frequency, or divide by the given factor, for each pair.

    inv_freq: rotary_dim/2 frequencies, radians per token, zeros allowed. factors: rotary_dim/2 divisors of the
    pretrained frequencies. Give exactly one of them. attention_factor: multiplies cos and sin.
    """
    params: dict[str, object] = {"attention_factor": attention_factor}
    if inv_freq is not None and factors is None:
        check_list("inv_freq", inv_freq, rope, zeros=True)
        params["inv_freq"] = list(inv_freq)
        frequencies = np.array(inv_freq, dtype=np.float64)
    elif factors is not None and inv_freq is None:
        check_list("factors", factors, rope)
        params["factors"] = list(factors)
        frequencies = rope.inv_freq() / np.array(factors, dtype=np.float64)
    else:
        neither_or_both = "neither was" if factors is None else "both were"
        raise MethodError(
            f"custom requires a list, either inv_freq or factors, but {neither_or_both} given. "
            "Example: --factors-file FILE.json, a JSON list of factors."
        )
    return Frequencies(frequencies, attention_factor, params=params)
