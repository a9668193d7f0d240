"""A checkpoint's rotary embedding as pretrained, and by several methods: what theory compares. Touches no weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ropecli.analysis.base_bound import LONGEST
from ropecli.analysis.summary import summarize
from ropecli.analysis.support import support_of
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.state import read_state
from ropecli.errors import CheckpointError
from ropecli.rope import RopeGeometry, ScaledRope, ScalingSpec
from ropecli.scaling.registry import get_method, label_of

PRETRAINED = "pretrained"
_MOST_PAIRS = 1024
"""Several times what any model has. The score takes an array of distances and pairs: more would fill the memory."""


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
            state = read_state(checkpoint)
            rope, own, reach = state.main, state.warnings, state.context_length
            name = f"{_named(rope)}, as it is"
        else:
            plan = make_plan(checkpoint, spec, original_length=original_length)
            rope, own, reach = plan.ropes[plan.scaled[0]], plan.scaling_warnings, plan.target_length
            name = _named(rope)
        if rope.spec.method != "none":
            ropes[name] = rope
        _refuse_many_pairs(checkpoint, rope.geometry)
        target, warnings = max(target, reach), [*warnings, *own]
        unscaled = ScaledRope(rope.geometry, ScalingSpec("none"), rope.geometry.inv_freq())
    return Study(checkpoint.name, target, {PRETRAINED: unscaled, **ropes}, tuple(dict.fromkeys(warnings)))


def _refuse_many_pairs(checkpoint: Checkpoint, geometry: RopeGeometry) -> None:
    pairs = geometry.rotary_dim // 2
    if pairs > _MOST_PAIRS:
        raise CheckpointError(
            f"{checkpoint.name} has {pairs} rotary pairs in a head; theory looks at {_MOST_PAIRS} at most. Is head_dim "
            "in config.json what the model was trained with?"
        )


def study_report(study: Study) -> dict[str, Any]:
    """The report of `ropecli theory`: what summarize() says of every rope, with its method in YaRN's general form.

    supported_length: tokens up to which the pretrained frequencies have no negative score, null for more than are
    looked at. smallest_base: of the pretrained geometry for the target; infinite where none would do, null for
    targets above base_bound.LONGEST.
    """
    bound = support_of(study.ropes[PRETRAINED], study.target, LONGEST, always=True)
    return {
        "checkpoint": study.checkpoint,
        "original_max_position_embeddings": study.window,
        "target_length": study.target,
        "supported_length": bound.supported,
        "smallest_base": bound.smallest_base,
        "ropes": [_describe(name, rope, study.target) for name, rope in study.ropes.items()],
        "warnings": list(study.warnings),
    }


def _describe(name: str, rope: ScaledRope, target: int) -> dict[str, Any]:
    method = get_method(rope.spec.method)
    form = {"g": method.g, "h": method.h, "interpolation": method.interpolation}
    return {"name": name, **form, **summarize(rope, target)}


def _named(rope: ScaledRope) -> str:
    return label_of(rope.spec.method, rope.spec.factor, rope.spec.params)
