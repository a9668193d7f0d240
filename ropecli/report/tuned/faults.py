"""What a tuning report may not hold though its values are of the right types: it could not be drawn."""

import math
from collections.abc import Sequence

from ropecli.errors import shown
from ropecli.tune.record import LayerGains, Point, Score, TuneReport

_MOST_POINTS = 100_000
_MOST_LAYERS = 1000
_MOST_SIDE = 4096
"""Heads of a layer, and pairs."""
_LONGEST = 10**12
"""Tokens, numbers learned, steps; and seconds."""
_LARGEST_NLL = 700.0
"""exp of more overflows a float64."""
_LARGEST_GAIN = 50.0
"""Of a log gain, a phase, a log temperature."""
_LEAST_FREQUENCY, _LARGEST_FREQUENCY = 1e-60, 1e6
"""Radians per token, of a pair that turns."""


def faults_of_tuning(report: TuneReport) -> list[str]:
    """In words, in the report's order."""
    faults = _faults_of_numbers(report)
    faults += _faults_of_frequencies(report)
    for name, score in (("base", report.base), ("plain", report.plain)):
        faults += [f"{name}: {fault}" for fault in _faults_of_score(score)]
    for name, score in (("begun", report.begun), ("score", report.score)):
        faults += [f"{name}: {fault}" for fault in _faults_of_score(score, finite=True)]
    if not 0 < len(report.points) <= _MOST_POINTS:
        return [*faults, f"it has {len(report.points)} points; 1 to {_MOST_POINTS} were expected"]
    for index, point in enumerate(report.points, 1):
        faults += [f"point {index}: {fault}" for fault in _faults_of_point(point)]
    return faults + _faults_of_gains(report.gains)


def _faults_of_numbers(report: TuneReport) -> list[str]:
    window, target = report.original_max_position_embeddings, report.target_length
    checks = {
        "factor must be at least 1": 1 <= report.factor <= _LONGEST,
        "original_max_position_embeddings is no number of tokens": 0 < window <= _LONGEST,
        "target_length is no number of tokens": 0 < target <= _LONGEST,
        "attention_factor must be above 0": 0 < report.attention_factor <= _LONGEST,
        "learned and step must not be negative": 0 <= report.learned <= _LONGEST and 0 <= report.step <= _LONGEST,
        "rounding and seconds must not be negative": report.rounding >= 0 and 0 <= report.seconds <= _LONGEST,
        f"log_temperature must be within ±{_LARGEST_GAIN:g}": abs(report.log_temperature) <= _LARGEST_GAIN,
    }
    return [fault for fault, passed in checks.items() if not passed]


def _faults_of_frequencies(report: TuneReport) -> list[str]:
    faults = []
    if not 0 < len(report.inv_freq) <= _MOST_SIDE or len(report.inv_freq) != len(report.pretrained_inv_freq):
        faults.append(
            f"inv_freq has {len(report.inv_freq)} pairs and pretrained_inv_freq {len(report.pretrained_inv_freq)}; as "
            f"many were expected, from 1 to {_MOST_SIDE}"
        )
    for name in ("inv_freq", "pretrained_inv_freq"):
        values = getattr(report, name)
        if not all(value == 0 or _LEAST_FREQUENCY <= value <= _LARGEST_FREQUENCY for value in values):
            faults.append(f"{name} holds what is no frequency in radians per token")
    return faults


def _faults_of_score(score: Score, finite: bool = False) -> list[str]:
    """finite: whether the model may not have overflowed."""
    losses = (score.target, score.window)
    checks = {
        "it is infinite": not finite or all(map(math.isfinite, (*losses, score.objective))),
        f"a loss must be from 0 to {_LARGEST_NLL:g} nats": all(
            0 <= loss <= _LARGEST_NLL or loss == math.inf for loss in losses
        ),
        "objective must not be below target": score.objective >= score.target - 1e-6 and score.objective != -math.inf,
        "objective must be a number of nats": score.objective <= _LONGEST or score.objective == math.inf,
        "documents must be above 0": 0 < score.documents <= _LONGEST
        or (score.documents == 0 and score.objective == math.inf),
    }
    return [fault for fault, passed in checks.items() if not passed]


def _faults_of_point(point: Point) -> list[str]:
    faults = _faults_of_score(point.score)
    if not (0 <= point.seconds <= _LONGEST and 0 <= point.step <= _LONGEST and 0 <= point.learned <= _LONGEST):
        faults.append("seconds, step and learned must not be negative")
    if not 1 <= point.factor <= _LONGEST:
        faults.append("factor must be at least 1")
    return faults


def _faults_of_gains(gains: Sequence[LayerGains]) -> list[str]:
    if len(gains) > _MOST_LAYERS:
        return [f"it has gains of {len(gains)} layers; at most {_MOST_LAYERS} were expected"]
    return [f"gains of {shown(layer.name)}: {fault}" for layer in gains for fault in _faults_of_layer(layer)]


def _faults_of_layer(layer: LayerGains) -> list[str]:
    faults = []
    shape = _shape(layer.log_gain)
    if shape is None or not (0 < shape[0] <= _MOST_SIDE and 0 < shape[1] <= _MOST_SIDE):
        faults.append("log_gain must hold as many pairs for every head")
    # without heads, or with heads that have no pairs: nothing was learned
    if any(layer.phase) and _shape(layer.phase) != shape:
        faults.append("phase must be empty, or as log_gain is")
    values = (value for rows in (layer.log_gain, layer.phase) for row in rows for value in row)
    if not all(abs(value) <= _LARGEST_GAIN for value in values):
        faults.append(f"log_gain and phase must be within ±{_LARGEST_GAIN:g}")
    return faults


def _shape(rows: Sequence[Sequence[float]]) -> tuple[int, int] | None:
    """(heads, pairs); None where the heads differ."""
    widths = {len(row) for row in rows}
    return (len(rows), widths.pop()) if len(widths) == 1 else None
