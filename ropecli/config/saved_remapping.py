"""Stores a distance method in config.json: the name of its attention, and the method's parameters.

Without `import ropecli.attention`, transformers refuses the unknown name instead of running standard attention.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from ropecli.config.fields import section_of
from ropecli.errors import CheckpointError, RopecliError, first_fault, shown
from ropecli.rope import Remapping
from ropecli.scaling.registry import find_method, scaling_methods
from ropecli.scaling.spec import ScaledRope, ScalingSpec, remapping_of
from ropecli.scaling.temperature import TEMPERATURES

PREFIX = "ropecli:"
"""Prefix of the attention's name, before the method's name."""
ATTENTION = "attn_implementation"
KEY = "ropecli_remapping"
_OVERRULES = "_attn_implementation"
"""A field of some published config.json files; transformers prefers it to the public one."""


@dataclass(frozen=True)
class SavedRemapping:
    """A distance method in config.json.

    params: all parameters of the method, resolved. pretrained: the pretraining length; target: the length to extend
    to, tokens. rotary_start, neighbours: the layout of the rotary dimensions, see block_attention.Rotation; None if not
    determined yet. inv_freq: frequencies by layer type ("" for all) of a model patched in memory; otherwise the
    config's RoPE fields define them.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    method: str
    params: dict[str, Any]
    pretrained: Annotated[int, Ge(1)]
    target: Annotated[int, Ge(1)]
    rotary_start: Annotated[int, Ge(0)] | None = None
    neighbours: bool | None = None
    inv_freq: dict[str, list[Annotated[float, Ge(0)]]] = field(default_factory=dict)

    @property
    def attention(self) -> str:
        return PREFIX + self.method

    @property
    def spec(self) -> ScalingSpec:
        """The method's spec, with factor target / pretrained."""
        return ScalingSpec(find_method(self.method), self.target / self.pretrained, self.params)

    def remapping(self) -> Remapping:
        """Raises MethodError."""
        spec = self.spec
        spec.method.check(self.params)
        return remapping_of(spec, self.pretrained, self.target)

    def without_score_factors(self) -> "SavedRemapping":
        """The same distances, with the scores of standard attention."""
        standard = {"score_factor": 1.0, **dict.fromkeys(TEMPERATURES, False)}
        return replace(self, params={key: standard.get(key, value) for key, value in self.params.items()})

    @classmethod
    def of(cls, ropes: Iterable[ScaledRope]) -> "SavedRemapping | None":
        """The remapping of a plan's ropes; None if they have none."""
        for rope in ropes:
            if (remapping := rope.remapping) is not None:
                method = rope.spec.method.distance or rope.spec.method
                return cls(method.name, dict(remapping.params), remapping.pretrained, remapping.target)
        return None

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, {}) or key == "params"}


def method_of(attention: object) -> str | None:
    """The distance method of an attention's name, or None. Raises CheckpointError for an unknown method."""
    if not isinstance(attention, str) or not attention.startswith(PREFIX):
        return None
    name = attention.removeprefix(PREFIX)
    method = scaling_methods().get(name)
    if method is None or not method.remaps:
        known = ", ".join(PREFIX + name for name, method in scaling_methods().items() if method.remaps)
        raise CheckpointError(f"{ATTENTION} in config.json is {shown(attention)}; expected one of {known}.")
    return name


def read_saved_remapping(config: dict[str, Any]) -> SavedRemapping | None:
    """Read the distance method from config.json; None if there is none. Raises CheckpointError if incomplete."""
    section, attention = section_of(config), config.get(ATTENTION)
    if isinstance(attention, dict):
        attention = attention.get("" if section is config else "text_config")
    method, block = method_of(attention), section.get(KEY)
    if method is None and block is None:
        return None
    if method is None or block is None:
        there, missing = (KEY, ATTENTION) if method is None else (ATTENTION, KEY)
        omitted = f" transformers' save_pretrained omits {missing}." if method is None else ""
        raise CheckpointError(
            f"config.json has {there} but no {missing}, so the model's attention is unknown.{omitted} "
            "Patch the original checkpoint again."
        )
    return parse_saved_remapping(block, method)


def parse_saved_remapping(block: Any, method: str) -> SavedRemapping:
    """Parse the value of `ropecli_remapping`. method: the method of the attention. Raises CheckpointError."""
    from pydantic import TypeAdapter, ValidationError

    try:
        # via JSON, because strict mode accepts a dict for a dataclass only there
        saved = TypeAdapter(SavedRemapping).validate_json(json.dumps(block))
        if saved.method != method:
            raise CheckpointError(f"method is {shown(saved.method)}.")
        saved.remapping()
    except (ValidationError, RopecliError) as error:
        fault = f"{first_fault(error, 'value')}." if isinstance(error, ValidationError) else error
        what = f"{KEY} in config.json is not a valid {method}: {fault}"
        raise CheckpointError(f"{what} Patch the original checkpoint again.") from error
    return saved


def write_saved_remapping(config: dict[str, Any], saved: SavedRemapping) -> None:
    """Write the distance method into `config`. The attention of other parts than the text model stays unchanged."""
    section = section_of(config)
    before: Any = config.pop(_OVERRULES, None) or config.get(ATTENTION)
    if section is not config and not isinstance(before, dict):  # a single name applies to all parts
        parts = [key for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)]
        parts = ["", *(key for key in parts if key != "quantization_config")]
        before = {} if before is None else dict.fromkeys(parts, before)
    config[ATTENTION] = saved.attention if section is config else {**before, "text_config": saved.attention}
    section[KEY] = saved.as_json()
