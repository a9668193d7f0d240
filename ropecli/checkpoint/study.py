"""A checkpoint's rotary embedding as pretrained, and by several methods: what theory compares. Touches no weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from ropecli.checkpoint.facts import gather
from ropecli.checkpoint.plan import effective_ropes, main_rope, make_plan
from ropecli.checkpoint.reading import Checkpoint
from ropecli.rope import RopeGeometry, ScaledRope, ScalingSpec

PRETRAINED = "pretrained"


@dataclass(frozen=True)
class Study:
    """ropes: by name, the pretrained one first, of the layers that see the whole context. target: tokens."""

    checkpoint: str
    target: int
    ropes: dict[str, ScaledRope]
    warnings: tuple[str, ...] = ()

    @property
    def geometry(self) -> RopeGeometry:
        return self.ropes[PRETRAINED].geometry

    @property
    def window(self) -> int:
        """The pretraining window, tokens."""
        return self.geometry.original_max_position_embeddings


def make_study(
    checkpoint: Checkpoint, specs: Sequence[ScalingSpec | None] = (None,), original_length: int | None = None
) -> Study:
    """By `specs`, None for the checkpoint as it is. Raises MethodError, CheckpointError.

    The target is the longest that any of them is for. original_length: the true pretraining window, where config.json
    names another; for methods alone.
    """
    ropes: dict[str, ScaledRope] = {}
    warnings: list[str] = []
    target = 0
    for spec in specs:
        if spec is None:
            rope, own, reach = _as_it_is(checkpoint)
            name = f"{_named(rope)}, as it is"
        else:
            plan = make_plan(checkpoint, spec, original_length=original_length)
            rope, reach = plan.ropes[plan.scaled[0]], plan.target_length
            own, name = (*plan.settings_warnings, *plan.scaling_warnings), _named(rope)
        if rope.spec.method != "none":
            ropes[name] = rope
        target, warnings = max(target, reach), [*warnings, *own]
        unscaled = ScaledRope(rope.geometry, ScalingSpec("none"), rope.geometry.inv_freq())
    return Study(checkpoint.name, target, {PRETRAINED: unscaled, **ropes}, tuple(dict.fromkeys(warnings)))


def _as_it_is(checkpoint: Checkpoint) -> tuple[ScaledRope, Sequence[str], int]:
    """Its rope, what its config leaves open, and the window in effect."""
    ropes, settings = effective_ropes(checkpoint)
    rope = main_rope(ropes, settings)
    return rope, settings.warnings, gather(checkpoint, settings, rope).target


def _named(rope: ScaledRope) -> str:
    return f"{rope.spec.method} ×{rope.spec.factor:g}"
