"""Reports read back from JSON. Files may come from anyone: every value is checked before anything is drawn from it."""

import json
import math
import stat
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.errors import DataError, reason_of, shown
from ropecli.evaluate.report import SCHEMA_VERSION, EvalReport, RetrievalReport
from ropecli.report.faults import MOST, faults_of_perplexity, faults_of_retrieval
from ropecli.report.tuned.faults import faults_of_tuning
from ropecli.tune.record import SCHEMA_VERSION as TUNE_SCHEMA_VERSION
from ropecli.tune.record import TuneReport

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Report = EvalReport | RetrievalReport | TuneReport

_KINDS: dict[str, type] = {"perplexity": EvalReport, "retrieval": RetrievalReport, "tune": TuneReport}
_VERSIONS = {"tune": TUNE_SCHEMA_VERSION}
"""Of the kinds that count their own."""
_SCORES = ("base", "plain", "begun", "score")
_LARGEST_FILE = 256 * 2**20
_MOST_DIGITS = 30


def read_reports(paths: Iterable[Path]) -> list[Report]:
    """The reports of all files, in their order; a file holds one, or a list of them as `compare` writes.

    Raises DataError, which names the file and what was expected there.
    """
    reports = [report for path in paths for report in _read_file(path)]
    if not reports:
        raise DataError("No report was given.")
    return reports


def _read_file(path: Path) -> list[Report]:
    value = _parse(path, _read_text(path))
    values = value if isinstance(value, list) else [value]
    if not values:
        raise DataError(f"{path} holds an empty list; a report, or a list of reports, was expected.")
    if len(values) > MOST:
        raise DataError(f"{path} holds {len(values)} reports; at most {MOST} are read.")
    several = isinstance(value, list)
    return [_read_one(f"{path}, report {index}" if several else f"{path}", one) for index, one in enumerate(values, 1)]


def _read_text(path: Path) -> str:
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise DataError(f"{path} is no file; a report of `ropecli eval-ppl --output` or the like was expected.")
        if about.st_size > _LARGEST_FILE:
            raise DataError(f"{path} has {about.st_size} bytes; a report of at most {_LARGEST_FILE} was expected.")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8, and so no JSON: {error.reason} at byte {error.start}.") from error
    except (OSError, ValueError) as error:  # a name that holds a null byte is a ValueError
        reason = getattr(error, "strerror", None) or reason_of(error)
        raise DataError(f"{str(path)[:200]!s} cannot be read: {reason}.") from error


def _parse(path: Path, text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_bounded)
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply; a report was expected.") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON as a report is: {reason_of(error)}.") from error


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it holds {name}, which is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds {text[:20]}, which is beyond all numbers")
    return value


def _bounded(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"it holds {text[:20]}…, which is beyond all use")
    return int(text)


def _read_one(where: str, value: Any) -> Report:
    """where: the file, and which report in it."""
    about = value if isinstance(value, dict) else {}
    kind = about.get("kind")
    known = _VERSIONS.get(kind, SCHEMA_VERSION) if isinstance(kind, str) else SCHEMA_VERSION
    version = about.get("schema_version", known)
    if type(version) is not int or version != known:
        newer = type(version) is int and version > known
        step = "update ropecli" if newer else "measure again with this release"
        raise DataError(f"{where} has schema_version {shown(version)}; this release reads {known}: {step}.")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise DataError(
            f"{where} is no report: its 'kind' is {shown(kind)}; 'perplexity', 'retrieval' or 'tune' was expected. "
            "Make one by `ropecli eval-ppl --output FILE`, `compare`, `passkey`, `needle` or `tune`."
        )
    if "schema_version" not in value:
        raise DataError(f"{where} should have schema_version {known}, and has none: measure again with this release.")
    for one in (value, value.get("baseline")):
        # its default would be this machine's own
        if isinstance(one, dict) and "environment" not in one:
            raise DataError(f"{where} does not say by which versions it was made: 'environment' is missing.")
    report = _validated(where, kind, value)
    if faults := _faults(report):
        raise DataError(f"{where} is damaged: {'; '.join(faults[:5])}.")
    return report


def _faults(report: Report) -> list[str]:
    if isinstance(report, EvalReport):
        return faults_of_perplexity(report)
    return faults_of_tuning(report) if isinstance(report, TuneReport) else faults_of_retrieval(report)


def _with_infinities(value: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a tuning report has null for what overflowed, in its scores alone."""
    points = value.get("points")
    scores = {name: _infinite(value[name]) for name in _SCORES if name in value}
    if not isinstance(points, list):
        return {**value, **scores}
    read = [
        {**point, "score": _infinite(point["score"])} if isinstance(point, dict) and "score" in point else point
        for point in points
    ]
    return {**value, **scores, "points": read}


def _infinite(score: Any) -> Any:
    if not isinstance(score, dict):
        return score
    return {key: math.inf if one is None and key != "documents" else one for key, one in score.items()}


def _validated(where: str, kind: str, value: Any) -> Report:
    from pydantic import ValidationError

    try:
        # as JSON, where strict is strict about numbers and strings, but takes a list for a tuple
        return _adapter(kind).validate_json(
            json.dumps(_with_infinities(value) if kind == "tune" else value), strict=True
        )
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        told = "; ".join(f"{'.'.join(map(str, one['loc']))[:80]}: {one['msg'][:120]}" for one in faults[:5])
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise DataError(f"{where} is not a {kind} report as this release writes them: {told}{more}.") from error


@cache
def _adapter(kind: str) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(_KINDS[kind])


def perplexity_reports(reports: Sequence[Report]) -> list[EvalReport]:
    return [report for report in reports if isinstance(report, EvalReport)]


def tune_reports(reports: Sequence[Report]) -> list[TuneReport]:
    return [report for report in reports if isinstance(report, TuneReport)]


def retrieval_reports(reports: Sequence[Report]) -> list[RetrievalReport]:
    return [report for report in reports if isinstance(report, RetrievalReport)]
