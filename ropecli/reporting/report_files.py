"""Reads reports from JSON. Every value is validated before use."""

import json
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from ropecli.checkpoint.files import read_file
from ropecli.errors import DataError, first_fault, shown
from ropecli.evaluation.report import SCHEMA_VERSION, Report
from ropecli.tuning.task import TuneReport

AnyReport = Report | TuneReport

_KINDS = ("perplexity", "recall", "scores", "tune")
_SCORE_KEYS = {"target", "objective", "documents"}
"""Keys by which a score in tune.json is known."""


def read_reports(paths: Iterable[Path]) -> list[AnyReport]:
    """Read the reports of all files, in order. A file contains one report, or a list as `compare` writes it.

    Raises DataError, which names the file and what was expected.
    """
    return [report for path in paths for report in _read_file(path)]


def _read_file(path: Path) -> list[AnyReport]:
    value = read_file(path, partial(json.loads, object_hook=_with_infinity))
    if isinstance(value, list):
        return [_read_one(f"{path}, report {index}", report) for index, report in enumerate(value, 1)]
    return [_read_one(f"{path}", value)]


def _with_infinity(value: dict[str, Any]) -> dict[str, Any]:
    """Convert null in a score of tune.json, a loss that overflows, to infinity. Other objects stay unchanged."""
    is_score = value.keys() >= _SCORE_KEYS
    return {key: math.inf if is_score and item is None else item for key, item in value.items()}


def _read_one(where: str, value: Any) -> AnyReport:
    """where: names the file and the report in it, for messages."""
    from pydantic import TypeAdapter, ValidationError

    report = value if isinstance(value, dict) else {}
    kind, version = report.get("kind"), report.get("schema_version")
    if kind not in _KINDS or version != SCHEMA_VERSION:
        raise DataError(
            f"{where} is not a report of this version of ropecli: its kind is {shown(kind)} and its schema_version "
            f"{shown(version)}. Measure again, with `ropecli eval-ppl --output FILE`, `compare`, `passkey`, `needle`, "
            "`ruler` or `tune`."
        )
    try:
        expected_type: TypeAdapter[Any] = TypeAdapter(TuneReport if kind == "tune" else Report)
        return expected_type.validate_python(report)
    except ValidationError as error:
        raise DataError(f"{where} is invalid: {first_fault(error, 'report')}.") from error
