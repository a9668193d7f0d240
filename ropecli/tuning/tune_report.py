"""The report of a tuning run, as plain values. Loads no model library."""

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Interval, Len

from ropecli.checkpoint.files import FACTORS, TUNING
from ropecli.evaluation.eval_report import Factor
from ropecli.evaluation.results import Amount, Count, TokenCount
from ropecli.scaling.spec import label_of

if TYPE_CHECKING:
    from ropecli.checkpoint.patch_plan import PatchPlan

SCHEMA_VERSION = 1
LEVELS = ("grid", "heads", "lora", "search")
TRAINING = ("heads", "lora")
"""The levels that change weights."""
Loss = Annotated[float, Ge(0)]
"""Nats; infinite where the model overflowed."""
Frequencies = Annotated[list[Annotated[float, Interval(ge=0, le=1e6)]], Len(1, 4096)]
Matrix = Annotated[list[list[Annotated[float, Interval(ge=-50, le=50)]]], Len(0, 4096)]


@dataclass(frozen=True)
class Score:
    """The loss on some documents.

    target, window: mean nats per token of the same tokens, read at the target and at the pretraining length. objective:
    target + short_weight × window, the smaller the better. documents: their number.
    """

    target: Loss
    window: Loss
    objective: Loss
    documents: Count


@dataclass(frozen=True)
class Point:
    """One measurement.

    level: grid, heads, lora or search. step: for a training level, the updates so far; for a search, the iteration.
    learned: the number of trained parameters. seconds: with the updates before it.
    """

    level: str
    method: str
    factor: Factor
    params: dict[str, Any]
    score: Score
    seconds: Amount
    step: Count = 0
    learned: Count = 0

    @classmethod
    def of(cls, plan: "PatchPlan", score: Score, seconds: float, level: str = "grid", **others: Any) -> "Point":
        return cls(level, plan.spec.method.name, plan.spec.factor, dict(plan.spec.params), score, seconds, **others)

    @property
    def label(self) -> str:
        return label_of(self.method, self.factor, self.params)


@dataclass(frozen=True)
class LayerGains:
    """The learned gains of one layer.

    name: of the module that gives its queries. log_gain, phase (radians): by head and rotary pair; one row where all
    heads share a norm, and phase is then empty.
    """

    name: str
    log_gain: Annotated[Matrix, Len(1)]
    phase: Matrix


@dataclass(frozen=True)
class TuneReport:
    """One run of `ropecli tune`.

    source, fingerprint: of the calibration data. Scores, all on the same documents: base, the checkpoint as pretrained;
    plain, the method that plain_name says, with its default constants; begun, the best constants; score, the result.
    method, params, inv_freq, attention_factor: of the result. points: every measurement. inv_freq, pretrained_inv_freq:
    radians per token. rounding: the change of a logit when the weights are rounded to the dtype of the files, relative
    to the largest. seconds: of all points, in whichever run they were measured.
    """

    checkpoint: str
    digest: str
    level: str
    factor: Factor
    original_max_position_embeddings: TokenCount
    target_length: TokenCount
    source: str
    fingerprint: str
    dtype: str
    device: str
    command: list[str]
    settings: dict[str, Any]
    method: str
    params: dict[str, Any]
    attention_factor: Factor
    inv_freq: Frequencies
    pretrained_inv_freq: Frequencies
    base: Score
    plain: Score
    begun: Score
    score: Score
    learned: Count
    step: Count
    rounding: Amount
    seconds: Amount
    points: Annotated[list[Point], Len(1, 100_000)]
    gains: list[LayerGains] = field(default_factory=list)
    log_temperature: Annotated[float, Interval(ge=-50, le=50)] = 0.0
    plain_name: str = "nothing tuned"
    environment: dict[str, str] = field(default_factory=dict)
    kind: str = "tune"
    schema_version: int = SCHEMA_VERSION

    @property
    def label(self) -> str:
        return label_of(self.method, self.factor, self.params)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def files_of(report: TuneReport) -> dict[str, Any]:
    """The JSON files to write beside the weights, by name: the report, and factors for `--factors-file`."""
    files: dict[str, Any] = {TUNING: _finite(report.as_json())}
    if report.level == "search":
        files[FACTORS] = {"long_factor": report.params["long_factor"]}
    return files


def notes_of(report: TuneReport) -> dict[str, Any]:
    """The run's record in ropecli.yaml."""
    return {
        "checkpoint": report.checkpoint,
        "level": report.level,
        "scaling": report.label,
        "data": report.source,
        "fingerprint": report.fingerprint,
        "seed": report.settings["seed"],
        "points": len(report.points),
        "steps": report.step,
        "learned": report.learned,
    }


def _finite(value: Any) -> Any:
    """Replaces infinities by null: JSON has none, and a loss may overflow."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
