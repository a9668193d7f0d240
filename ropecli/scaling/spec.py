"""ScalingSpec, the requested scaling, and ScaledRope, the result."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """A one-line label: method, factor, and the numeric parameters that differ from the method's defaults."""
    try:
        known = find_method(method).signature
    except MethodError:  # of a report by another version
        known = {}
    numbers = {key: value for key, value in params.items() if key in known and isinstance(value, int | float)}
    changed = [f"{key} {value:g}" for key, value in numbers.items() if value != known[key].default]
    return f"{method} ×{factor:g}" + (f" ({', '.join(changed)})" if changed else "")
