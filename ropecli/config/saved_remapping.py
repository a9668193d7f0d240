"""How config.json holds a distance method: the name of its attention, and the parameters beside it.

Stock transformers refuses the name before `import ropecli.attention`, in place of running plain attention.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from ropecli.config.fields import section_of
from ropecli.errors import CheckpointError, RopecliError, shown
from ropecli.rope import Remapping
from ropecli.scaling.registry import find_method, scaling_methods
from ropecli.scaling.scale import remapping_of
from ropecli.scaling.spec import ScaledRope, ScalingSpec

PREFIX = "ropecli:"
"""Of an attention's name, before the method's."""
ATTENTION = "attn_implementation"
KEY = "ropecli_remapping"
_OVERRULES = "_attn_implementation"
"""transformers takes it, where there is one, in place of the public field; older releases wrote it."""


@dataclass(frozen=True)
class SavedRemapping:
    """A distance method as config.json holds it.

    params: every parameter of the method, as it was settled. pretrained: the pretraining length; target: the length
    to read, tokens. rotary_start, neighbours: which dimensions of a head rotate, as
    attention.rotation.Rotation has them; None where it was not found out yet. inv_freq: by layer type, "" for
    all, of a model patched in memory; else the config's RoPE fields say how the model rotates.
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
        """As a user would name it, but for the factor, which is of the target over the pretraining length."""
        return ScalingSpec(find_method(self.method), self.target / self.pretrained, self.params)

    def remapping(self) -> Remapping:
        """Raises MethodError."""
        spec = self.spec
        spec.method.check(self.params)
        return remapping_of(spec, self.pretrained, self.target)

    @classmethod
    def of(cls, ropes: Iterable[ScaledRope]) -> "SavedRemapping | None":
        """What a plan's ropes carry; None where none of them has a remapping."""
        for rope in ropes:
            if (remapping := rope.remapping) is not None:
                return cls(rope.spec.method.name, dict(remapping.params), remapping.pretrained, remapping.target)
        return None

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, {}) or key == "params"}


def method_of(attention: object) -> str | None:
    """The distance method that an attention's name stands for. Raises CheckpointError for one not known."""
    if not isinstance(attention, str) or not attention.startswith(PREFIX):
        return None
    name = attention.removeprefix(PREFIX)
    method = scaling_methods().get(name)
    if method is None or not method.remaps:
        known = ", ".join(PREFIX + one.name for one in scaling_methods().values() if one.remaps)
        raise CheckpointError(f"{ATTENTION} in config.json is {shown(attention)}; this ropecli knows {known}.")
    return name


def read_saved_remapping(config: dict[str, Any]) -> SavedRemapping | None:
    """None where config.json carries no distance method. Raises CheckpointError for half of one."""
    section, attention = section_of(config), config.get(ATTENTION)
    if isinstance(attention, dict):
        attention = attention.get("" if section is config else "text_config")
    method, block = method_of(attention), section.get(KEY)
    if method is None and block is None:
        return None
    if method is None or block is None:
        there, missing = (KEY, ATTENTION) if method is None else (ATTENTION, KEY)
        left_out = " transformers' save_pretrained leaves it out." if method is None else ""
        raise CheckpointError(
            f"config.json holds {there} without the {missing} that belongs to it, so that how the model attends is not "
            f"known.{left_out} Write the patch anew from the original checkpoint."
        )
    if config.get(_OVERRULES) is not None:
        raise CheckpointError(
            f"config.json holds {_OVERRULES}, {shown(config[_OVERRULES])}, which transformers takes in place of "
            f"{ATTENTION}: the model would not attend by {method}. Remove {_OVERRULES}."
        )
    saved = parse_saved_remapping(block, method)
    if saved.inv_freq:
        raise CheckpointError(
            f"{KEY} in config.json holds the frequencies of a model that was patched in memory. Write the patch anew "
            "from the original checkpoint."
        )
    return saved


def parse_saved_remapping(block: Any, method: str) -> SavedRemapping:
    """The value of `ropecli_remapping`, of a checkpoint whose attention is the method's. Raises CheckpointError."""
    from pydantic import TypeAdapter, ValidationError

    try:
        saved = TypeAdapter(SavedRemapping).validate_json(
            json.dumps(block)
        )  # as JSON a strict SavedRemapping may be an object
        if saved.method != method:
            raise CheckpointError(f"its method is {shown(saved.method)}.")
        saved.remapping()
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "as a whole"
        fault = f"{place}: {first['msg']} (given: {shown(first['input'])})."
    except RopecliError as error:
        fault = str(error)
    else:
        return saved
    raise CheckpointError(
        f"{KEY} in config.json does not describe {method}: {fault} Write the patch anew from the original checkpoint."
    )


def write_saved_remapping(config: dict[str, Any], saved: SavedRemapping) -> None:
    """Edits `config` in place. What it asked for of other parts than the text's stays."""
    section = section_of(config)
    before = config.pop(_OVERRULES, None) or config.get(ATTENTION)
    if section is config:
        config[ATTENTION] = saved.attention
    else:
        config[ATTENTION] = {**_by_part(before, config), "text_config": saved.attention}
    section[KEY] = saved.as_json()


def _by_part(attention: Any, config: dict[str, Any]) -> dict[str, Any]:
    """An attention, as a composite config.json asks for it, as a mapping: one name alone is that of all parts."""
    if isinstance(attention, dict):
        return attention
    parts = [key for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)]
    parts = [key for key in parts if key != "quantization_config"]
    return {} if attention is None else dict.fromkeys(["", *parts], attention)
