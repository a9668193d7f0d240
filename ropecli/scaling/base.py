"""No new scaling, and methods that change the base: ABF, NTK-aware scaling, and dynamic NTK, by the current length."""

from ropecli.errors import MethodError
from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method


@scaling_method("none", source="Su et al. 2021, arXiv:2104.09864, section 3.2.2", training="no",
                rope_type="default", uses_factor=False)  # fmt: skip
def none(rope: RopeGeometry, s: float) -> Frequencies:
    """Raise the context length only: keep the frequencies, and the scaling that the checkpoint ships with."""
    return Frequencies(rope.inv_freq())


@scaling_method("unscaled", source="Su et al. 2021, arXiv:2104.09864, section 3.2.2", training="no",
                rope_type="default", uses_factor=False)  # fmt: skip
def unscaled(rope: RopeGeometry, s: float) -> Frequencies:
    """Remove the scaling that the checkpoint ships with: the frequencies of the base. Written and reported as none."""
    return Frequencies(rope.inv_freq())


@scaling_method("abf", source="Xiong et al. 2023, arXiv:2309.16039, section 4.1", training="advised",
                uses_factor=False, h="b'^(-2d/|D|), b' = rope_theta or beta·b", rope_type="default")  # fmt: skip
def abf(rope: RopeGeometry, s: float, *, rope_theta: float | None = None, beta: float | None = None) -> Frequencies:
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
    return Frequencies(rope.inv_freq(new_theta), rope_theta=new_theta, params=params)


def ntk_theta(rope: RopeGeometry, s: float) -> float:
    """b·s^(d/2k), where k is the index of the slowest rotating pair; b·s^(d/(d-2)) if all pairs rotate."""
    return rope.rope_theta * s ** (rope.rotary_dim / (2 * (rope.pairs - rope.still_pairs - 1)))


@scaling_method("ntk", source="bloc97 2023, 'NTK-aware scaled RoPE'; YaRN, arXiv:2309.00071, eq. 16",
                training="no", h="(b·s^(|D|/(|D|-2)))^(-2d/|D|)", rope_type="default")  # fmt: skip
def ntk(rope: RopeGeometry, s: float) -> Frequencies:
    """NTK-aware scaling: change the base to b·s^(d/(d-2)), which barely changes fast pairs.

    Only the slowest pair is slowed down by the full factor s, so the usable length stays below s times the pretraining
    length. Choose a larger factor than target length / pretraining length.
    """
    theta = ntk_theta(rope, s)
    return Frequencies(rope.inv_freq(theta), rope_theta=theta)


@scaling_method("dynamic", source="emozilla 2023, 'Dynamically Scaled RoPE'; YaRN, appendix B.3",
                training="no", rope_type="dynamic",
                h="(b·(s·max(1, l/L) - s + 1)^(|D|/(|D|-2)))^(-2d/|D|)")  # fmt: skip
def dynamic(rope: RopeGeometry, s: float, length: int) -> Frequencies:
    """Dynamic NTK: NTK-aware scaling by (s·l/L) - (s - 1), where l is the current length, at least L.

    L is the pretraining length. A KV cache that grows past L is inexact: its keys were rotated for a shorter length.
    """
    original_length = rope.original_max_position_embeddings
    stretch = s * max(length, original_length) / original_length - (s - 1)
    # rope_theta stays the pretrained one: readers compute the base from it again at every length
    return Frequencies(rope.inv_freq(ntk_theta(rope, stretch)))
