"""Dynamic YaRN: the factor follows the current length, so short inputs use the pretrained frequencies."""

from ropecli.rope import Frequencies, RopeGeometry
from ropecli.scaling.registry import scaling_method
from ropecli.scaling.yarn import by_parts, yarn_attention_factor


@scaling_method(
    "dynamic-yarn",
    source="Peng et al. 2023, arXiv:2309.00071, 'Dynamic Scaling', with YaRN instead of NTK",
    training="no",
    uses_factor=False,
    h="(1 - γ)·θ_d/max(1, l/L) + γ·θ_d, γ from 0 at beta_slow rotations to 1 at beta_fast",
    targeted=True,
)
def dynamic_yarn(
    rope: RopeGeometry,
    s: float,
    length: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Frequencies:
    """Dynamic YaRN: YaRN with factor max(1, l/L), where l is the current length and L the pretraining length.

    beta_fast, beta_slow, truncate: as in yarn. The factor only sets the context length. A KV cache that grows past L
    is inexact: its keys were rotated for a shorter length.
    """
    now = max(1.0, length / rope.original_max_position_embeddings)
    params = {"beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": truncate}
    inv_freq = by_parts(rope, now, beta_fast, beta_slow, truncate)
    return Frequencies(inv_freq, yarn_attention_factor(now), params=params)
