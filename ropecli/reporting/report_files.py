"""Reads reports from JSON. Every value is validated before use."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
"""Listed in one message."""
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
        text = path.read_text(encoding="utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_constant, object_hook=_tuning_values)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{str(path)[:200]} is not a JSON report: {reason_of(error)}.") from error
    if isinstance(value, list):
        return [_read_one(f"{path}, report {index}", report) for index, report in enumerate(value, 1)]
    return [_read_one(f"{path}", value)]


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
    from pydantic import TypeAdapter, ValidationError

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
    try:
        form: TypeAdapter[Any] = TypeAdapter(TuneReport if kind == "tune" else Report)
        report = form.validate_python(of_schema_2(about) if version == 2 else about)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"[:160] for fault in error.errors(include_url=False)
        ]
        more = f"; and {len(faults) - _MOST_FAULTS} more" if len(faults) > _MOST_FAULTS else ""
        raise DataError(f"{where} is invalid: {'; '.join(faults[:_MOST_FAULTS])}{more}.") from error
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:  # of schema 2
        raise DataError(f"{where} is invalid: {type(error).__name__}: {reason_of(error)[:160]}.") from error
    return report
