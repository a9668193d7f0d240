"""The report of a tuning: put together, and as what lies in the folder that was written."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ropecli.checkpoint.files import FACTORS, TUNING
from ropecli.evaluation.eval_report import environment
from ropecli.tuning.record import Point, Score, TuneReport
from ropecli.tuning.run import Tuned


def make_report(
    tuned: Tuned,
    *,
    source: str,
    fingerprint: str,
    settings: Mapping[str, Any],
    command: Sequence[str],
    device: str,
    dtype: str,
    base: Score,
    plain: Score,
    plain_name: str,
    points: Sequence[Point],
) -> TuneReport:
    """Seconds are of all points together, in whichever run they were measured."""
    plan = tuned.plan
    rope = plan.ropes[plan.scaled[0]]
    return TuneReport(
        checkpoint=plan.source.name,
        digest=plan.source.digest(),
        level=str(settings["level"]),
        factor=plan.spec.factor,
        original_max_position_embeddings=rope.geometry.original_max_position_embeddings,
        target_length=plan.target_length,
        source=source,
        fingerprint=fingerprint,
        dtype=dtype,
        device=device,
        command=list(command),
        settings=dict(settings),
        method=plan.spec.method.name,
        params=dict(plan.spec.params),
        attention_factor=float(rope.attention_factor),
        inv_freq=rope.inv_freq.tolist(),
        pretrained_inv_freq=rope.geometry.inv_freq().tolist(),
        base=base,
        plain=plain,
        plain_name=plain_name,
        begun=tuned.begun,
        score=tuned.score,
        learned=tuned.learned,
        step=tuned.step,
        rounding=tuned.rounding,
        seconds=sum(point.seconds for point in points),
        points=list(points),
        gains=list(tuned.gains),
        log_temperature=tuned.log_temperature,
        environment=environment(),
    )


def files_of(report: TuneReport) -> dict[str, Any]:
    """By name, the JSON that lies beside the weights: the report, and factors for `--factors-file`."""
    files: dict[str, Any] = {TUNING: _finite(report.as_json())}
    if report.level == "search":
        files[FACTORS] = {"long_factor": report.params["long_factor"]}
    return files


def notes_of(report: TuneReport) -> dict[str, Any]:
    """For ropecli.yaml."""
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
    """JSON has no infinities, which a point has whose loss was not finite: null stands for them."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
