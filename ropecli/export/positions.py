"""A checkpoint's positions as an engine gets to know them: the written parameters, by layer type, and the window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropecli import demo
from ropecli.checkpoint.dialects import KEPT_KEYS, PARTIAL_KEYS, WINDOW, Parameters, parameters_by_layer_type
from ropecli.checkpoint.encoding import native_parameters
from ropecli.checkpoint.facts import gather
from ropecli.checkpoint.families import Family
from ropecli.checkpoint.fields import first
from ropecli.checkpoint.plan import effective_ropes, main_rope
from ropecli.checkpoint.reading import Checkpoint, section_of
from ropecli.errors import PatchError
from ropecli.rope import ScaledRope
from ropecli.scaling.longrope import longrope_attention_factor

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
"""What the engines' files know. Others are refused."""
_DEFAULT_REVISION = "main"  # where everyone starts, so that nobody has to be told


@dataclass(frozen=True)
class Positions:
    """What the engines' files work from.

    checkpoint: what a command line calls it, a folder or a Hub id; on_hub: the latter; revision: of the Hub id, None
    where it is the one that everybody takes. section: the part of config.json that holds the RoPE fields, None for
    all of it; fields: that part. parameters: `rope_parameters` with a base each, by layer type (None where all layers
    share them). rope: the one that sees the whole context; written: what config.json itself holds of it. window:
    tokens that it reaches; written_window: what config.json says of that, under window_key. latent: multi-head latent
    attention. warnings: what config.json leaves open, in sentences.
    """

    checkpoint: str
    on_hub: bool
    revision: str | None
    model_type: str
    family: Family
    section: str | None
    fields: Mapping[str, Any]
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
    def others(self) -> list[Parameters]:
        """Those of the layer types that turn otherwise than `rope`."""
        label = self.rope.geometry.layer_type
        return [one for key, one in self.parameters.items() if key != label and one]

    @property
    def scaled(self) -> list[Parameters]:
        """Those that scale, of `rope` first."""
        return [one for one in (self.main, *self.others) if one["rope_type"] != "default"]

    @property
    def rope_type(self) -> str:
        return self.main["rope_type"]

    @property
    def at_revision(self) -> tuple[str, ...]:
        """What follows the checkpoint's name on a command line."""
        return () if self.revision is None else ("--revision", self.revision)

    @property
    def original_window(self) -> int:
        """The pretraining window, tokens."""
        return self.rope.geometry.original_max_position_embeddings

    @property
    def factor(self) -> float:
        return float(self.main.get("factor", 1.0))

    @property
    def usual_longrope_attention_factor(self) -> float:
        """By the windows in config.json: where nothing else says, readers take this."""
        return longrope_attention_factor(self.written_window / self.original_window, self.original_window)

    def in_section(self, overrides: dict[str, Any]) -> dict[str, Any]:
        """`overrides` at the place of config.json where the RoPE fields are."""
        return overrides if self.section is None else {self.section: overrides}


def read_positions(checkpoint: Checkpoint) -> Positions:
    """Raises CheckpointError for a config without rotary embeddings, PatchError for one that no engine gets whole."""
    section = section_of(checkpoint.config)
    ropes, settings = effective_ropes(checkpoint)
    rope = main_rope(ropes, settings)
    window = gather(checkpoint, settings, rope).target
    written = parameters_by_layer_type(section, settings.family, [])
    parameters = {
        label: _parameters(ropes[label], own or {}, section, settings.family, window) if label in ropes else None
        for label, own in written.items()
    }
    _refuse(checkpoint.name, written, parameters)
    if rope.remapping is not None:
        raise PatchError(
            f"{checkpoint.name} attends by {rope.spec.method}, in whose place an engine would run plain attention. "
            "Read it with transformers, after `import ropecli`."
        )
    tokenizer = (checkpoint.tokenizer_config or {}).get("model_max_length")
    names = settings.family.names_of(WINDOW)
    return Positions(
        checkpoint=str(demo.FOLDER) if checkpoint.name == demo.NAME else checkpoint.name,
        on_hub=checkpoint.commit is not None,
        revision=None if checkpoint.revision == _DEFAULT_REVISION else checkpoint.revision,
        model_type=str(checkpoint.config.get("model_type")),
        family=settings.family,
        section=None if section is checkpoint.config else "text_config",
        fields=section,
        parameters=parameters,
        written=written[rope.geometry.layer_type] or {},
        rope=rope,
        window=window,
        written_window=settings.max_position_embeddings,
        window_key=next((name for name in names if section.get(name) is not None), names[0]),
        tokenizer_window=tokenizer if isinstance(tokenizer, int | float) else None,
        latent=section.get("qk_rope_head_dim") is not None,
        warnings=settings.warnings,
    )


def _parameters(
    rope: ScaledRope, written: Parameters, section: dict[str, Any], family: Family, window: int
) -> Parameters:
    """What makes the rope's frequencies, and what config.json has there that is no scaling."""
    kept = {key: value for key, value in written.items() if key in KEPT_KEYS}
    if "max_position_embeddings" in kept:  # a copy that Ministral's config keeps there
        kept["max_position_embeddings"] = window
    width, turning = rope.geometry.head_dim, rope.geometry.rotary_dim
    if turning != width:
        kept.setdefault("partial_rotary_factor", first(section, PARTIAL_KEYS) or turning / width)
    elif rope.geometry.still_pairs:  # native_parameters says which pairs stand still
        kept.pop("partial_rotary_factor", None)
    return {**native_parameters(rope, family, window), **kept}


def _refuse(name: str, written: Mapping[Any, Parameters | None], parameters: Mapping[Any, Parameters | None]) -> None:
    if any(one and one.get("mscale_all_dim") for one in written.values()):
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
