"""Applies a ScalingSpec to a rope: its frequencies at a length, or the distances of a distance method."""

from dataclasses import replace

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Remapping, RopeGeometry
from ropecli.scaling.spec import ScaledRope, ScalingSpec


def scale(geometry: RopeGeometry, spec: ScalingSpec, length: int | None = None) -> ScaledRope:
    """The frequencies that `spec` gives for `geometry`.

    length: the current sequence length, tokens; by default the target length. Methods that do not depend on
    it ignore it. Raises MethodError for parameters that do not suit the geometry.
    """
    method, target = spec.method, round(geometry.original_max_position_embeddings * spec.factor)
    if method.remaps:
        unscaled = ScaledRope(geometry, spec, geometry.inv_freq())
        return remap(unscaled, spec, geometry.original_max_position_embeddings, target)
    current = [length or target] if method.depends_on_length else []
    found = method.function(geometry, spec.factor, *current, **spec.params)
    if not (np.isfinite(found.inv_freq).all() and (found.inv_freq >= 0).all()):
        raise MethodError(f"{method} with factor {spec.factor:g} gives frequencies that are not finite.")
    settled = replace(spec, params=found.params)
    return ScaledRope(geometry, settled, found.inv_freq, found.attention_factor, found.rope_theta)


def remapping_of(spec: ScalingSpec, pretrained: int, target: int) -> Remapping:
    """The distances that `spec`, of a distance method, gives.

    pretrained: tokens that the model was trained to read; target: tokens to read. Raises MethodError.
    """
    remapping = spec.method.function(pretrained, target, **spec.params)
    return replace(remapping, pretrained=pretrained, target=target)


def remap(rope: ScaledRope, spec: ScalingSpec, pretrained: int, target: int) -> ScaledRope:
    """`rope` with the distances that `spec` gives (see remapping_of); its frequencies stay. Raises MethodError."""
    return replace(rope, spec=spec, remapping=remapping_of(spec, pretrained, target))


def varies_with_length(rope: ScaledRope) -> bool:
    """Whether the frequencies really change inside the target length (longrope with one list does not)."""
    if not rope.spec.method.depends_on_length:
        return False
    short, long = scale(rope.geometry, rope.spec, length=1), scale(rope.geometry, rope.spec)
    return not np.array_equal(short.inv_freq, long.inv_freq)
