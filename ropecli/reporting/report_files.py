"""Reads reports from JSON. Files are untrusted: every value is validated before use."""

import json
import math
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.errors import DataError, reason_of, shown
from ropecli.evaluation.protocol_descriptions import PROTOCOLS
from ropecli.evaluation.report import SCHEMA_VERSION, Cell, Report, of_schema_2
from ropecli.evaluation.statistics import LARGEST_NLL
from ropecli.tuning.task import OLD_KEYS, TuneReport
from ropecli.tuning.task import SCHEMA_VERSION as TUNE_SCHEMA_VERSION

if TYPE_CHECKING:
    from pydantic import TypeAdapter

AnyReport = Report | TuneReport

_VERSIONS = {
    "perplexity": (2, SCHEMA_VERSION),
    "scores": (SCHEMA_VERSION,),
    "retrieval": (2,),
    "ruler": (2,),
    "tune": (TUNE_SCHEMA_VERSION,),
}
"""Supported schema versions of each kind."""
_LARGEST_FILE = 256 * 2**20
_MOST_FAULTS = 5
"""Listed in one message."""
_LARGEST_SUM, _LARGEST_PPL = 1e15, 1e305
_SCORE = {"target", "objective", "documents"}
"""Keys of a score in tune.json."""


def read_reports(paths: Iterable[Path]) -> list[AnyReport]:
    """Read the reports of all files, in order. A file contains one report, or a list as `compare` writes it.

    Raises DataError, which names the file and what was expected.
    """
    reports = [report for path in paths for report in _read_file(path)]
    if not reports:
        raise DataError("The files contain no reports.")
    return reports


def _read_file(path: Path) -> list[AnyReport]:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise DataError(
                f"{path} is {path.stat().st_size >> 20} MiB; reports can have up to {_LARGEST_FILE >> 20} MiB."
            )
        text = path.read_text(encoding="utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_constant, object_hook=_tuning_values)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)[:200]} is not a JSON report: {reason_of(error)}.") from error
    several = isinstance(value, list)
    values = value if several else [value]
    return [
        _read_one(f"{path}, report {index}" if several else f"{path}", report) for index, report in enumerate(values, 1)
    ]


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it contains {name}")


def _tuning_values(value: dict[str, Any]) -> dict[str, Any]:
    """In tune.json, give keys of release 0.2 their new names, and null in scores, which is an overflow, infinity."""
    is_score = value.keys() >= _SCORE
    if is_score or value.get("kind") == "tune":
        value = {**{new: value[old] for old, new in OLD_KEYS.items() if old in value}, **value}
    return {key: math.inf if is_score and item is None else item for key, item in value.items()}


def _read_one(where: str, value: Any) -> AnyReport:
    """where: names the file and the report in it, for messages."""
    from pydantic import ValidationError

    about = value if isinstance(value, dict) else {}
    kind, version = about.get("kind"), about.get("schema_version")
    # the first release wrote no kind
    known = _VERSIONS.get(kind, (SCHEMA_VERSION,)) if isinstance(kind, str) else (SCHEMA_VERSION,)
    if type(version) is int and version not in known:
        step = "update ropecli" if version > max(known) else "run the measurement again"
        expected = " and ".join(map(str, known))
        raise DataError(f"{where} has schema_version {shown(version)}, but this release reads {expected}; {step}.")
    if kind not in list(_VERSIONS) or version is None:
        raise DataError(
            f"{where} is not a report: its kind is {shown(kind)} and its schema_version {shown(version)}. "
            "Reports are written by `ropecli eval-ppl --output FILE`, `compare`, `passkey`, `needle`, `ruler`, `tune`."
        )
    for part in (about, about.get("baseline")):
        # the default would be this machine's versions
        if isinstance(part, dict) and "environment" not in part:
            raise DataError(f"{where} has no 'environment', the versions that it was computed with.")
    try:
        current = of_schema_2(about) if version == 2 else about
        report: AnyReport = _adapter(TuneReport if kind == "tune" else Report).validate_python(current)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"[:160] for fault in error.errors(include_url=False)
        ]
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        faults = [f"{type(error).__name__}: {reason_of(error)}"[:160]]
    else:
        faults = list(_tuning_faults(report) if isinstance(report, TuneReport) else _faults(report))
    if faults:
        more = f"; and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
        raise DataError(f"{where} is invalid: {'; '.join(faults[:_MOST_FAULTS])}{more}.")
    return report


@cache
def _adapter(form: type) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(form)


def _faults(report: Report) -> Iterator[str]:
    """Inconsistencies between fields."""
    scores, lengths = report.kind == "scores", [cell.length for cell in report.cells]
    if scores:
        if len({(cell.task, cell.depth, cell.length) for cell in report.cells}) < len(report.cells):
            yield "cells: a task appears twice at one length and depth"
        if not isinstance(report.settings.get("threshold", 0.0), int | float | None):
            yield "settings.threshold: not a number"
    else:
        if sorted(set(lengths)) != lengths:
            yield "cells: the lengths are not in ascending order"
        if report.task not in PROTOCOLS:
            yield f"task: {shown(report.task)} is not a protocol"
    for index, cell in enumerate(report.cells):
        yield from (f"cells.{index}: {fault}" for fault in _cell_faults(cell, scores=scores))
    if base := report.baseline:
        if (base.kind, base.task) != (report.kind, report.task) or base.baseline:
            yield f"baseline: its protocol, {shown(base.task)}, differs from the report's, or it has a baseline"
        else:
            yield from (f"baseline.{fault}" for fault in _faults(base))


def _cell_faults(cell: Cell, *, scores: bool) -> Iterator[str]:
    if len(cell.sums) != len(cell.weights) or not sum(cell.weights) > 0:
        yield "sums and weights have different lengths, or the weights are all 0"
    elif scores and not all(0 <= score <= 1 == weight for score, weight in zip(cell.sums, cell.weights, strict=True)):
        yield "a score is not from 0 to 1, or its weight is not 1"
    elif not scores and not (all(abs(loss) <= _LARGEST_SUM for loss in cell.sums) and -1 < cell.value < LARGEST_NLL):
        yield "the loss overflowed"
    elif not scores and not all(0.1 <= end <= _LARGEST_PPL for end in (cell.low, cell.high) if end is not None):
        yield "an end of the interval is not a perplexity"


def _tuning_faults(report: TuneReport) -> Iterator[str]:
    if max(report.score.target, report.score.pretraining, report.score.objective) >= LARGEST_NLL:
        yield "score: the result overflowed"
    if len(report.inv_freq) != len(report.pretrained_inv_freq):
        yield "inv_freq: length differs from pretrained_inv_freq"
    for layer in report.gains:
        phase = layer.phase if any(layer.phase) else layer.log_gain
        widths = {len(row) for row in (*layer.log_gain, *phase)}
        if len(widths) != 1 or 0 in widths or len(phase) != len(layer.log_gain):
            yield f"gains: {shown(layer.name)} has heads of different lengths"
