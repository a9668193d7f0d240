"""ScalingSpec, the requested scaling; ScaledRope, the result; and how a spec is applied to a geometry."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Remapping, RopeGeometry
from ropecli.scaling.method import ScalingMethod
from ropecli.scaling.registry import FREQUENCY_FACTOR, find_method, own_params

_LARGEST_FACTOR = 10**6


@dataclass(frozen=True)
class ScalingSpec:
    """A method, the factor s = target length ÷ pretraining length, and the method's parameters. See make_spec."""

    method: ScalingMethod
    factor: float = 1.0
    params: Mapping[str, object] = field(default_factory=dict)

    @property
    def frequency(self) -> "ScalingSpec | None":
        """The scaling of the frequencies; None for a distance method alone."""
        part, distance = self.method.frequency, self.method.distance
        if part is None or distance is None:
            return None if self.method.remaps else self
        factor: Any = self.params.get(FREQUENCY_FACTOR)
        if factor is None and distance.uses_factor:
            factor = math.sqrt(self.factor) if part.uses_factor else 1.0
        return ScalingSpec(part, factor or self.factor, own_params(part, self.params))

    def checked(self) -> "ScalingSpec":
        """Return self. Raises MethodError for a factor out of range or invalid parameters."""
        check_factor(self.factor)
        self.method.check(self.params)
        return self

    @property
    def label(self) -> str:
        return label_of(self.method.name, self.factor, self.params)


def make_spec(method: str, factor: float = 1.0, params: Mapping[str, Any] = MappingProxyType({})) -> ScalingSpec:
    """Look up the method and check factor and parameters. Raises MethodError."""
    return ScalingSpec(find_method(method), factor, dict(params)).checked()


@dataclass(frozen=True)
class ScaledRope:
    """A scaled rotary embedding.

    inv_freq: shape (rotary_dim/2,), float64, radians per token, index 0 fastest.
    attention_factor: multiplies cos and sin, so logits get its square.
    rope_theta: the base to write; differs from the geometry's for methods that only change the base.
    remapping: for distance methods.
    """

    geometry: RopeGeometry
    spec: ScalingSpec
    inv_freq: np.ndarray
    attention_factor: float = 1.0
    rope_theta: float = math.nan
    remapping: Remapping | None = None

    def __post_init__(self) -> None:
        if math.isnan(self.rope_theta):
            object.__setattr__(self, "rope_theta", self.geometry.rope_theta)

    @property
    def scaled_length(self) -> int:
        """The pretraining length × the factor, tokens."""
        return round(self.geometry.original_max_position_embeddings * self.spec.factor)

    @property
    def wavelength(self) -> np.ndarray:
        """Tokens per rotation, shape (rotary_dim/2,); infinite for pairs that do not rotate."""
        with np.errstate(divide="ignore"):
            return 2 * math.pi / self.inv_freq


def check_factor(factor: float) -> None:
    """Raise MethodError unless 1 <= factor <= 1000000."""
    if not 1 <= factor <= _LARGEST_FACTOR:
        raise MethodError(f"The factor is {factor:g}; expected a number from 1 to {_LARGEST_FACTOR}.")


def label_of(method: str, factor: float, params: Mapping[str, object]) -> str:
    """A one-line label: method, factor, and the numeric parameters that are not defaults. Raises MethodError."""
    known = find_method(method).signature
    numbers = {key: value for key, value in params.items() if key in known and isinstance(value, int | float)}
    changed = [f"{key} {value:g}" for key, value in numbers.items() if value != known[key].default]
    return f"{method} ×{factor:g}" + (f" ({', '.join(changed)})" if changed else "")


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
