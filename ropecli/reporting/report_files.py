"""Reads reports from JSON. Files are untrusted: every value is validated before use."""

import json
import math
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.errors import DataError, reason_of, shown
from ropecli.evaluation.protocol_descriptions import PROTOCOLS
from ropecli.evaluation.report import SCHEMA_VERSION, EvalReport, RetrievalReport, RulerReport
from ropecli.reporting.cells import OVERFLOW
from ropecli.tuning.tune_report import SCHEMA_VERSION as TUNE_SCHEMA_VERSION
from ropecli.tuning.tune_report import LayerGains, TuneReport

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Report = EvalReport | RetrievalReport | RulerReport | TuneReport

_KINDS: dict[str, tuple[type, int]] = {
    "perplexity": (EvalReport, SCHEMA_VERSION),
    "retrieval": (RetrievalReport, SCHEMA_VERSION),
    "ruler": (RulerReport, SCHEMA_VERSION),
    "tune": (TuneReport, TUNE_SCHEMA_VERSION),
}
"""Class and supported schema version of each kind."""
_LARGEST_FILE = 256 * 2**20
_MOST_FAULTS = 5
"""Listed in one message."""
_SCORE = {"target", "window", "objective", "documents"}


def read_reports(paths: Iterable[Path]) -> list[Report]:
    """Read the reports of all files, in order. A file contains one report, or a list as `compare` writes it.

    Raises DataError, which names the file and what was expected.
    """
    reports = [report for path in paths for report in _read_file(path)]
    if not reports:
        raise DataError("The files contain no reports.")
    return reports


def _read_file(path: Path) -> list[Report]:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise DataError(
                f"{path} is {path.stat().st_size >> 20} MiB; reports can have up to {_LARGEST_FILE >> 20} MiB."
            )
        text = path.read_text(encoding="utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_constant, object_hook=_with_infinities)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)[:200]} is not a JSON report: {reason_of(error)}.") from error
    several = isinstance(value, list)
    values = value if several else [value]
    return [_read_one(f"{path}, report {index}" if several else f"{path}", one) for index, one in enumerate(values, 1)]


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it contains {name}")


def _with_infinities(value: dict[str, Any]) -> dict[str, Any]:
    """Replace null by infinity in scores: JSON has no infinity, and tuning reports write null for overflow."""
    if value.keys() != _SCORE:
        return value
    return {key: math.inf if one is None else one for key, one in value.items()}


def _read_one(where: str, value: Any) -> Report:
    """where: names the file and the report in it, for messages."""
    from pydantic import ValidationError

    about = value if isinstance(value, dict) else {}
    kind, version = about.get("kind"), about.get("schema_version")
    # the first release wrote no kind
    known = _KINDS[kind][1] if isinstance(kind, str) and kind in _KINDS else SCHEMA_VERSION
    if type(version) is int and version != known:
        step = "update ropecli" if version > known else "run the measurement again"
        raise DataError(f"{where} has schema_version {shown(version)}, but this release reads {known}; {step}.")
    if not isinstance(kind, str) or kind not in _KINDS or version is None:
        raise DataError(
            f"{where} is not a report: its kind is {shown(kind)} and its schema_version {shown(version)}. "
            "Reports are written by `ropecli eval-ppl --output FILE`, `compare`, `passkey`, `needle`, `ruler`, `tune`."
        )
    for one in (about, about.get("baseline")):
        # the default would be this machine's versions
        if isinstance(one, dict) and "environment" not in one:
            raise DataError(f"{where} has no 'environment', the versions that it was computed with.")
    try:
        report = _adapter(kind).validate_python(value)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}"[:160] for one in error.errors(include_url=False)]
    else:
        faults = list(_faults(report))
    if faults:
        more = f"; and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
        raise DataError(f"{where} is invalid: {'; '.join(faults[:_MOST_FAULTS])}{more}.")
    return report


@cache
def _adapter(kind: str) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(_KINDS[kind][0])


def _faults(report: Report) -> Iterator[str]:
    """Inconsistencies between fields."""
    if isinstance(report, EvalReport):
        for one in (report, report.baseline) if report.baseline else (report,):
            lengths = [row.length for row in one.rows]
            if sorted(set(lengths)) != lengths:
                yield "rows: the lengths are not in ascending order"
            if one.protocol not in PROTOCOLS or one.protocol != report.protocol:
                yield f"protocol: {shown(one.protocol)} is unknown, or differs from the baseline's"
    elif isinstance(report, RetrievalReport):
        if any(cell.hits > cell.trials for cell in report.cells):
            yield "cells: more hits than trials"
    elif isinstance(report, RulerReport):
        if len({(cell.task, cell.length) for cell in report.cells}) < len(report.cells):
            yield "cells: a task appears twice at one length"
    else:
        if max(report.score.target, report.score.window, report.score.objective) >= OVERFLOW:
            yield "score: the result overflowed"
        if len(report.inv_freq) != len(report.pretrained_inv_freq):
            yield "inv_freq: length differs from pretrained_inv_freq"
        yield from (
            f"gains: {shown(layer.name)} has heads of different lengths" for layer in report.gains if _uneven(layer)
        )


def _uneven(layer: LayerGains) -> bool:
    phase = layer.phase if any(layer.phase) else layer.log_gain
    widths = {len(row) for row in (*layer.log_gain, *phase)}
    return len(widths) != 1 or 0 in widths or len(phase) != len(layer.log_gain)
