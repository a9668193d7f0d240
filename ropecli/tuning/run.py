"""What the levels of tuning share: the settings, a run's parts, how a plan is tried, and how what was learned ends."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropecli.attention.patching import live_patch, unpatched_after
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.errors import MethodError, NotFiniteError
from ropecli.rope import RopeGeometry
from ropecli.scaling.spec import ScalingSpec, make_spec
from ropecli.tuning.folding import find_stored
from ropecli.tuning.judge import Judge
from ropecli.tuning.proof import Logits, difference, in_float32, logits_of, refuse_other
from ropecli.tuning.record import LayerGains, Point, Score
from ropecli.tuning.request import refuse_unknown_level
from ropecli.tuning.training import Learned, Schedule, learn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBED = 64
"""Tokens whose logits the written checkpoint must give."""


@dataclass(frozen=True)
class Evolution:
    """The sizes of LongRoPE's search, as published (arXiv:2402.13753, section 4 and appendix A). documents: read for
    each, our choice. Raises MethodError.
    """

    population: int = 64
    iterations: int = 40
    mutations: int = 16
    crossovers: int = 16
    parents: int = 32
    documents: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 1 if name in ("population", "parents", "documents") else 0
            if value < least:
                raise MethodError(f"The search's {name} are {value}; they must be at least {least}.")


@dataclass(frozen=True)
class Settings:
    """level: grid, heads, lora or search. methods: whose constants are searched; points: how many in all.

    rank: of LoRA's matrices. schedule: of what learns. evolution: of the evolutionary search. original_length: the true
    pretraining window, tokens, where config.json names another. Raises MethodError.
    """

    level: str = "heads"
    methods: tuple[str, ...] = ("yarn",)
    points: int = 24
    rank: int = 4
    schedule: Schedule = field(default_factory=Schedule)
    evolution: Evolution = field(default_factory=Evolution)
    seed: int = 0
    original_length: int | None = None

    def __post_init__(self) -> None:
        refuse_unknown_level(self.level)
        if not 1 <= self.rank <= 8:
            raise MethodError(f"--rank is {self.rank}; it must be from 1 to 8. Larger ones are for `ropecli finetune`.")
        if not 1 <= len(self.methods) <= self.points:
            raise MethodError(f"--points is {self.points} for {len(self.methods)} methods; each needs one at least.")

    def plan(self, checkpoint: Checkpoint, spec: ScalingSpec) -> PatchPlan:
        """The patch by a spec. Raises as make_plan does."""
        return make_plan(checkpoint, spec, original_length=self.original_length)

    def geometry(self, checkpoint: Checkpoint) -> RopeGeometry:
        """Of the layers that a plan scales, before any scaling. Raises PatchError."""
        plan = self.plan(checkpoint, make_spec("none"))
        return plan.ropes[plan.scaled[0]].geometry


@dataclass(frozen=True)
class Run:
    """sequences: token ids to learn from, shape (sequences, target). state: a file for how far a level came; None: kept
    nowhere. on_point: told of every measurement.
    """

    checkpoint: Checkpoint
    model: "PreTrainedModel"
    factor: float
    judge: Judge
    sequences: Tensor
    settings: Settings
    state: Path | None = None
    on_point: Callable[[Point], None] = lambda point: None


@dataclass(frozen=True)
class Tuned:
    """plan: the patch. score: the judge's, of the tuned model; begun: of the plan alone. probe, logits: tokens, shape
    (1, tokens), and what the written checkpoint must make of them. changed: weights to be written beside the patch, by
    their names in the files and in their dtype there; empty where constants alone were found.
    learned: how many numbers. step: after how many updates. rounding: by how much a logit moves when the weights are
    rounded to the files' dtype. gains, log_temperature: what the level heads learned.
    """

    plan: PatchPlan
    begun: Score
    score: Score
    probe: Tensor
    logits: Logits
    changed: Mapping[str, Tensor] = field(default_factory=dict)
    learned: int = 0
    step: int = 0
    rounding: float = 0.0
    gains: tuple[LayerGains, ...] = ()
    log_temperature: float = 0.0


def try_plan(run: Run, plan: PatchPlan, part: str, count: int, **others: Any) -> float:
    """The objective of a plan on the judge's first `count` documents; infinite where a loss is not finite.

    others: of the Point that on_point is told. The model is left as it was.
    """
    begun = time.perf_counter()
    with unpatched_after(run.model):
        live_patch(run.model, plan.ropes)
        try:
            score = run.judge.score(run.model, part, count)
        except NotFiniteError:
            score = Score(math.inf, math.inf, math.inf, count)
    run.on_point(Point.of(plan, score, time.perf_counter() - begun, **others))
    return score.objective


def train(
    run: Run, plan: PatchPlan, begun: Score, groups: Sequence[Sequence[torch.nn.Parameter]], rates: tuple[float, ...]
) -> tuple[Learned, Logits]:
    """Learns the groups of parameters at these rates; and the logits that the model then gives for the probe, in
    float32 where it can.
    """
    level, learned = run.settings.level, sum(one.numel() for group in groups for one in group)

    def look(step: int, score: Score, seconds: float) -> None:
        run.on_point(Point.of(plan, score, seconds, level, step=step, learned=learned))

    best = learn(
        run.model,
        groups,
        run.sequences,
        run.judge,
        replace(run.settings.schedule, rates=rates),
        name=level,
        begun=begun,
        state=run.state,
        on_look=look,
    )
    probe = probe_of(run)
    with in_float32(run.model, probe):
        return replace(best, numbers=learned), logits_of(run.model, probe)


def finish(run: Run, plan: PatchPlan, begun: Score) -> Tuned:
    """What is found by constants alone."""
    probe = probe_of(run)
    return Tuned(plan, begun, begun, probe, logits_of(run.model, probe))


def finish_learned(
    run: Run, plan: PatchPlan, begun: Score, best: Learned, live: Logits, folded: Mapping[str, Tensor], **others: Any
) -> Tuned:
    """Puts the folded weights into the model, and proves that it is the one that was tuned.

    live: its logits of the probe before, of `train`. folded: parameters by their names in the model. others: of Tuned,
    where anything was learned. Raises ProofError, PatchError for a weight that the files do not hold.
    """
    probe, rounding = probe_of(run), 0.0
    changed: dict[str, Tensor] = {}
    if best.step:  # without an update nothing is to be written
        stored = find_stored(run.checkpoint, run.model, folded)
        changed = {one.name: folded[name].to(one.dtype) for name, one in stored.items()}
        rounded = {name: changed[one.name] for name, one in stored.items()}
        with in_float32(run.model, probe):
            put(run.model, folded)
            exact = logits_of(run.model, probe)
            refuse_other(exact, live, "The folded weights give")
            put(run.model, rounded)
            rounding = difference(logits_of(run.model, probe), exact)
        put(run.model, rounded)
    return Tuned(
        plan,
        begun,
        best.score,
        probe,
        logits_of(run.model, probe),
        changed=changed,
        learned=best.numbers if best.step else 0,
        step=best.step,
        rounding=rounding,
        **(others if best.step else {}),
    )


def probe_of(run: Run) -> Tensor:
    """Tokens of the first document that the judge reads."""
    return torch.from_numpy(run.judge.documents.kept[0].ids[:_PROBED])[None]


@torch.no_grad()
def put(model: "PreTrainedModel", values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        model.get_parameter(name).copy_(value)
