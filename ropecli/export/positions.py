"""A checkpoint's positions as an engine gets to know them: the written parameters, by layer type, and the window."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropecli import demo
from ropecli.checkpoint.dialects import NATIVE_KEYS, PARTIAL_KEYS, WINDOW_KEYS, Parameters
from ropecli.checkpoint.encoding import native_parameters
from ropecli.checkpoint.fields import first, mapping
from ropecli.checkpoint.plan import effective_ropes
from ropecli.checkpoint.reading import Checkpoint, section_of
from ropecli.errors import PatchError
from ropecli.rope import ScaledRope

_SCALING_KEYS = {"rope_type", "type", "rope_theta", *sum(NATIVE_KEYS.values(), ())} - {"partial_rotary_factor"}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
"""What the engines' files know. Others are refused."""


@dataclass(frozen=True)
class Positions:
    """What the engines' files work from.

    checkpoint: what a command line calls it, a folder or a Hub id. section: the part of config.json that holds the
    RoPE fields, None for all of it. parameters: `rope_parameters` with a base each, by layer type (None where all
    layers share them). rope: the one that sees the whole context; written: what config.json itself holds of it.
    window: tokens that it reaches; written_window: what config.json says of that, under window_key. latent:
    multi-head latent attention. warnings: what config.json leaves open, in sentences.
    """

    checkpoint: str
    model_type: str
    section: str | None
    parameters: Mapping[str | None, Parameters | None]
    written: Parameters
    rope: ScaledRope
    window: int
    written_window: int
    window_key: str
    tokenizer_window: float | None
    latent: bool
    warnings: tuple[str, ...]

    @property
    def nested(self) -> bool:
        """Whether layer types have parameters of their own."""
        return None not in self.parameters

    @property
    def main(self) -> Parameters:
        """The parameters of `rope`."""
        return self.parameters[self.rope.geometry.layer_type] or {}

    @property
    def rope_type(self) -> str:
        return self.main["rope_type"]

    @property
    def original_window(self) -> int:
        """The pretraining window, tokens."""
        return self.rope.geometry.original_max_position_embeddings

    @property
    def factor(self) -> float:
        return float(self.main.get("factor", 1.0))

    @property
    def usual_longrope_attention_factor(self) -> float:
        """√(1 + ln s / ln L) with s by the windows in config.json: where nothing else says, readers take this."""
        written, original = self.written_window, self.original_window
        return 1.0 if written <= original else math.sqrt(1 + math.log(written / original) / math.log(original))

    def in_section(self, overrides: dict[str, Any]) -> dict[str, Any]:
        """`overrides` at the place of config.json where the RoPE fields are."""
        return overrides if self.section is None else {self.section: overrides}


def read_positions(checkpoint: Checkpoint) -> Positions:
    """Raises CheckpointError for a config without rotary embeddings, PatchError for one that no engine gets whole."""
    section = section_of(checkpoint.config)
    ropes, settings = effective_ropes(checkpoint)
    written = _written(section, ropes)
    # as inspect does: the layers that were scaled are those that see the whole context
    rope = max(ropes.values(), key=lambda one: (one.spec.factor, one.geometry.layer_type == "full_attention"))
    native = {label: native_parameters(one, settings.family) for label, one in ropes.items()}
    parameters = {
        label: {**native[label], **_kept(ropes[label], own, section)} if label in ropes else None
        for label, own in written.items()
    }
    _refuse(checkpoint.name, written, parameters)
    tokenizer = (checkpoint.tokenizer_config or {}).get("model_max_length")
    return Positions(
        checkpoint=str(demo.FOLDER) if checkpoint.name == demo.NAME else checkpoint.name,
        model_type=str(checkpoint.config.get("model_type")),
        section=None if section is checkpoint.config else "text_config",
        parameters=parameters,
        written=written[rope.geometry.layer_type],
        rope=rope,
        window=_window(rope, native[rope.geometry.layer_type]["rope_type"], settings.max_position_embeddings),
        written_window=settings.max_position_embeddings,
        window_key=next((key for key in WINDOW_KEYS if section.get(key) is not None), WINDOW_KEYS[0]),
        tokenizer_window=tokenizer if isinstance(tokenizer, int | float) else None,
        latent=section.get("qk_rope_head_dim") is not None,
        warnings=settings.warnings,
    )


def _written(section: dict[str, Any], ropes: Mapping[str | None, ScaledRope]) -> dict[str | None, Parameters]:
    """What config.json holds itself, by layer type; one entry under None where all layers share it."""
    new, legacy = mapping(section, "rope_parameters"), mapping(section, "rope_scaling")
    if None in ropes:
        return {None: {**new, **legacy}}
    without_positions = [label for label, value in new.items() if value is None]
    return {label: new.get(label or "") or legacy for label in [*ropes, *without_positions]}


def _kept(rope: ScaledRope, written: Parameters, section: dict[str, Any]) -> Parameters:
    """What config.json has there that is no scaling: the share that turns, the sections of multimodal positions."""
    kept = {key: value for key, value in written.items() if key not in _SCALING_KEYS}
    width, turning = rope.geometry.head_dim, rope.geometry.rotary_dim
    if turning != width:
        kept.setdefault("partial_rotary_factor", first(section, PARTIAL_KEYS) or turning / width)
    return kept


def _window(rope: ScaledRope, rope_type: str, written: int) -> int:
    """Tokens that the rope reaches. dynamic leaves its window out of config.json, and many configs that were scaled
    by hand do; linear alone does not say whether the window there is the pretraining one, so there it counts."""
    original = rope.geometry.original_max_position_embeddings
    reach = round(original * rope.spec.factor)
    if rope_type == "dynamic":
        return reach
    return written if rope_type == "linear" and original == written else max(written, reach)


def _refuse(name: str, written: Mapping[Any, Parameters], parameters: Mapping[Any, Parameters | None]) -> None:
    if any(one.get("mscale_all_dim") for one in written.values()):
        raise PatchError(
            f"{name} carries mscale_all_dim, which also multiplies the softmax scale (DeepSeek). Engines read that "
            "pair from config.json themselves, each in its own way, and overrides would break it: give the engine "
            "the folder as it is."
        )
    for rope_type in sorted({one["rope_type"] for one in parameters.values() if one} - set(ROPE_TYPES)):
        raise PatchError(
            f"{name} has rope_type {rope_type!r}, which no engine was read for; read were {', '.join(ROPE_TYPES)}. "
            "Give the engine the folder as it is, and compare a long answer with transformers."
        )
