"""Reads reports from JSON. Every value is validated before use."""

import json
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from ropecli.checkpoint.files import read_file
from ropecli.errors import DataError, reason_of, shown
from ropecli.evaluation.report import SCHEMA_VERSION, Report, of_schema_2
from ropecli.tuning.task import OLD_KEYS, TuneReport
from ropecli.tuning.task import SCHEMA_VERSION as TUNE_SCHEMA_VERSION

AnyReport = Report | TuneReport

_VERSIONS = {
    "perplexity": (2, SCHEMA_VERSION),
    "scores": (SCHEMA_VERSION,),
    "retrieval": (2,),
    "ruler": (2,),
    "tune": (TUNE_SCHEMA_VERSION,),
}
"""Supported schema versions of each kind."""
_MOST_FAULTS = 5
"""Maximum number of faults in one message."""
_SCORE_KEYS = {"target", "objective", "documents"}
"""Keys by which a score in tune.json is known, in release 0.2 too."""


def read_reports(paths: Iterable[Path]) -> list[AnyReport]:
    """Read the reports of all files, in order. A file contains one report, or a list as `compare` writes it.

    Raises DataError, which names the file and what was expected.
    """
    reports = [report for path in paths for report in _read_file(path)]
    if not reports:
        raise DataError("The files contain no reports.")
    return reports


def _read_file(path: Path) -> list[AnyReport]:
    value = read_file(path, partial(json.loads, parse_constant=_refuse_constant, object_hook=_convert_tuning))
    if isinstance(value, list):
        return [_read_one(f"{path}, report {index}", report) for index, report in enumerate(value, 1)]
    return [_read_one(f"{path}", value)]


def _refuse_constant(name: str) -> float:
    """name: NaN, Infinity or -Infinity, which Python's parser accepts but JSON does not have."""
    raise ValueError(f"it contains {name}")


def _convert_tuning(value: dict[str, Any]) -> dict[str, Any]:
    """Convert an object of tune.json: keys of release 0.2 get their new names; null in a score becomes infinity.

    JSON has no infinity, so `tune` writes null for a loss that overflows. Other objects stay unchanged.
    """
    is_score = value.keys() >= _SCORE_KEYS
    if is_score or value.get("kind") == "tune":
        value = {**{new: value[old] for old, new in OLD_KEYS.items() if old in value}, **value}
    return {key: math.inf if is_score and item is None else item for key, item in value.items()}


def _read_one(where: str, value: Any) -> AnyReport:
    """where: names the file and the report in it, for messages."""
    from pydantic import TypeAdapter, ValidationError

    report = value if isinstance(value, dict) else {}
    kind, version = report.get("kind"), report.get("schema_version")
    # the first release wrote no kind; str, because a damaged file may have a list there, which cannot be looked up
    known = _VERSIONS.get(str(kind), (SCHEMA_VERSION,))
    if type(version) is int and version not in known:
        next_step = "update ropecli" if version > max(known) else "run the measurement again"
        expected = " and ".join(map(str, known))
        raise DataError(f"{where} has schema_version {shown(version)}, but this release reads {expected}; {next_step}.")
    if str(kind) not in _VERSIONS or version is None:
        raise DataError(
            f"{where} is not a report: its kind is {shown(kind)} and its schema_version {shown(version)}. "
            "Reports are written by `ropecli eval-ppl --output FILE`, `compare`, `passkey`, `needle`, `ruler`, `tune`."
        )
    try:
        expected_type: TypeAdapter[Any] = TypeAdapter(TuneReport if kind == "tune" else Report)
        return expected_type.validate_python(of_schema_2(report) if version == 2 else report)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"[:160] for fault in error.errors(include_url=False)
        ]
        more = f"; and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
        raise DataError(f"{where} is invalid: {'; '.join(faults[:_MOST_FAULTS])}{more}.") from error
    # of_schema_2 converts values without checking them
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise DataError(f"{where} is invalid: {type(error).__name__}: {reason_of(error)[:160]}.") from error
