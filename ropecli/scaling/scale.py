"""Applies a ScalingSpec to a RopeGeometry, giving frequencies or, for distance methods, a remapping."""

from dataclasses import replace

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Remapping, RopeGeometry
from ropecli.scaling.registry import find_method
from ropecli.scaling.spec import ScaledRope, ScalingSpec


def scale(geometry: RopeGeometry, spec: ScalingSpec, length: int | None = None) -> ScaledRope:
    """Apply `spec` to `geometry`.

    length: the current sequence length, tokens. Default: the target length. Ignored by methods that do not depend on
    it. Raises MethodError for parameters that do not fit the geometry.
    """
    method, target = spec.method, round(geometry.original_max_position_embeddings * spec.factor)
    if method.remaps:
        rope = scale(geometry, spec.frequency or ScalingSpec(find_method("none")))
        return remap(rope, spec, rope.scaled_length, target)
    current = [length or target] if method.depends_on_length else []
    scaled = method.function(geometry, spec.factor, *current, **spec.params)
    usable = np.isfinite(scaled.inv_freq).all() and (scaled.inv_freq >= 0).all()
    if not usable or scaled.rope_theta <= 1 or np.isinf(scaled.rope_theta):
        raise MethodError(f"{method} with factor {spec.factor:g} gives frequencies or a base that are not usable.")
    resolved = replace(spec, params=scaled.params)
    return ScaledRope(geometry, resolved, scaled.inv_freq, scaled.attention_factor, scaled.rope_theta)


def remapping_of(spec: ScalingSpec, pretrained: int, target: int) -> Remapping:
    """The remapping of `spec`, a distance method's.

    pretrained: the pretraining length; target: the length to extend to, tokens. Raises MethodError.
    """
    remapping = spec.method.function(pretrained, target, **spec.params)
    return replace(remapping, pretrained=pretrained, target=target)


def remap(rope: ScaledRope, spec: ScalingSpec, pretrained: int, target: int) -> ScaledRope:
    """`rope` with the remapping of `spec` (see remapping_of) and unchanged frequencies. Raises MethodError."""
    remapping = remapping_of(spec, pretrained, target)
    if spec.frequency is not None:
        spec = replace(spec, params={**rope.spec.params, **spec.params})
    return replace(rope, spec=spec, remapping=remapping)


def varies_with_length(rope: ScaledRope) -> bool:
    """Return whether the frequencies change within the target length (not for longrope with one list)."""
    if not rope.spec.method.depends_on_length:
        return False
    short, long = scale(rope.geometry, rope.spec, length=1), scale(rope.geometry, rope.spec)
    return not np.array_equal(short.inv_freq, long.inv_freq)
