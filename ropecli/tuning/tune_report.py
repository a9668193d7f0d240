"""The report of a tuning run. Does not import torch or transformers."""

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Interval, Len

from ropecli.checkpoint.files import FACTORS, TUNING
from ropecli.evaluation.report import Factor
from ropecli.evaluation.statistics import Amount, Count, TokenCount
from ropecli.scaling.spec import label_of

if TYPE_CHECKING:
    from ropecli.checkpoint.patch_plan import PatchPlan

SCHEMA_VERSION = 1
LEVELS = ("grid", "heads", "lora", "search")
OBJECTIVES = ("ppl", "longppl", "needle")
TRAINING = ("heads", "lora")
"""The levels that change weights."""
Loss = Annotated[float, Ge(0)]
"""Nats; infinite if the model overflows."""
Frequencies = Annotated[list[Annotated[float, Interval(ge=0, le=1e6)]], Len(1, 4096)]
Matrix = Annotated[list[list[Annotated[float, Interval(ge=-50, le=50)]]], Len(0, 4096)]


@dataclass(frozen=True)
class Score:
    """The loss on some documents.

    target, window: mean loss, nats, at the target and at the pretraining length: of the same last tokens, or of the
    keys in needle prompts. For longppl, target is of the key tokens. objective: target + short_weight × window; lower
    is better. documents: number of documents.
    """

    target: Loss
    window: Loss
    objective: Loss
    documents: Count


@dataclass(frozen=True)
class Point:
    """One measurement.

    level: grid, heads, lora or search. step: number of updates so far; for the level search, the iteration. learned:
    number of trained parameters. seconds: time of the measurement and the updates before it.
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

    name: name of the module that produces the queries. log_gain, phase (radians): by head and rotary pair; for a shared
    norm, log_gain has one row and phase is empty.
    """

    name: str
    log_gain: Annotated[Matrix, Len(1)]
    phase: Matrix


@dataclass(frozen=True)
class TuneReport:
    """One run of `ropecli tune`.

    source, fingerprint: calibration data. Scores, all on the same documents: base, the pretrained checkpoint; plain,
    the method in plain_name with default constants; begun, the best constants; score, the result. method, params,
    inv_freq, attention_factor: the result. points: every measurement. inv_freq, pretrained_inv_freq: radians per token.
    rounding: change of the logits when the weights are rounded to the dtype of the files, relative to the largest
    logit. seconds: total of all points, including earlier runs.
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
    """The JSON files to write next to the weights, by name: the report, and factors for `--factors-file`."""
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
    """Replace infinite losses by null, because JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
