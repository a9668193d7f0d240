"""User-supplied frequencies, for example from a search or a paper."""

from collections.abc import Sequence

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.longrope import check_length
from ropecli.scaling.registry import scaling_method


@scaling_method(
    "custom",
    source="user-supplied values",
    training="depends on the values",
    uses_factor=False,
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
    """Custom: use the given frequency, or divide by the given factor, for each pair.

    inv_freq: rotary_dim/2 frequencies, radians per token, zeros allowed. factors: rotary_dim/2 divisors of the
    pretrained frequencies. Give exactly one of them. attention_factor: multiplies cos and sin.
    """
    params: dict[str, object] = {"attention_factor": attention_factor}
    if inv_freq is not None and factors is None:
        check_length("inv_freq", inv_freq, rope)
        params["inv_freq"] = list(inv_freq)
        given = np.array(inv_freq, dtype=np.float64)
    elif factors is not None and inv_freq is None:
        check_length("factors", factors, rope)
        if min(factors) <= 0:
            raise MethodError(f"factors contains {min(factors):g}; expected positive numbers.")
        params["factors"] = list(factors)
        given = rope.inv_freq() / np.array(factors, dtype=np.float64)
    else:
        found = "neither was" if factors is None else "both were"
        raise MethodError(
            f"custom requires a list, either inv_freq or factors, but {found} given. "
            "Example: --factors-file FILE.json, a JSON list of factors."
        )
    return Frequencies(given, attention_factor, params=params)
