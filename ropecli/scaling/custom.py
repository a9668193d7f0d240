"""Frequencies from elsewhere: a search, a paper's table, another program."""

from collections.abc import Sequence

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.longrope import check_length
from ropecli.scaling.registry import scaling_method


@scaling_method(
    "custom",
    source="the user's own numbers",
    training="by the numbers",
    h="inv_freq_d, or θ_d/factors_d",
    other_names=("file",),
)
def custom(
    rope: RopeGeometry,
    s: float,
    *,
    inv_freq: Sequence[float] | None = None,
    factors: Sequence[float] | None = None,
    attention_factor: float = 1.0,
) -> Frequencies:
    """Custom: frequencies as they are given, pair by pair.

    inv_freq: rotary_dim/2 frequencies, radians per token, zeros allowed. factors: rotary_dim/2 numbers by which
    the pretrained frequencies are divided. Exactly one of them. attention_factor: multiplies cos and sin.
    """
    params: dict[str, object] = {"attention_factor": attention_factor}
    if inv_freq is not None and factors is None:
        check_length("inv_freq", inv_freq, rope)
        params["inv_freq"] = list(inv_freq)
        given = np.array(inv_freq, dtype=np.float64)
    elif factors is not None and inv_freq is None:
        check_length("factors", factors, rope)
        if min(factors) <= 0:
            raise MethodError(f"factors holds {min(factors):g}; every factor must be positive.")
        params["factors"] = list(factors)
        given = rope.inv_freq() / np.array(factors, dtype=np.float64)
    else:
        found = "neither was" if factors is None else "both were"
        raise MethodError(
            f"custom takes either inv_freq or factors, a list each, and {found} given. "
            "Example: --factors-file FILE.json, which holds a list of factors."
        )
    return Frequencies(given, attention_factor, params=params)
