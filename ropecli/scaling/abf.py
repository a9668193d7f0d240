"""Adjusted base frequency: a larger base slows down the slow pairs."""

from typing import Annotated

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.method import SearchRange
from ropecli.scaling.registry import scaling_method


@scaling_method("abf", source="Xiong et al. 2023, arXiv:2309.16039, section 4.1", training="advised",
                uses_factor=False, h="b'^(-2d/|D|), b' = rope_theta or beta·b", rope_type="default",
                other_names=("rope-theta", "base"))  # fmt: skip
def abf(
    rope: RopeGeometry,
    s: float,
    *,
    rope_theta: float | None = None,
    beta: Annotated[float | None, SearchRange(2.0, 500.0)] = None,
) -> Frequencies:
    """Adjusted base frequency (ABF): replace the base b with rope_theta, or with beta * b.

    rope_theta: the new base (Llama 2 Long: 500000, Code Llama: 1000000). beta: the new base divided by the pretrained
    one (Xiong et al.: 50). Give exactly one of them. The factor only sets the context length.
    """
    if rope_theta is not None and beta is None:
        new_theta, params = rope_theta, {"rope_theta": rope_theta}
    elif beta is not None and rope_theta is None:
        new_theta, params = beta * rope.rope_theta, {"beta": beta}
    else:
        given = "neither was" if beta is None else "both were"
        raise MethodError(
            f"abf requires either rope_theta (the new base) or beta (new base / pretrained base), but {given} given. "
            "Example: --set rope_theta=500000"
        )
    if new_theta <= 1:
        raise MethodError(
            f"The new base would be {new_theta:g}; expected more than 1, and more than the pretrained base to extend."
        )
    return Frequencies(rope.inv_freq(new_theta), rope_theta=new_theta, params=params)
