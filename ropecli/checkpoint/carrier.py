"""How config.json carries a relative-position method: the name of its attention, and what that needs to know beside it.

Stock transformers refuses the name where ropecli is not imported, in place of running plain attention.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ropecli.checkpoint.reading import section_of
from ropecli.errors import CheckpointError, RopecliError, shown
from ropecli.rope import Remapping, ScaledRope, ScalingSpec
from ropecli.scaling.registry import remapping_of, scaling_methods

PREFIX = "ropecli:"
"""Of an attention's name, before the method's."""
ATTENTION = "attn_implementation"
KEY = "ropecli_remapping"


@dataclass(frozen=True)
class Carrier:
    """A relative-position method as config.json holds it.

    params: every parameter of the method, as it was settled. pretrained: the window that the model was trained to
    read; target: the one to read, tokens. rotary_start, neighbours: which dimensions of a head turn, as
    remapping.attention.turning.Rotation has them; None where it was not found out yet. inv_freq: by layer type, "" for
    all, of a model patched in memory; else the config's RoPE fields say how the model turns.
    """

    method: str
    params: dict[str, Any]
    pretrained: int
    target: int
    rotary_start: int | None = None
    neighbours: bool | None = None
    inv_freq: dict[str, list[float]] = field(default_factory=dict)

    @property
    def attention(self) -> str:
        return PREFIX + self.method

    @property
    def spec(self) -> ScalingSpec:
        """As a user would name it, but for the factor, which is of the target over the pretraining window."""
        return ScalingSpec(self.method, self.target / self.pretrained, self.params)

    def remapping(self) -> Remapping:
        """Raises MethodError."""
        return remapping_of(self.spec, self.pretrained, self.target)

    @classmethod
    def of(cls, ropes: Iterable[ScaledRope]) -> "Carrier | None":
        """What a plan's ropes carry; None where none of them has a remapping."""
        for rope in ropes:
            if (remapping := rope.remapping) is not None:
                return cls(rope.spec.method, dict(remapping.params), remapping.pretrained, remapping.target)
        return None

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, {}) or key == "params"}


def method_of(attention: object) -> str | None:
    """The relative-position method that an attention's name stands for. Raises CheckpointError for one not known."""
    if not isinstance(attention, str) or not attention.startswith(PREFIX):
        return None
    name = attention.removeprefix(PREFIX)
    method = scaling_methods().get(name)
    if method is None or not method.remaps:
        known = ", ".join(one.name for one in scaling_methods().values() if one.remaps)
        raise CheckpointError(f"{ATTENTION} in config.json is {shown(attention)}; known after {PREFIX}: {known}.")
    return name


def read_carrier(config: dict[str, Any]) -> Carrier | None:
    """None where config.json carries no relative-position method. Raises CheckpointError for half of one."""
    section, attention = section_of(config), config.get(ATTENTION)
    if isinstance(attention, dict):
        attention = attention.get("text_config", attention.get(""))
    method, block = method_of(attention), section.get(KEY)
    if method is None and block is None:
        return None
    if method is None or block is None:
        there, missing = (KEY, ATTENTION) if method is None else (ATTENTION, KEY)
        raise CheckpointError(
            f"config.json holds {there} without the {missing} that belongs to it, so that how the model attends is not "
            "known. Write the patch anew from the original checkpoint."
        )
    return parse_carrier(block, method)


def parse_carrier(block: Any, method: str) -> Carrier:
    """The value of `ropecli_remapping`, of a checkpoint whose attention is the method's. Raises CheckpointError."""
    try:
        carrier = Carrier(**block)
        numbers = (carrier.pretrained, carrier.target)
        if carrier.method != method or any(isinstance(one, bool) or not 0 < int(one) == one for one in numbers):
            raise ValueError(f"method {shown(carrier.method)} of windows {shown(numbers)}")
        carrier.remapping()
    except (TypeError, ValueError, AttributeError, OverflowError, RopecliError) as error:
        raise CheckpointError(f"{KEY} in config.json does not describe {method}: {error}") from error
    return carrier


def without_carrier(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of `config` whose model attends as transformers chooses."""
    plain = {key: value for key, value in config.items() if key not in (ATTENTION, KEY)}
    if section_of(config) is not config:
        plain["text_config"] = {key: value for key, value in section_of(config).items() if key != KEY}
    return plain


def write_carrier(config: dict[str, Any], carrier: Carrier) -> None:
    """Edits `config` in place."""
    section = section_of(config)
    config[ATTENTION] = carrier.attention if section is config else {"text_config": carrier.attention}
    section[KEY] = carrier.as_json()
