"""The attention factor, which vLLM and SGLang know by names of their own.

Source: `get_rope` and the classes for YaRN and longrope, in the releases that vllm.py and sglang.py name.
"""

import math

from ropecli.checkpoint.dialects import Parameters
from ropecli.export.positions import Positions
from ropecli.scaling.yarn import yarn_attention_factor


def with_engine_names(parameters: Parameters) -> Parameters:
    """`parameters` with a float for the factor, and the attention factor under the engines' names too.

    longrope: short_mscale and long_mscale, in its place. yarn: attn_factor, on top of 0.1·ln s + 1.
    """
    told, attention_factor = dict(parameters), parameters.get("attention_factor")
    if "factor" in told:
        told["factor"] = float(told["factor"])
    if attention_factor is not None and told["rope_type"] == "longrope":
        told |= {"short_mscale": attention_factor, "long_mscale": attention_factor}
    elif attention_factor is not None and told["rope_type"] == "yarn":
        told["attn_factor"] = attention_factor / yarn_attention_factor(told["factor"])
    return told


def folder_gives_longropes(positions: Positions) -> bool:
    """Whether the folder alone gives these engines longrope's attention factor."""
    mscale = positions.written.get("long_mscale", positions.usual_longrope_attention_factor)
    return math.isclose(positions.rope.attention_factor, mscale, rel_tol=1e-6)
