"""The points and the report of a tuning run. Does not import torch or transformers."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Interval, Len

from ropecli.checkpoint.files import FACTORS, TUNING
from ropecli.errors import MethodError
from ropecli.evaluation.report import SCHEMA_VERSION, Positive
from ropecli.evaluation.statistics import Amount, Count, TokenCount
from ropecli.scaling.registry import find_method
from ropecli.scaling.spec import ScalingSpec, label_of
from ropecli.tuning.settings import TuneSettings as TuneSettings

Loss = Annotated[float, Ge(0)]
"""Nats; infinite if the model overflows."""
Frequencies = Annotated[list[Annotated[float, Interval(ge=0, le=1e6)]], Len(1, 4096)]
Matrix = Annotated[list[list[Annotated[float, Interval(ge=-50, le=50)]]], Len(0, 4096)]
Measure = Callable[[ScalingSpec, int, int], float]
"""Takes a scaling, a number of documents and the iteration of the search. Returns the loss."""


def refuse_untunable(settings: TuneSettings) -> None:
    """Raise MethodError for a method without one frequency table for all lengths."""
    for method in map(find_method, settings["methods"]):
        if method.remaps or method.depends_on_length:
            raise MethodError(
                f"{method.name} cannot be tuned; expected a method with one frequency table for all lengths, such as "
                "yarn, ntk, abf or llama3."
            )


@dataclass(frozen=True)
class Score:
    """The loss on some documents.

    target, pretraining: mean loss of the same last tokens, nats, at the target and at the pretraining length.
    objective, lower is better: target + short_weight × pretraining. documents: number of documents.
    """

    target: Loss
    pretraining: Loss
    objective: Loss
    documents: Count


@dataclass(frozen=True)
class Point:
    """One measurement.

    step: number of updates so far; for the level search, the iteration. learned: number of trained parameters. seconds:
    time of the measurement and the updates before it.
    """

    level: str
    method: str
    factor: Positive
    params: dict[str, Any]
    score: Score
    seconds: Amount
    step: Count = 0
    learned: Count = 0

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

    source, fingerprint: calibration data. Scores, all on the same documents: base, the pretrained checkpoint; untuned,
    the method in untuned_name with default constants; start, the best constants, before training; score, the result.
    method, params, inv_freq, attention_factor: the result. points: every measurement. inv_freq, pretrained_inv_freq:
    radians per token. rounding: change of the logits when the weights are rounded to the dtype of the files, over the
    largest logit. seconds: total of all points, including earlier runs.
    """

    checkpoint: str
    digest: str
    level: str
    factor: Positive
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
    attention_factor: Positive
    inv_freq: Frequencies
    pretrained_inv_freq: Frequencies
    base: Score
    untuned: Score
    start: Score
    score: Score
    learned: Count
    step: Count
    rounding: Amount
    seconds: Amount
    points: Annotated[list[Point], Len(1, 100_000)]
    gains: list[LayerGains] = field(default_factory=list)
    log_temperature: Annotated[float, Interval(ge=-50, le=50)] = 0.0
    untuned_name: str = "nothing tuned"
    environment: dict[str, str] = field(default_factory=dict)
    kind: str = "tune"
    schema_version: int = SCHEMA_VERSION

    @property
    def label(self) -> str:
        return label_of(self.method, self.factor, self.params)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def files(self) -> dict[str, Any]:
        """The JSON files to write next to the weights, by name: the report, and factors for `--factors-file`."""
        # an infinite loss becomes null, because JSON has no infinity
        files = {TUNING: json.loads(json.dumps(self.as_json()), parse_constant=lambda name: None)}
        if self.level == "search":
            files[FACTORS] = {"long_factor": self.params["long_factor"]}
        return files
